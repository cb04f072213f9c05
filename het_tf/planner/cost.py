"""How long a step takes: the time of its parts, and which of them bounds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# Of the rate, what is left for payload in packets of 1,500 bytes.
_PAYLOAD_SHARE = 1448 / 1514


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What messages cost on a kind of machine, beyond the caches' and tables' own work.

    `het_tf.planner.calibrate` measures it. The defaults were measured on a core of an AMD EPYC.

    Attributes:
      worker_step: CPU time of a worker for a step, whatever its messages, in seconds.
      worker_message: CPU time of a worker for a message and its reply.
      worker_byte: CPU time of a worker for a byte sent or received.
      worker_part: CPU time of a worker for a table's part of a message to a server.
      server_message: CPU time of a server for a message and its reply.
      server_part: CPU time of a server for a table's part of a message.
      server_byte: CPU time of a server for a byte sent or received.
      chief_step: CPU time of the training program for a step of a worker.
    """

    worker_step: float = 4e-4
    worker_message: float = 3e-4
    worker_byte: float = 8e-10
    worker_part: float = 6e-6
    server_message: float = 8e-4
    server_part: float = 2e-5
    server_byte: float = 4e-10
    chief_step: float = 6e-4

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be a number of seconds from 0 to 1, not {value!r}")


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step of one worker costs. Seconds and bytes.

    Attributes:
      compute: CPU time of the model.
      handling_worker: CPU time that messages cost the worker.
      handling_servers: CPU time that the step costs each server.
      chief: CPU time of the training program.
      down: bytes from each server.
      up: bytes to each server.
      ahead: whether its messages are under way while other steps are computed.
    """

    compute: float
    handling_worker: float
    handling_servers: Sequence[float]
    chief: float
    down: Sequence[float]
    up: Sequence[float]
    ahead: bool

    @property
    def worker(self) -> float:
        """CPU time of the worker."""
        return self.compute + self.handling_worker


def response(customers: int, think: float, demands: Sequence[float]) -> float:
    """Returns the seconds of a round of a closed queueing network.

    Exact mean value analysis (Reiser and Lavenberg, J. ACM 27(2), 1980).

    Args:
      customers: number of customers, who start over after a round.
      think: seconds of a round that are spent at no station.
      demands: seconds of service at each station.
    """
    queues = [0.0] * len(demands)
    total = think
    for n in range(1, customers + 1):
        times = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        total = think + sum(times)
        queues = [n * time / total for time in times] if total else queues
    return total


def link_demands(step: Step, bandwidth: float | None) -> tuple[list[float], float]:
    """Returns the time of the busiest server's link, down and up, and of the other servers' links.

    Args:
      step: the step.
      bandwidth: bit/s. None: no limit.
    """
    if bandwidth is None:
        return [], 0.0
    per_byte = _byte_seconds(bandwidth)
    busiest = busiest_server(step)
    others = sum(step.down) + sum(step.up) - step.down[busiest] - step.up[busiest]
    return [step.down[busiest] * per_byte, step.up[busiest] * per_byte], others * per_byte


def server_load(cpu: float, num_bytes: float, bandwidth: float | None, cores: float) -> float:
    """Returns the seconds for which work keeps a server busy: its cores, and then its link.

    Args:
      cpu: CPU seconds.
      num_bytes: bytes from and to the server.
      bandwidth: bit/s. None: no limit.
      cores: cores of the server.
    """
    return cpu / cores + num_bytes * _byte_seconds(bandwidth)


def _byte_seconds(bandwidth: float | None) -> float:
    """Returns the time of a byte of payload on a link. `bandwidth` None: 0."""
    return 0.0 if bandwidth is None else 8 / (bandwidth * _PAYLOAD_SHARE)


def busiest_server(step: Step) -> int:
    """Returns the index of the server that the most bytes go to and come from."""
    return max(range(len(step.down)), key=lambda s: step.down[s] + step.up[s])


def step_time(
    step: Step,
    workers: int,
    bandwidth: float | None,
    latency: float = 0.0,
    server_cores: float = 1,
    shared_cores: float | None = None,
) -> tuple[float, dict[str, float]]:
    """Returns the time of a step, and the shortest time that each part of the cluster allows.

      worker    CPU time of the worker
      network   a round of all workers over the busiest server's link and cores, as a closed
                queueing network: a worker's messages pass the link of the busiest server in both
                directions, and the server's cores. With look-ahead, the worker computes meanwhile,
                with one exchange under way at a time. Without, it computes before.
      chief     CPU time of the training program for a step of every worker
      cores     CPU time of all tasks, if they share a host. The servers' cores are then not in
                "network".

    The step takes the longest of these times. With look-ahead on shared cores, it takes at least
    half a round of two customers for each worker over the cores and the busiest server's link: one
    computes, and the other one's messages are under way.

    Args:
      step: the step.
      workers: number of workers.
      bandwidth: rate of every host, bit/s. None: no limit.
      latency: seconds that a message takes from host to host.
      server_cores: cores of a server.
      shared_cores: cores that all tasks share. None: every task has a host of its own.
    """
    links, others = link_demands(step, bandwidth)
    away = others + 2 * latency
    servers = [] if shared_cores else [max(step.handling_servers) / server_cores]
    parts = {
        "worker": step.worker,
        "network": response(
            workers, away if step.ahead else away + step.compute, [*links, *servers]
        ),
        "chief": workers * step.chief,
    }
    least = 0.0
    if shared_cores:
        cpu = (step.worker + sum(step.handling_servers) + step.chief) / shared_cores
        parts["cores"] = workers * cpu
        if step.ahead:
            least = response(2 * workers, away, [cpu, *links]) / 2
    return max(least, *parts.values()), parts
