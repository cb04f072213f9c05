"""Clusters to plan for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from het_tf.runtime.quantities import to_bits_per_second, to_bytes
from het_tf.runtime.validation import INT32_MAX, check_integer, check_number


@dataclasses.dataclass(frozen=True)
class Topology:
    """A cluster. Every task has a host of its own, unless `shared_cores` is given.

    Attributes:
      workers: number of workers.
      servers: number of parameter servers.
      worker_memory: memory of a worker for its caches, in bytes or as a text such as "8GB".
      server_memory: memory of a server for rows.
      bandwidth: rate of every host's network, in bit/s or as a text such as "10Gbit". None: no
        limit.
      latency: seconds that a message takes from host to host.
      server_cores: cores of a server.
      shared_cores: cores that all tasks share, if they are on one host.
    """

    workers: int
    servers: int
    worker_memory: Any = "8GB"  # These are integers (bandwidth: or None) after __post_init__.
    server_memory: Any = "32GB"
    bandwidth: Any = "10Gbit"
    latency: float = 1e-4
    server_cores: int = 16
    shared_cores: float | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "servers", "server_cores"):
            value = check_integer(name, getattr(self, name), 1, INT32_MAX)
            object.__setattr__(self, name, value)
        if self.shared_cores is not None:
            cores = check_number("shared_cores", self.shared_cores, 0.01, INT32_MAX, " or None")
            object.__setattr__(self, "shared_cores", cores)
        for name in ("worker_memory", "server_memory"):
            object.__setattr__(self, name, to_bytes(name, getattr(self, name)))
        if self.bandwidth is not None:
            bandwidth = to_bits_per_second("bandwidth", self.bandwidth)
            object.__setattr__(self, "bandwidth", bandwidth)
        check_number("latency", self.latency, 0, 10)


@dataclasses.dataclass(frozen=True)
class Constraints:
    """What a plan must keep to for a table.

    Attributes:
      servers: indexes of the parameter servers that store the table. None: the plan chooses them,
        and all of a table whose storage has a `memory`.
      min_capacity: smallest capacity of a worker's cache, in rows.
      max_capacity: largest capacity of a worker's cache, in rows. None: no limit.
    """

    servers: Sequence[int] | None = None
    min_capacity: int = 0
    max_capacity: int | None = None

    def __post_init__(self) -> None:
        check_integer("min_capacity", self.min_capacity, 0, INT32_MAX)
        if self.max_capacity is not None:
            check_integer("max_capacity", self.max_capacity, 1, INT32_MAX, " or None")
            if self.max_capacity < self.min_capacity:
                raise ValueError(
                    f"max_capacity = {self.max_capacity} is below min_capacity ="
                    f" {self.min_capacity}"
                )

    def servers_of(self, name: str, topology: Topology) -> tuple[int, ...]:
        """Returns the servers of a table.

        Raises:
          ValueError: a server does not exist, or is given twice.
        """
        if self.servers is None:
            return tuple(range(topology.servers))
        servers = tuple(self.servers) if isinstance(self.servers, Sequence) else ()
        if (
            not servers
            or len(set(servers)) < len(servers)
            or not all(isinstance(s, int) and 0 <= s < topology.servers for s in servers)
        ):
            raise ValueError(
                f"constraints of table {name!r}: servers must be different integers below"
                f" {topology.servers}, not {self.servers!r}"
            )
        return tuple(sorted(servers))
