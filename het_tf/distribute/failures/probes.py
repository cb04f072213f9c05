"""Finding out which tasks of the cluster still answer, without going through TensorFlow.

A killed process shows up as a failed RPC sooner or later. A process that hangs, or a host that
vanished, shows up as an RPC that never ends, and TensorFlow then waits with it. So while training
runs, every task is asked for a gRPC handshake every few seconds, by threads of our own.
"""

from __future__ import annotations

import ctypes
import enum
import math
import threading
import time
from collections.abc import Callable, Mapping

from absl import logging

from het_tf import ops
from het_tf.runtime.threads import call_in_daemon

# (task type, task index), as in ("ps", 0).
Task = tuple[str, int]

PROBE_INTERVAL = 2.0  # seconds between two rounds of probes
PROBE_TIMEOUT = 8.0  # seconds a task may take to answer
_LOOK_INTERVAL = 0.25  # seconds between two looks at what was found, for messages
REPORT_INTERVAL = 5.0  # seconds between two lines about the tasks that are waited for
_MOST_REPORTED = 10  # tasks in such a line

# Default for how many seconds every probe of a task must have failed until it counts as lost.
# Answering a probe takes a server some ms of its CPU: with 20 busy processes beside it on its one
# core, 0.2 to 0.6 s (tests/distribute/programs/slow_server_program.py measures it). A worker or a
# parameter server that hangs holds up training for as long.
LOST_AFTER = 60.0


class TaskState(enum.Enum):
    """What a probe found. In the order of `TaskState` of ops/core/guard/guard.h."""

    UP = "answers"
    REFUSED = "refuses connections: its process is gone"
    SILENT = "does not answer: its process is there, but hangs or has no CPU"
    UNREACHABLE = "cannot be reached: its host does not answer or has no address"


_STATES = tuple(TaskState)
_UP = TaskState.UP


def probe(address: str, timeout: float = PROBE_TIMEOUT) -> TaskState:
    """Begins HTTP/2 with "host:port" and says what came back, within about `timeout` s.

    The kernel accepts connections for a stopped process; only the process answers. (By hand:
    closing a channel of grpcio has been seen to wait without end.)
    """
    return _STATES[ops.guard.het_guard_probe(address.encode(), timeout)]


def wait_until_up(addresses: Mapping[Task, str], within: float = math.inf) -> bool:
    """Waits until every task answers; says every few seconds which do not, where, and why.

    Args:
      addresses: "host:port" of every task.
      within: seconds to wait at most.

    Returns:
      Whether they answer.
    """
    waiting = dict(addresses)
    began = reported = time.monotonic()
    while True:
        probes = {t: call_in_daemon(probe, a, REPORT_INTERVAL * 0.8) for t, a in waiting.items()}
        states = {task: found.result() for task, found in probes.items()}
        waiting = {task: a for task, a in waiting.items() if states[task] is not TaskState.UP}
        if not waiting:
            return True
        now = time.monotonic()
        if now - began >= within:
            return False
        if now - reported >= REPORT_INTERVAL:
            reported = now
            some = list(waiting)[:_MOST_REPORTED]
            lines = [f"{t} {i} at {waiting[t, i]} {states[t, i].value}" for t, i in some]
            more = len(waiting) - len(some)
            logging.warning(
                "waiting for %d of %d tasks, for %.0f s now:\n  %s",
                *(len(waiting), len(addresses), now - began),
                "\n  ".join([*lines, *([f"and {more} more"] if more else [])]),
            )
        time.sleep(0.2)


class HealthMonitor:
    """Probes tasks in the background between `start` and `stop`.

    Connections to a task that is lost are closed, and so the calls over them fail, those too that
    TensorFlow makes with the interpreter's lock held (ops/core/guard/guard.h).

    All methods may be called from any thread.
    """

    def __init__(
        self,
        addresses: Mapping[Task, str],
        on_down: Callable[[Task, TaskState], None] | None = None,
        lost_after: float = LOST_AFTER,
    ):
        """Creates the monitor; `start` starts it.

        Args:
          addresses: "host:port" of every task to watch.
          on_down: called from the monitor's thread when a task starts to fail its probes; once
            until it answers again.
          lost_after: seconds after which a task counts as lost.
        """
        self._addresses = dict(addresses)
        self._on_down = on_down
        self._lost_after = lost_after
        self._lock = threading.Lock()
        self._users = 0  # guarded by _lock
        self._guard: int | None = None  # between `start` and `stop`; guarded by _lock
        self._stop = threading.Event()  # of the thread that began last; guarded by _lock

    def __enter__(self) -> HealthMonitor:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts probing; nested calls are counted."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            addresses = "\n".join(self._addresses.values()).encode()
            self._guard = ops.guard.het_guard_start(
                addresses, self._lost_after, PROBE_INTERVAL, PROBE_TIMEOUT
            )
            self._stop = threading.Event()
            arguments = (self._stop,)
        threading.Thread(target=self._tell, args=arguments, name="het-health", daemon=True).start()

    def stop(self) -> None:
        """Undoes one `start`; the last one ends the probing."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stop.set()
                ops.guard.het_guard_stop(self._guard)
                self._guard = None

    def failing(self) -> dict[Task, TaskState]:
        """The tasks whose last probe failed. None between `stop` and `start`."""
        return {task: state for task, (state, _) in self._found().items() if state is not _UP}

    def lost(self, task_type: str) -> dict[Task, TaskState]:
        """The tasks of a type that fail, and last answered at least `lost_after` seconds ago."""
        return {
            task: state
            for task, (state, silent) in self._found().items()
            if task[0] == task_type and state is not _UP and silent >= self._lost_after
        }

    def seconds_left(self, task: Task) -> float:
        """For how long a task may be silent from now on until it is lost, or at least 2."""
        _, silent = self._found().get(task, (_UP, 0.0))
        return max(2.0, self._lost_after - silent)

    def _found(self) -> dict[Task, tuple[TaskState, float]]:
        """State of each task, and seconds since it was last up. Empty where nothing is probed."""
        states = (ctypes.c_int * len(self._addresses))()
        silent = (ctypes.c_double * len(self._addresses))()
        with self._lock:
            if self._guard is None:
                return {}
            ops.guard.het_guard_found(self._guard, states, silent)
        found = zip((_STATES[state] for state in states), silent, strict=True)
        return dict(zip(self._addresses, found, strict=True))

    def _tell(self, stop: threading.Event) -> None:
        """Calls `on_down`."""
        told: dict[Task, TaskState] = {}
        while not stop.wait(_LOOK_INTERVAL):
            failing = self.failing()
            if stop.is_set():  # Another guard may have begun.
                return
            for task, state in failing.items():
                if task not in told and self._on_down is not None:
                    self._on_down(task, state)
            told = failing
