"""Probes of the cluster's tasks, independent of TensorFlow.

An RPC to a killed process fails sooner or later. An RPC to a process that hangs, or to a host that
vanished, never ends, and TensorFlow waits forever. While training runs, threads of het_tf therefore
ask every task for a gRPC handshake every few seconds.
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
_LOOK_INTERVAL = 0.25  # seconds between two checks of the results, for log messages
REPORT_INTERVAL = 5.0  # seconds between two log lines about missing tasks
_MOST_REPORTED = 10  # largest number of tasks in such a line

# Default of `lost_after`: seconds of failed probes after which a task is lost. A task that hangs
# delays training for this time. A server needs a few ms of CPU to answer a probe. With 20 busy
# processes on its only core, an answer takes 0.2 to 0.6 s
# (tests/distribute/programs/slow_server_program.py measures this).
LOST_AFTER = 60.0


class TaskState(enum.Enum):
    """Result of a probe, in the order of `TaskState` in ops/core/guard/guard.h."""

    UP = "answers"
    REFUSED = "refuses connections: its process is gone"
    SILENT = "does not answer: its process is there, but hangs or has no CPU"
    UNREACHABLE = "cannot be reached: its host does not answer or has no address"


_STATES = tuple(TaskState)
_UP = TaskState.UP


def probe(address: str, timeout: float = PROBE_TIMEOUT) -> TaskState:
    """Starts an HTTP/2 handshake with "host:port" and returns the result within `timeout` seconds.

    A connection alone proves nothing, because the kernel accepts connections for a stopped process.
    The handshake does not use grpcio, because closing a grpcio channel can hang.
    """
    return _STATES[ops.guard.het_guard_probe(address.encode(), timeout)]


def wait_until_up(addresses: Mapping[Task, str], within: float = math.inf) -> bool:
    """Waits until every task answers. Logs the missing tasks every few seconds.

    Args:
      addresses: "host:port" of every task.
      within: largest time to wait, in seconds.

    Returns:
      Whether every task answers.
    """
    waiting = dict(addresses)
    began = reported = time.monotonic()
    while True:
        probes = {t: call_in_daemon(probe, a, REPORT_INTERVAL * 0.8) for t, a in waiting.items()}
        states = {task: call.result() for task, call in probes.items()}
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

    The monitor closes connections to lost tasks, so that calls over them fail. This includes calls
    during which TensorFlow holds the interpreter's lock (ops/core/guard/guard.h).

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
          on_down: called from the monitor's thread when a task starts to fail its probes. It is
            called again only after the task has answered.
          lost_after: seconds without an answer after which a task is lost.
        """
        self._addresses = dict(addresses)
        self._on_down = on_down
        self._lost_after = lost_after
        self._lock = threading.Lock()
        self._users = 0  # guarded by _lock
        self._guard: int | None = None  # set between `start` and `stop`; guarded by _lock
        self._stop = threading.Event()  # stops the newest thread; guarded by _lock

    def __enter__(self) -> HealthMonitor:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts probing. Calls may be nested."""
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
        """Undoes one `start`. The last `stop` ends the probing."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stop.set()
                ops.guard.het_guard_stop(self._guard)
                self._guard = None

    def failing(self) -> dict[Task, TaskState]:
        """Returns the tasks whose last probe failed. Empty unless started."""
        return {task: state for task, (state, _) in self._found().items() if state is not _UP}

    def lost(self, task_type: str) -> dict[Task, TaskState]:
        """Returns the tasks of a type that last answered at least `lost_after` seconds ago."""
        return {
            task: state
            for task, (state, silent) in self._found().items()
            if task[0] == task_type and state is not _UP and silent >= self._lost_after
        }

    def seconds_left(self, task: Task) -> float:
        """Returns the seconds after which a silent task will be lost, at least 2."""
        _, silent = self._found().get(task, (_UP, 0.0))
        return max(2.0, self._lost_after - silent)

    def _found(self) -> dict[Task, tuple[TaskState, float]]:
        """Returns the state of every task and the seconds since its last answer.

        Empty unless started.
        """
        states = (ctypes.c_int * len(self._addresses))()
        silent = (ctypes.c_double * len(self._addresses))()
        with self._lock:
            if self._guard is None:
                return {}
            ops.guard.het_guard_found(self._guard, states, silent)
        results = zip((_STATES[state] for state in states), silent, strict=True)
        return dict(zip(self._addresses, results, strict=True))

    def _tell(self, stop: threading.Event) -> None:
        """Calls `on_down` for tasks that start to fail. Runs in the monitor's thread."""
        told: dict[Task, TaskState] = {}
        while not stop.wait(_LOOK_INTERVAL):
            failing = self.failing()
            if stop.is_set():  # `failing` may have used the guard of a later `start`.
                return
            for task, state in failing.items():
                if task not in told and self._on_down is not None:
                    self._on_down(task, state)
            told = failing
