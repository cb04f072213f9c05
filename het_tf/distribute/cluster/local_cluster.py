"""Cluster of server processes on this machine, for tests, demos and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping

import tensorflow as tf
from absl import logging

from het_tf.distribute.failures.probes import TaskState, probe
from het_tf.runtime.broadcast import COORDINATOR
from het_tf.runtime.validation import INT32_MAX, check_integer

# Path of the program that servers are forked from.
TEMPLATE = pathlib.Path(__file__).with_name("fork_server.py")


class ServerProcess:
    """A server's process, with the interface of `subprocess.Popen`.

    Attributes:
      pid: process id.
      returncode: exit status as in `subprocess.Popen`. None while the process runs.
    """

    def __init__(self, pid: int, changed: threading.Condition):
        """Stores the process id, and the condition that is notified when the process ends."""
        self.pid = pid
        self.returncode: int | None = None
        self._changed = changed

    def poll(self) -> int | None:
        """Returns the current `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the process has ended. Returns its `returncode`.

        Raises:
          subprocess.TimeoutExpired: the process did not end within `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.returncode is not None, timeout):
                raise subprocess.TimeoutExpired(f"server process {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ServerTemplate:
    """Process that forks the servers. The servers end with it.

    All methods may be called from any thread.
    """

    def __init__(self, env: Mapping[str, str], log: pathlib.Path):
        """Starts the process, which begins to import TensorFlow.

        Args:
          env: environment variables for the import.
          log: path of the log file for the process's errors.
        """
        self._log = log
        self._changed = threading.Condition()
        self._running: dict[int, ServerProcess] = {}  # guarded by _changed
        self._starting = threading.Lock()  # One request at a time: answers have no request id.
        self._started: queue.SimpleQueue[ServerProcess | None] = queue.SimpleQueue()
        self._socket, other = socket.socketpair()
        with other, open(log, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(TEMPLATE)],
                # OpenBLAS, a library of NumPy, would start threads.
                env={**env, "OPENBLAS_NUM_THREADS": "1"},
                stdin=other.fileno(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process.
            )
        threading.Thread(target=self._listen, name="het-servers", daemon=True).start()

    def start(self, env: Mapping[str, str], log: pathlib.Path, timeout: float) -> ServerProcess:
        """Starts a server.

        Args:
          env: environment variables of the server. TF_CONFIG names its task.
          log: path of the server's log.
          timeout: seconds to wait for the import of TensorFlow.

        Raises:
          RuntimeError: TensorFlow could not be imported, or not within `timeout` seconds.
        """
        request = json.dumps({"env": dict(env), "log": os.path.abspath(log)}).encode() + b"\n"
        with self._starting:
            try:
                self._socket.sendall(request)
                process = self._started.get(timeout=timeout)
            except OSError:
                process = None
            except queue.Empty:
                raise self._error(f"took more than {timeout:g} s") from None
        if process is None:
            raise self._error(f"exited with status {self._process.wait()}")
        return process

    def _error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"The process that imports TensorFlow for the servers {what}. Its log, {self._log}:\n"
            f"{self._log.read_text(errors='replace')[-3000:]}"
        )

    def close(self) -> None:
        """Kills the process and all servers."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        with self._socket, contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._note(json.loads(line))
        # The process has ended, and its servers with it.
        with self._changed:
            for process in self._running.values():
                process.returncode = -signal.SIGKILL
            self._running.clear()
            self._changed.notify_all()
        self._started.put(None)

    def _note(self, message: Mapping[str, int]) -> None:
        with self._changed:
            if "started" in message:
                process = ServerProcess(message["started"], self._changed)
                self._running[process.pid] = process
                self._started.put(process)
            else:
                self._running.pop(message["ended"]).returncode = message["status"]
                self._changed.notify_all()


_LOG_TAIL_LINES = 30
_REPORT_INTERVAL = 15.0  # seconds between two log lines about a server that does not listen yet
_HOST = "localhost"


class LocalCluster:
    """Worker and parameter server processes on localhost, with this process as the chief.

    Every task is a separate process that works as `python -m het_tf.server`. It is forked from a
    process that has imported TensorFlow. All tasks end with the `with` block, and also when this
    process dies inside the block.

        with LocalCluster(num_workers=2, num_ps=2) as cluster:
            strategy = HetParameterServerStrategy(cluster.resolver)

    TensorFlow connects a process to one cluster at a time. The end of the `with` block disconnects
    this process. All objects on the cluster are then gone, and another cluster can be started.
    """

    def __init__(
        self,
        num_workers: int = 2,
        num_ps: int = 2,
        log_dir: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 600.0,
    ):
        """Stores the arguments. `start`, or entering the context, starts the cluster.

        Args:
          num_workers: number of worker processes, at least 1.
          num_ps: number of parameter server processes, at least 1.
          log_dir: folder of the logs: `<task type>-<index>.log` of every task, and `servers.log` of
            the process that the tasks are forked from. None: a new temporary folder, which the
            attribute `log_dir` names. The logs are never deleted.
          env: environment variables for the servers, in addition to those of this process.
          start_timeout: largest time in seconds for importing TensorFlow, and then for every server
            to listen. The import needs 3 s of CPU. If 20 other processes use the same core, it
            takes minutes.

        Raises:
          ValueError: an argument is out of range. The message names it.
        """
        num_workers = check_integer("num_workers", num_workers, 1, INT32_MAX)
        num_ps = check_integer("num_ps", num_ps, 1, INT32_MAX)
        self._num_tasks = {"ps": num_ps, "worker": num_workers}
        self._log_dir_given = log_dir
        self._env = dict(env or {})
        self._start_timeout = start_timeout
        self._processes: dict[tuple[str, int], ServerProcess] = {}
        self._template: ServerTemplate | None = None
        self._reserved: list[socket.socket] = []
        self._cluster: dict[str, list[str]] = {}
        self._log_dir: pathlib.Path | None = None
        self._is_idle: weakref.WeakMethod[Callable[[], bool]] | None = None
        self._on_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._had_faults = False

    # Life cycle.

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts every task and waits until all of them listen.

        Raises:
          RuntimeError: a server died or did not listen in time. The message has the end of its log.
        """
        if self._processes:
            raise RuntimeError("LocalCluster is already running.")
        if self._log_dir_given is None:
            self._log_dir = pathlib.Path(tempfile.mkdtemp(prefix="het_tf_cluster_"))
        else:
            self._log_dir = pathlib.Path(self._log_dir_given)
            self._log_dir.mkdir(parents=True, exist_ok=True)
        self._cluster = {
            task_type: [self._reserve_address() for _ in range(count)]
            for task_type, count in self._num_tasks.items()
        }
        try:
            tasks = [(t, i) for t, count in self._num_tasks.items() for i in range(count)]
            self._template = ServerTemplate(self._server_env(), self._log_dir / "servers.log")
            for task_type, index in tasks:
                self._spawn(task_type, index)
            for task_type, index in tasks:
                self._wait_until_listening(task_type, index)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills every task that still runs and frees its port. May be called twice."""
        self._disconnect()
        for method in self._on_close:
            if (on_close := method()) is not None:
                on_close()
        self._on_close.clear()
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()  # SIGKILL also ends a stopped (SIGSTOP) process, unlike SIGTERM.
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        if self._template is not None:
            self._template.close()
            self._template = None
        for reserved in self._reserved:
            reserved.close()
        self._reserved.clear()

    # Interface for the strategy.

    @property
    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The cluster resolver for `HetParameterServerStrategy`, with this process as the chief.

        Raises:
          RuntimeError: the cluster is not running.
        """
        if not self._processes:
            raise RuntimeError(
                "The LocalCluster is not running: use it as `with LocalCluster(...) as cluster:`, "
                "or call its start()."
            )
        return LocalClusterResolver(self)

    def attach(self, is_idle: Callable[[], bool], on_close: Callable[[], None]) -> None:
        """Registers a strategy for `close`. The strategy calls this.

        The cluster holds weak references only.

        Args:
          is_idle: method of the strategy. Returns whether the strategy is idle.
          on_close: method of the strategy. It is called when the cluster is closed.
        """
        self._is_idle = weakref.WeakMethod(is_idle)
        self._on_close.append(weakref.WeakMethod(on_close))

    @property
    def addresses(self) -> dict[str, list[str]]:
        """The addresses ("host:port") of the tasks, by task type ("worker", "ps")."""
        return {task_type: list(tasks) for task_type, tasks in self._cluster.items()}

    @property
    def log_dir(self) -> pathlib.Path | None:
        """The folder of the tasks' logs. None before the first start."""
        return self._log_dir

    def __repr__(self) -> str:
        """Shows the tasks, their addresses and the folder of their logs."""
        return f"LocalCluster({self._cluster or self._num_tasks}, log_dir={str(self._log_dir)!r})"

    def describe(self, task_type: str, index: int) -> str:
        """Returns sentences about the state of a task's process and the path of its log."""
        process = self._processes.get((task_type, index))
        status = None if process is None else process.poll()
        if process is None or status is not None:
            what = "has ended" if status is None else f"exited with status {status}"
        else:
            what = f"(process {process.pid}) lives"
        return (
            f"The server of {task_type} {index} {what}. Its log: {self._log_path(task_type, index)}"
        )

    # Faults.

    def process(self, task_type: str, index: int) -> ServerProcess:
        """Returns the process of a task.

        Its `pid`, `poll`, `wait`, `send_signal`, `kill` and `terminate` work as those of
        `subprocess.Popen`.

        Raises:
          ValueError: there is no such task.
        """
        try:
            return self._processes[task_type, index]
        except KeyError:
            raise ValueError(
                f"no task {task_type} {index!r} in this cluster of "
                f"{self._num_tasks['worker']} worker(s) and {self._num_tasks['ps']} ps; "
                "is the cluster running?"
            ) from None

    def kill_worker(self, index: int) -> None:
        """Kills a worker with SIGKILL, like a crash, and waits until the process is gone."""
        self._signal("worker", index, signal.SIGKILL)

    def kill_ps(self, index: int) -> None:
        """Kills a parameter server with SIGKILL, like a crash, and waits until it is gone."""
        self._signal("ps", index, signal.SIGKILL)

    def restart_worker(self, index: int) -> None:
        """Restarts a worker at its old address. Kills the process first if it still runs."""
        self._restart("worker", index)

    def restart_ps(self, index: int) -> None:
        """Restarts a parameter server at its old address, without its variables and tables."""
        self._restart("ps", index)

    def terminate_worker(self, index: int) -> None:
        """Ends a worker with SIGTERM, as a job scheduler does, and waits until it is gone."""
        self._signal("worker", index, signal.SIGTERM)

    def log(self, task_type: str, index: int) -> str:
        """Returns the whole output of a task, over all of its restarts.

        Raises:
          ValueError: there is no such task.
        """
        if self._log_dir is None or not 0 <= index < self._num_tasks.get(task_type, 0):
            self.process(task_type, index)
        return self._log_path(task_type, index).read_text(errors="replace")

    def _disconnect(self) -> None:
        # Without this, TensorFlow logs an error for every function and tensor that it cannot remove
        # from the dead servers. It is done only if all tasks answer and no closure is in flight: a
        # coordinator that is busy with a lost worker would crash this process.
        is_idle = self._is_idle() if self._is_idle is not None else None
        self._is_idle = None
        if is_idle is None or self._had_faults:
            return
        addresses = [address for tasks in self._cluster.values() for address in tasks]
        if any(probe(address) is not TaskState.UP for address in addresses):
            return
        if not is_idle():
            return
        tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec({}), job_name=COORDINATOR)

    def _reserve_address(self) -> str:
        # The socket is bound with SO_REUSEPORT and does not listen. No other process gets the port.
        # The server uses the same option and can bind the port, too, now and after a restart.
        reserved = socket.socket(socket.AF_INET6 if _ipv6() else socket.AF_INET)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", 0))
        self._reserved.append(reserved)
        return f"{_HOST}:{reserved.getsockname()[1]}"

    def _log_path(self, task_type: str, index: int) -> pathlib.Path:
        assert self._log_dir is not None
        return self._log_dir / f"{task_type}-{index}.log"

    def _server_env(self) -> dict[str, str]:
        env = {**os.environ, "TF_GRPC_REUSE_PORT": "1", **self._env}
        # The servers must find the het_tf that this process imported, installed or not.
        package_root = str(pathlib.Path(__file__).resolve().parents[3])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH")]))
        return env

    def _spawn(self, task_type: str, index: int) -> None:
        env = self._server_env()
        env["TF_CONFIG"] = json.dumps(
            {"cluster": self._cluster, "task": {"type": task_type, "index": index}}
        )
        self._processes[task_type, index] = self._template.start(
            env, self._log_path(task_type, index), self._start_timeout
        )

    def _wait_until_listening(self, task_type: str, index: int) -> None:
        process = self._processes[task_type, index]
        address = self._cluster[task_type][index]
        host, _, port = address.rpartition(":")
        began = reported = time.monotonic()
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), timeout=1.0).close()
                return
            status = process.poll()
            now = time.monotonic()
            if now - reported >= _REPORT_INTERVAL:
                reported = now
                logging.warning(
                    "waiting for %s %d to listen on %s, for %.0f s now. %s",
                    *(task_type, index, address, now - began),
                    self.describe(task_type, index),
                )
            if status is not None or now - began > self._start_timeout:
                what = (
                    f"exited with status {status}"
                    if status is not None
                    else f"did not listen on {address} within {self._start_timeout:g} s"
                )
                lines = self.log(task_type, index).splitlines()[-_LOG_TAIL_LINES:]
                raise RuntimeError(
                    f"The server of {task_type} {index} {what}. The end of its log, "
                    f"{self._log_path(task_type, index)}:\n"
                    + "\n".join(f"  {line}" for line in lines)
                )
            time.sleep(0.05)

    def _signal(self, task_type: str, index: int, number: signal.Signals) -> None:
        process = self.process(task_type, index)
        self._had_faults = True
        process.send_signal(number)
        process.wait()

    def _restart(self, task_type: str, index: int) -> None:
        self._signal(task_type, index, signal.SIGKILL)
        self._spawn(task_type, index)
        self._wait_until_listening(task_type, index)


class LocalClusterResolver(tf.distribute.cluster_resolver.SimpleClusterResolver):
    """Cluster resolver of a `LocalCluster`, with its worker and ps tasks."""

    def __init__(self, cluster: LocalCluster):
        """Creates the resolver of a running cluster."""
        super().__init__(tf.train.ClusterSpec(cluster.addresses), rpc_layer="grpc")
        self.local_cluster = cluster


def _ipv6() -> bool:
    """Whether this machine has IPv6. If so, gRPC servers bind IPv6 wildcard sockets."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False
