"""Runs a training and measures its epochs: time, bytes of every host, CPU time of every task."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from netns.job import Job, Program
from netns.network import Network, Traffic

_BENCHMARKS = pathlib.Path(__file__).resolve().parents[1]
_REPOSITORY = _BENCHMARKS.parent
_LOG_TAIL_LINES = 25
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Epoch:
    """What was measured of one epoch. Dicts go by task: "worker0", "ps0", "chief".

    Attributes:
      seconds: from scheduling its first step to the end of its last; of several programs the mean.
      sent: bytes of the host's interface.
      received: bytes of the host's interface.
      cpu_seconds: of the process, all threads, user and system.
      idle_seconds: in which a core of this machine had nothing to do, of all cores together.
      counters: over all workers: of the embedding (`HetEmbedding.cache_stats`); with "dense_" in
        front, of dense replicas (`HetParameterServerStrategy.dense_stats`); with "lookahead_", of
        waiting for rows that were looked up ahead (`het_tf.keras.Model.lookahead_stats`).
      dense_bytes: of the dense layers' weights.
      auc: on the held-out samples at its end; of several programs the mean.
    """

    seconds: float
    sent: dict[str, int]
    received: dict[str, int]
    cpu_seconds: dict[str, float]
    idle_seconds: float
    counters: dict[str, float]
    dense_bytes: int
    auc: float


def train_on_cluster(
    job: Job,
    module: str,
    servers: int,
    rate: str | None,
    delay: float | None,
    python_path: Sequence[str],
    timeout: float,
) -> list[Epoch]:
    """Trains on a cluster of hosts with a rate and a delay.

    The network is without a limit of its rate while an epoch of warming up or a measurement of the
    AUC runs.

    Args:
      job: the training.
      module: the training program, which is the chief.
      servers: number of parameter servers.
      rate: of every host, as `tc` takes it; None: no limit.
      delay: seconds from host to host; None: none.
      python_path: folders for the training program to find modules in, before all others.
      timeout: seconds that an epoch may take.

    Raises:
      RuntimeError: a task ended early or took too long; holds the end of its log.
    """
    with started(job.workers, servers, delay) as cluster, contextlib.ExitStack() as stack:
        program = Program(
            cluster.network.command("chief", [sys.executable, "-m", module, job.to_json()]),
            cluster.chief_environment(python_path),
            cluster.logs.open("chief"),
        )
        stack.callback(program.close)
        check = _Check(cluster.servers, cluster.logs, timeout)
        return _follow(
            {"chief": program},
            {**cluster.servers, "chief": program.process},
            job,
            check,
            lambda training: cluster.network.limit(rate if training else None),
            cluster.network.traffic,
        )


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts whose servers run, and a host "chief" for the training program.

    Attributes:
      network: the hosts.
      addresses: of the tasks, by kind.
      servers: the servers' processes, by task.
      logs: what the tasks print.
    """

    network: Network
    addresses: dict[str, list[str]]
    servers: dict[str, subprocess.Popen[Any]]
    logs: Logs

    def chief_environment(self, python_path: Sequence[str] = ()) -> dict[str, str]:
        """Environment of the training program. python_path: folders with further modules."""
        return _environment(_tf_config(self.addresses, "chief", 0), python_path)


