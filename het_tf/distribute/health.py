"""Finding out which tasks of the cluster still answer, without going through TensorFlow.

A killed process shows up as a failed RPC sooner or later. A process that hangs, or a host that
vanished, shows up as an RPC that never ends, and TensorFlow then waits with it. So while training
runs, every task is asked for a gRPC handshake every few seconds, by threads of our own.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping

from absl import logging

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


# What a client says first: the preface and a SETTINGS frame without settings (RFC 9113, 3.4).
_HTTP2_BEGINS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class TaskState(enum.Enum):
    """What a probe found."""

    UP = "answers"
    REFUSED = "refuses connections: its process is gone"
    SILENT = "does not answer: its process is there, but hangs or has no CPU"
    UNREACHABLE = "cannot be reached: its host does not answer or has no address"


def probe(address: str, timeout: float = PROBE_TIMEOUT) -> TaskState:
    """Begins HTTP/2 with "host:port" and says what came back, within about `timeout` s."""
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)
    except ConnectionError:
        return TaskState.REFUSED
    except OSError:
        return TaskState.UNREACHABLE
    # The kernel accepts connections for a stopped process; only the process sends settings. (By
    # hand: closing a channel of grpcio has been seen to wait without end.)
    with connection:
        try:
            connection.sendall(_HTTP2_BEGINS)
            return TaskState.UP if connection.recv(1) else TaskState.REFUSED
        except ConnectionError:  # The process has ended since it took the connection.
            return TaskState.REFUSED
        except OSError:
            return TaskState.SILENT


def disconnect(address: str) -> int:
    """Closes every connection of this process to "host:port", whatever waits there for an answer.

    Calls over them fail with `tf.errors.UnavailableError`.

    Returns:
      The number of connections. 0 where the system has no /proc.
    """
    host, _, port = address.removeprefix("grpc://").rpartition(":")
    peers = set()
    with contextlib.suppress(OSError):  # The name of a host that is gone may be gone, too.
        peers = {info[4][:2] for info in socket.getaddrinfo(host.strip("[]"), int(port))}
    closed = 0
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # It is no connection, or is gone meanwhile.
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer, peer_port = connection.getpeername()[:2]
                if (peer.removeprefix("::ffff:"), peer_port) in peers:
                    connection.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


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

    All methods may be called from any thread.
    """

    def __init__(
        self,
        addresses: Mapping[Task, str],
        on_down: Callable[[Task, TaskState], None] | None = None,
        on_lost: Callable[[Task, TaskState], None] | None = None,
        lost_after: float = LOST_AFTER,
    ):
        """Creates the monitor; `start` starts it.

        Args:
          addresses: "host:port" of every task to watch.
          on_down: called from the monitor's thread when a task starts to fail its probes; once
            until it answers again.
          on_lost: called from the monitor's thread after every failed probe of a task whose probes
            have all failed for `lost_after` seconds.
          lost_after: seconds after which a task counts as lost.
        """
        self._addresses = dict(addresses)
        self._on_down = on_down
        self._on_lost = on_lost
        self._lost_after = lost_after
        self._lock = threading.Lock()
        self._failing: dict[Task, tuple[float, TaskState]] = {}  # guarded by _lock
        self._users = 0  # guarded by _lock
        self._stop: threading.Event | None = None  # guarded by _lock

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
        threading.Thread(target=self._run, args=(stop,), name="het-health", daemon=True).start()

    def stop(self) -> None:
        """Undoes one `start`; the last one ends the probing."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._stop is not None:
                self._stop.set()
                self._failing.clear()  # Nobody would notice that they answer again.

    def failing(self) -> dict[Task, TaskState]:
        """The tasks whose last probe failed. None between `stop` and `start`."""
        with self._lock:
            return {task: state for task, (_, state) in self._failing.items()}

    def lost(self, task_type: str) -> dict[Task, TaskState]:
        """The tasks of a type whose probes have all failed for `lost_after` seconds."""
        now = time.monotonic()
        with self._lock:
            return {
                task: state
                for task, (since, state) in self._failing.items()
                if task[0] == task_type and now - since >= self._lost_after
            }

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
                return
            first = task not in self._failing
            since = started if first else self._failing[task][0]
            self._failing[task] = (since, state)
        if first and self._on_down is not None:
            self._on_down(task, state)
        if self._on_lost is not None and task in self.lost(task[0]):
            self._on_lost(task, state)
