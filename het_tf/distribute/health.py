"""Finding out which tasks of the cluster still answer, without going through TensorFlow.

A killed process shows up as a failed RPC sooner or later. A process that hangs, or a host that
vanished, shows up as an RPC that never ends, and TensorFlow then waits with it. So while training
runs, every task is asked for a gRPC handshake every few seconds, by threads of our own.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable, Mapping

from absl import logging

from het_tf import ops
from het_tf._threads import call_in_daemon

# (task type, task index), as in ("ps", 0).
Task = tuple[str, int]

PROBE_INTERVAL = 2.0  # seconds between two rounds of probes
PROBE_TIMEOUT = 8.0  # seconds a task may take to answer
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


def probe(address: str, timeout: float = PROBE_TIMEOUT) -> TaskState:
    """Begins HTTP/2 with "host:port" and says what came back, within about `timeout` s.

    The kernel accepts connections for a stopped process; only the process answers. (By hand:
    closing a channel of grpcio has been seen to wait without end.)
    """
    return tuple(TaskState)[ops.guard.het_guard_probe(address.encode(), timeout)]


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
        self._failing: dict[Task, TaskState] = {}  # guarded by _lock
        self._answered: dict[Task, float] = {}  # when each was last seen up; guarded by _lock
        self._users = 0  # guarded by _lock
        self._stop: threading.Event | None = None  # guarded by _lock
        self._guard: int | None = None  # guarded by _lock

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
            self._stop = threading.Event()
            stop = self._stop
            self._answered = dict.fromkeys(self._addresses, time.monotonic())
            addresses = "\n".join(self._addresses.values()).encode()
            self._guard = ops.guard.het_guard_start(
                addresses, self._lost_after, PROBE_INTERVAL, PROBE_TIMEOUT
            )
        threading.Thread(target=self._run, args=(stop,), name="het-health", daemon=True).start()

    def stop(self) -> None:
        """Undoes one `start`; the last one ends the probing."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._stop is not None:
                self._stop.set()
                ops.guard.het_guard_stop(self._guard)
                self._failing.clear()  # Nobody would notice that they answer again.
                self._answered.clear()

    def failing(self) -> dict[Task, TaskState]:
        """The tasks whose last probe failed. None between `stop` and `start`."""
        with self._lock:
            return dict(self._failing)

    def lost(self, task_type: str) -> dict[Task, TaskState]:
        """The tasks of a type whose last answer was `lost_after` seconds ago, and which fail now.

        Also where no probe was made meanwhile, since the interpreter's lock was held.
        """
        now = time.monotonic()
        with self._lock:
            return {
                task: state
                for task, state in self._failing.items()
                if task[0] == task_type and now - self._answered[task] >= self._lost_after
            }

    def seconds_left(self, task: Task) -> float:
        """For how long a task may be silent from now on until it is lost, or at least 2."""
        with self._lock:
            silent = time.monotonic() - self._answered.get(task, math.inf)
        return max(2.0, self._lost_after - max(0.0, silent))

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(PROBE_INTERVAL):
            started = time.monotonic()
            probes = [(task, call_in_daemon(probe, a)) for task, a in self._addresses.items()]
            for task, found in probes:
                self._record(task, found.result(), started, stop)

    def _record(self, task: Task, state: TaskState, started: float, stop: threading.Event) -> None:
        with self._lock:
            if stop.is_set():
                return
            if state is TaskState.UP:
                self._failing.pop(task, None)
                self._answered[task] = started
                return
            first = task not in self._failing
            self._failing[task] = state
        if first and self._on_down is not None:
            self._on_down(task, state)