@contextlib.contextmanager
def started(workers: int, servers: int, delay: float | None = None) -> Iterator[Cluster]:
    """Starts the servers of a cluster, each on a host of its own, without a limit of the rate.

    Args:
      workers: number of workers.
      servers: number of parameter servers.
      delay: seconds from host to host; None: none.
    """
    tasks = {"worker": workers, "ps": servers, "chief": 1}
    hosts = [name(*task) for task in _all(tasks)]
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(hosts, delay))
        addresses = {
            kind: [network.address(name(kind, i)) for i in range(count)]
            for kind, count in tasks.items()
        }
        logs = Logs(stack)
        processes: dict[str, subprocess.Popen[Any]] = {}
        for kind, index in _all({"worker": workers, "ps": servers}):
            host = name(kind, index)
            command = [sys.executable, "-m", "het_tf.server", "--exit_with_parent"]
            # As the server does by itself for tasks whose addresses are of one host.
            threads = max(1, len(os.sched_getaffinity(0)) // tasks[kind])
            config = _tf_config(addresses, kind, index)
            processes[host] = subprocess.Popen(
                network.command(host, command),
                env=_environment(config | {"TF_NUM_INTRAOP_THREADS": str(threads)}),
                stdin=subprocess.PIPE,
                stdout=logs.open(host),
                stderr=subprocess.STDOUT,
            )
            stack.callback(_end, processes[host])
        yield Cluster(network, addresses, processes, logs)


def train_alone(job: Job, timeout: float) -> list[Epoch]:
    """As many programs as workers, each training alone, one thread each, at the same time.

    Raises:
      RuntimeError: a program ended early or took too long; holds the end of its log.
    """
    with contextlib.ExitStack() as stack:
        logs = Logs(stack)
        programs = {}
        for index in range(job.workers):
            task = name("worker", index)
            command = [sys.executable, "-m", "netns.train_alone"]
            programs[task] = Program(
                [*command, dataclasses.replace(job, worker=index).to_json()],
                _environment({}),
                logs.open(task),
            )
            stack.callback(programs[task].close)
        processes = {task: program.process for task, program in programs.items()}
        check = _Check({}, logs, timeout)
        return _follow(programs, processes, job, check, lambda training: None, dict)


def name(kind: str, index: int) -> str:
    """Of a task and its host."""
    return "chief" if kind == "chief" else f"{kind}{index}"


class Logs:
    """What the tasks print, in a folder that goes when the stack does."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack = stack
        self._folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def open(self, task: str) -> TextIO:
        return self._stack.enter_context(open(self._folder / task, "w"))

    def tail(self, task: str) -> str:
        lines = (self._folder / task).read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])


class _Check:
    """Raises when a server has ended, or when too long has passed since the last event."""

    def __init__(
        self, servers: dict[str, subprocess.Popen[Any]], logs: Logs, timeout: float
    ) -> None:
        self._servers = servers
        self._logs = logs
        self._timeout = timeout
        self._since = time.monotonic()

    def __call__(self) -> None:
        for task, process in self._servers.items():
            if process.poll() is not None:
                self.fail(task, f"ended with status {process.returncode}")
        if time.monotonic() - self._since > self._timeout:
            raise RuntimeError(f"nothing happened for {self._timeout:g} s")

    def event(self) -> None:
        """Something happened."""
        self._since = time.monotonic()

    def fail(self, task: str, what: str) -> None:
        raise RuntimeError(f"{task} {what}; its log ends:\n{self._logs.tail(task)}")


def _follow(
    programs: dict[str, Program],
    processes: dict[str, subprocess.Popen[Any]],
    job: Job,
    check: _Check,
    limit: Callable[[bool], None],
    read_traffic: Callable[[], dict[str, Traffic]],
) -> list[Epoch]:
    """Leads programs through the epochs of a job, all at the same time."""

    def await_all(event: str) -> list[dict[str, Any]]:
        said = []
        for task, program in programs.items():
            each = program.await_event(check)
            check.event()
            if each is None:
                check.fail(task, f"ended with status {program.process.wait()}")
            assert each["event"] == event, each
            said.append(each)
        return said

    def go_on() -> None:
        for program in programs.values():
            program.go_on()

    epochs = []
    for number in range(job.epochs):
        await_all("begin")
        limit(number > 0)
        traffic, cpu, idle = read_traffic(), _cpu_seconds(processes), _idle_seconds()
        go_on()
        seconds = [each["seconds"] for each in await_all("end")]
        idle = _idle_seconds() - idle
        traffic_after, cpu_after = read_traffic(), _cpu_seconds(processes)
        limit(False)
        go_on()
        reports = await_all("report")
        go_on()
        counters = [each["counters"] for each in reports]
        epochs.append(
            Epoch(
                sum(seconds) / len(seconds),
                {host: traffic_after[host].sent - traffic[host].sent for host in traffic},
                {host: traffic_after[host].received - traffic[host].received for host in traffic},
                {task: cpu_after[task] - cpu[task] for task in cpu},
                idle,
                {n: sum(each[n] for each in counters) for n in counters[0]},
                reports[0]["dense_bytes"],
                sum(each["auc"] for each in reports) / len(reports),
            )
        )
    return epochs


def _cpu_seconds(processes: dict[str, subprocess.Popen[Any]]) -> dict[str, float]:
    """CPU time of processes so far, from /proc/<pid>/stat (proc(5): utime and stime)."""
    seconds = {}
    for task, process in processes.items():
        # The second field, the program's name in brackets, may hold spaces.
        fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        seconds[task] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return seconds


def _idle_seconds() -> float:
    """Idle time of all cores so far, from /proc/stat (proc(5): idle and iowait)."""
    fields = pathlib.Path("/proc/stat").read_text().split(maxsplit=6)
    return (int(fields[4]) + int(fields[5])) / _TICKS_PER_SECOND


def _all(tasks: dict[str, int]) -> list[tuple[str, int]]:
    return [(kind, index) for kind, count in tasks.items() for index in range(count)]


def _tf_config(cluster: dict[str, list[str]], kind: str, index: int) -> dict[str, str]:
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def _environment(more: dict[str, str], python_path: Sequence[str] = ()) -> dict[str, str]:
    path = [*python_path, str(_BENCHMARKS), str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # gRPC would ask the proxy of http_proxy for every task.
        "grpc_proxy": "",
        **more,
    }


def _end(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
