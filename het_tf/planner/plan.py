"""Plans: what every table gets, and what a step will cost."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from het_tf.layers.embedding import embeddings_of
from het_tf.planner.cost import Calibration, Step, server_load, step_time
from het_tf.planner.memory_split import Curve, most_valuable
from het_tf.planner.placement import TableLoad, placements
from het_tf.planner.replay import Traffic, replay
from het_tf.planner.statistics import Statistics
from het_tf.planner.tables import EmbeddingConfig, tables_of
from het_tf.planner.topology import Constraints, Topology
from het_tf.row_storage import LEAST_MEMORY
from het_tf.runtime.quantities import bytes_text
from het_tf.runtime.validation import INT32_MAX, check_integer, check_number
from het_tf.storage.files import reading, replacing

_VERSION = 2
_DENSE_INTERVAL = 64  # steps between exchanges of a grown network's dense variables
_FLOAT_BYTES = 4
_MOST_WORKERS = 32  # of a replay
_INDEX_BYTES = 28  # of a row on a disk, in memory
# A placement is allowed if its busiest server and link need at most so many times the time that
# they need with all tables divided, or so small a part of the step. Times on networks are predicted
# up to 3 times too short (8 workers, 1 Gbit/s, all rows on one server: 141 ms a step, not 50).
_AS_EVEN, _FREE = 1.1, 0.25
_AS_FAST = 1.01  # times the shortest step. Of these placements, the one with least CPU time wins.


class DoesNotFitError(ValueError):
    """The tables need more memory than the topology has."""


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """What a plan says of one table.

    Attributes:
      servers: indexes of the parameter servers that store the table.
      capacity: rows of a worker's cache. None: no cache.
      rows: number of rows of the table.
      traffic: what a step of one worker costs.
      server_bytes: memory of all rows on the servers together.
      memory: bytes of rows in memory on each of the servers, of a table with a storage. None: all
        rows are in memory.
      disk_share: share of the ids whose row is not among the rows in memory.
    """

    servers: tuple[int, ...]
    capacity: int | None
    rows: int
    traffic: Traffic
    server_bytes: float
    memory: int | None = None
    disk_share: float = 0.0

    @property
    def worker_bytes(self) -> float:
        """Memory of a worker's cache when it is full."""
        return min(self.capacity or 0, self.rows) * self.traffic.worker_row_bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan from `plan`.

    Attributes:
      topology: the cluster.
      batch_size: examples of a step of one worker.
      tables: plan of every table, by the name of its layer.
      step_seconds: time of a step of one worker.
      parts: shortest time of a step that each part of the cluster allows, in seconds. See
        `het_tf.planner.cost.step_time`.
      bytes_up: bytes of a worker's step to each server, with those of the dense variables.
      bytes_down: the same from each server.
      server_seconds: CPU time of each server for a step of one worker.
    """

    topology: Topology
    batch_size: int
    tables: Mapping[str, TablePlan]
    step_seconds: float
    parts: Mapping[str, float]
    bytes_up: Sequence[float]
    bytes_down: Sequence[float]
    server_seconds: Sequence[float]

    @property
    def bound(self) -> str:
        """The part of the cluster that bounds the step: a key of `parts`."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def examples_per_second(self) -> float:
        """Examples that all workers train in a second."""
        return self.topology.workers * self.batch_size / self.step_seconds

    @property
    def server_bytes(self) -> list[float]:
        """Memory of the rows of every server."""
        used = [0.0] * self.topology.servers
        for table in self.tables.values():
            for server in table.servers:
                used[server] += table.server_bytes / len(table.servers)
        return used

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest server's messages, divided by the mean of all servers."""
        each = np.add(self.bytes_up, self.bytes_down)
        return float(each.max() / each.mean())

    def table_of(self, *names: str) -> TablePlan:
        """Returns the plan of a table that has one of these names.

        Raises:
          ValueError: the plan has none of the names.
        """
        for name in names:
            if name in self.tables:
                return self.tables[name]
        raise ValueError(f"the plan has no table {names[0]!r}, but {sorted(self.tables)}")

    def check_servers(self, servers: int) -> None:
        """Raises a ValueError if the plan is for another number of parameter servers."""
        if servers != self.topology.servers:
            raise ValueError(
                f"plan is for {self.topology.servers} parameter servers, but the cluster has"
                f" {servers}"
            )

    def report(self) -> str:
        """Returns tables of the servers, the layers and the time of a step, as text."""
        from het_tf.planner.report import report

        return report(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, for `load`."""
        content = dataclasses.asdict(self) | {"version": _VERSION}
        with replacing(os.fspath(path)) as (file,):
            file.write(json.dumps(content, indent=1).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a file of `save`.

        Raises:
          ValueError: the file has no plan, or one of another version.
        """
        with reading(os.fspath(path)) as file:
            try:
                content = json.loads(file.read())
                if content.pop("version") != _VERSION:
                    raise ValueError("another version")
                content["topology"] = Topology(**content["topology"])
                content["tables"] = {
                    name: TablePlan(
                        tuple(table["servers"]),
                        table["capacity"],
                        table["rows"],
                        Traffic(**table["traffic"]),
                        table["server_bytes"],
                        table["memory"],
                        table["disk_share"],
                    )
                    for name, table in content["tables"].items()
                }
                for name in ("bytes_up", "bytes_down", "server_seconds"):
                    content[name] = tuple(content[name])
                return cls(**content)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{os.fspath(path)} has no plan of het_tf: {error}") from error


class Planner:
    """Makes plans of one training for several clusters. Replays that they share run once."""

    def __init__(
        self,
        model_or_configs: keras.Model | Sequence[EmbeddingConfig],
        statistics: Statistics,
        batch_size: int,
        *,
        step_seconds: float,
        constraints: Mapping[str, Constraints] | None = None,
        steps_per_epoch: int | None = None,
        dense_parameters: int | None = None,
        calibration: Calibration | None = None,
    ):
        """Checks and stores the arguments, which are those of `plan`."""
        if not isinstance(statistics, Statistics):
            raise ValueError(f"statistics must be a Statistics, not {statistics!r}")
        tables = tables_of(model_or_configs)
        missing = tables.keys() - statistics.tables.keys()
        if missing:
            raise ValueError(
                f"statistics have no ids of the tables {sorted(missing)}, only of"
                f" {sorted(statistics.tables)}"
            )
        self._constraints = dict(constraints or {})
        unknown = self._constraints.keys() - tables.keys()
        if unknown:
            raise ValueError(
                f"constraints name {sorted(unknown)}, but the tables are {sorted(tables)}"
            )
        check_number("step_seconds", step_seconds, 1e-9, 1e6)
        if steps_per_epoch is not None:
            check_integer("steps_per_epoch", steps_per_epoch, 1, INT32_MAX, " or None")
        if dense_parameters is None:
            dense_parameters = _dense_parameters(model_or_configs)
        self._tables, self._statistics = tables, statistics.tables
        self._batch_size = check_integer("batch_size", batch_size, 1, INT32_MAX)
        self._batches_per_step = _batches_per_step(statistics, batch_size)
        self._step_seconds, self._steps_per_epoch = step_seconds, steps_per_epoch
        self._dense_parameters = dense_parameters
        self._calibration = calibration or Calibration()
        self._replays: dict[tuple[str, int, int | None], Traffic] = {}

    def plan(self, topology: Topology) -> Plan:
        """Returns the plan for a cluster, and raises as the function `plan`."""
        workers = topology.workers
        whole = {name: self._replayed(name, workers, None) for name in self._tables}
        capacities = self._capacities(whole, topology.worker_memory)
        traffic = {
            name: self._replayed(name, workers, capacity)
            if capacity is not None and capacity < self._statistics[name].rows
            else whole[name]
            for name, capacity in capacities.items()
        }
        given = {name: self._given_servers(name, topology) for name in self._tables}
        kept = self._kept_rows(traffic, given, topology)
        every = tuple(range(topology.servers))

        def planned(servers: Sequence[tuple[int, ...]]) -> tuple[Plan, float]:
            tables = {
                name: self._table_plan(name, mine, capacities[name], traffic[name], kept[name])
                for name, mine in zip(self._tables, servers, strict=True)
            }
            return self._timed(tables, topology)

        loads = [
            TableLoad(
                server_load(
                    traffic[name].server_seconds,
                    traffic[name].bytes_up + traffic[name].bytes_down,
                    topology.bandwidth,
                    topology.server_cores,
                ),
                self._table_plan(name, every, None, traffic[name], kept[name]).server_bytes,
                given[name],
            )
            for name in self._tables
        ]
        found = list(map(planned, placements(loads, topology.servers, topology.server_memory)))
        divided, _ = found[0]
        if max(divided.server_bytes) <= topology.server_memory:
            busiest = _AS_EVEN * divided.parts["network"]
            found = [
                (each, cpu)
                for each, cpu in found
                if each.parts["network"] <= max(busiest, _FREE * each.step_seconds)
            ]
        elif len(found) > 1:
            del found[0]
        longest = _AS_FAST * min(candidate.step_seconds for candidate, _ in found)
        result, _ = min(
            (candidate for candidate in found if candidate[0].step_seconds <= longest),
            key=lambda candidate: candidate[1],
        )
        _check_memory(result)
        return self._filled(result)

    def _filled(self, plan: Plan) -> Plan:
        """Returns the plan with the memory that is left for rows that the statistics lack."""
        room = plan.topology.server_memory / np.maximum(plan.server_bytes, 1)
        tables = dict(plan.tables)
        for name, table in plan.tables.items():
            storage = self._tables[name].storage
            if storage is not None and storage.memory is None:
                memory = int((table.memory or 0) * room[list(table.servers)].min())
                tables[name] = dataclasses.replace(table, memory=memory)
        return dataclasses.replace(plan, tables=tables)

    def _given_servers(self, name: str, topology: Topology) -> tuple[int, ...] | None:
        """Returns the servers of a table, if they are not the plan's to choose."""
        limits = self._constraints.get(name, Constraints())
        storage = self._tables[name].storage
        if limits.servers is None and (storage is None or storage.memory is None):
            return None
        return limits.servers_of(name, topology)

    def _table_plan(
        self,
        name: str,
        servers: tuple[int, ...],
        capacity: int | None,
        traffic: Traffic,
        kept: float,
    ) -> TablePlan:
        """Returns the plan of a table. `kept`: rows that the servers together keep in memory."""
        statistics = self._statistics[name]
        rows, memory = statistics.rows, None
        server_bytes = rows * traffic.server_row_bytes
        if self._tables[name].storage is not None:
            row_bytes = _stored_row_bytes(traffic)
            memory = max(LEAST_MEMORY, int(kept * row_bytes / len(servers)))
            in_memory = min(rows * row_bytes, len(servers) * memory)
            server_bytes = min(server_bytes, in_memory + rows * _INDEX_BYTES)
        on_disk = 1 - float(statistics.coverage(kept)) if kept < rows else 0.0
        return TablePlan(servers, capacity, rows, traffic, server_bytes, memory, on_disk)

    def _kept_rows(
        self,
        traffic: Mapping[str, Traffic],
        given: Mapping[str, tuple[int, ...] | None],
        topology: Topology,
    ) -> dict[str, float]:
        """Returns how many rows of every table the servers together keep in memory.

        Tables whose storage leaves this to the plan share the memory that the others leave. Each
        row there saves as many reads of the disk as messages have the row. (RecShard: Sethi et al.,
        ASPLOS 2022, solves this as an integer program, because it places whole tables. Where a hash
        divides them, the rows with the most accesses per byte are the best choice.)
        """
        kept: dict[str, float] = {}
        curves: dict[str, Curve] = {}
        room = float(topology.servers * topology.server_memory)
        for name, config in self._tables.items():
            rows, row_bytes = self._statistics[name].rows, _stored_row_bytes(traffic[name])
            kept[name] = rows
            if config.storage is None:
                room -= rows * traffic[name].server_row_bytes
                continue
            room -= rows * _INDEX_BYTES
            if config.storage.memory is not None:
                servers = given[name] or ()
                kept[name] = min(rows, len(servers) * config.storage.memory / row_bytes)
                room -= kept[name] * row_bytes
                continue
            weights, counts = self._statistics[name].frequencies()
            of_messages = traffic[name].rows_up + traffic[name].rows_down
            share = of_messages / max(weights @ counts, 1e-300)
            curves[name] = Curve(weights, counts * share / row_bytes, row_bytes)
        kept |= most_valuable(max(room, 0.0), curves)[0]
        # Tables whose servers are given may need more on a server than the others leave there.
        every = tuple(range(topology.servers))
        fixed, shared = np.zeros(topology.servers), np.zeros(topology.servers)
        for name, number in kept.items():
            mine = list(given[name] or every)
            all_bytes = self._table_plan(name, every, None, traffic[name], number).server_bytes
            part = number * _stored_row_bytes(traffic[name]) if name in curves else 0.0
            fixed[mine] += (all_bytes - part) / len(mine)
            shared[mine] += part / len(mine)
        left = np.maximum(topology.server_memory - fixed, 0) / np.maximum(shared, 1)
        for name in curves:
            most = float(left[list(given[name] or every)].min())
            if most < 1:
                kept[name] *= 0.999 * most  # Rounded down.
        return kept

    def _timed(self, tables: Mapping[str, TablePlan], topology: Topology) -> tuple[Plan, float]:
        """Returns a plan, and the CPU time of all tasks for a step of a worker."""
        step = self._step(tables, topology)
        seconds, parts = step_time(
            step,
            topology.workers,
            topology.bandwidth,
            topology.latency,
            topology.server_cores,
            topology.shared_cores,
        )
        each = map(tuple, (step.up, step.down, step.handling_servers))
        plan = Plan(topology, self._batch_size, tables, seconds, parts, *each)
        return plan, step.worker + sum(step.handling_servers)

    def _replayed(self, name: str, workers: int, capacity: int | None) -> Traffic:
        # With so many workers, nearly every row that a worker reads again was updated meanwhile.
        workers = min(workers, _MOST_WORKERS)
        known = name, workers, capacity
        if known not in self._replays:
            self._replays[known] = replay(
                self._statistics[name],
                self._tables[name],
                workers,
                capacity,
                self._batches_per_step,
                self._steps_per_epoch,
            )
        return self._replays[known]

    def _capacities(self, whole: Mapping[str, Traffic], memory: float) -> dict[str, int | None]:
        """Returns the capacity of every table's cache, in rows. None: no cache.

        The caches together have the rows with the most bytes of lookups per byte of memory. This is
        the best split of the memory, since every further row of a table has fewer lookups.
        """
        chosen: dict[str, int | None] = {}
        curves: dict[str, Curve] = {}
        for name, config in self._tables.items():
            chosen[name] = None
            if config.cache is None:
                continue
            line = whole[name].worker_row_bytes
            if config.cache.capacity is not None:
                chosen[name] = config.cache.capacity
                memory -= min(config.cache.capacity, self._statistics[name].rows) * line
                continue
            limits = self._constraints.get(name, Constraints())
            chosen[name] = max(1, limits.min_capacity)
            weights, counts = self._statistics[name].frequencies()
            most = INT32_MAX if limits.max_capacity is None else limits.max_capacity
            ends = np.minimum(np.cumsum(weights), most)
            gain = counts * config.dim / line
            gain[ends <= limits.min_capacity] = np.inf
            curves[name] = Curve(np.diff(ends, prepend=0.0), gain, line)
        rows, times = most_valuable(memory, curves)
        for name, taken in rows.items():
            if taken:
                # Where all rows fit, there is room for rows that the statistics have not seen.
                most = self._constraints.get(name, Constraints()).max_capacity or INT32_MAX
                chosen[name] = max(chosen[name], min(int(max(times, 1.0) * taken), most))
        return chosen

    def _step(self, planned: Mapping[str, TablePlan], topology: Topology) -> Step:
        servers, calibration = topology.servers, self._calibration
        dense = _FLOAT_BYTES * self._dense_parameters / _DENSE_INTERVAL / servers
        up, down, server_cpu = np.full(servers, dense), np.full(servers, dense), np.zeros(servers)
        for table in planned.values():
            mine = list(table.servers)
            up[mine] += table.traffic.bytes_up / len(mine)
            down[mine] += table.traffic.bytes_down / len(mine)
            server_cpu[mine] += table.traffic.server_seconds / len(mine)
            server_cpu[mine] += table.traffic.messages * calibration.server_part
        # All tables share the messages of a step.
        messages = np.zeros(servers)
        for table in planned.values():
            mine = list(table.servers)
            messages[mine] = np.maximum(messages[mine], table.traffic.messages)
        server_cpu += messages * calibration.server_message + calibration.server_byte * (up + down)
        handling = calibration.worker_step + float(messages.sum()) * calibration.worker_message
        handling += calibration.worker_byte * float(up.sum() + down.sum())
        for table in planned.values():
            parts = table.traffic.messages * len(table.servers)
            handling += calibration.worker_part * parts
        return Step(
            compute=self._step_seconds,
            handling_worker=handling,
            handling_servers=server_cpu.tolist(),
            chief=calibration.chief_step,
            down=down.tolist(),
            up=up.tolist(),
            ahead=all(
                config.cache is not None and config.cache.steps_ahead() > 0
                for config in self._tables.values()
            ),
        )


def plan(
    model_or_configs: keras.Model | Sequence[EmbeddingConfig],
    statistics: Statistics,
    batch_size: int,
    topology: Topology,
    *,
    step_seconds: float,
    **others: Any,
) -> Plan:
    """Plans the training of tables on a cluster: where rows live, and what a step will cost.

        topology = het_tf.planner.Topology(workers=8, servers=2, bandwidth="10Gbit")
        plan = het_tf.planner.plan(model, statistics, 1024, topology, step_seconds=0.02)
        print(plan.report())
        strategy = het_tf.distribute.HetParameterServerStrategy(resolver, plan=plan)

    Hit rates and bytes are those of the caches and tables themselves, which train the traced ids
    in this process. The memory of a worker is split over the tables, so that the caches hold the
    rows with the most lookups per byte. Every table is on the servers with which a step is the
    shortest.

    Args:
      model_or_configs: built and compiled model, or configs of the tables.
      statistics: statistics of the ids, by the names of the layers.
      batch_size: examples of a step of one worker: a multiple of the batches of `statistics`.
      topology: the cluster.
      step_seconds: CPU time of a step of one worker without messages
        (`het_tf.planner.step_seconds` measures it).
      **others: constraints: constraints of tables, by the name of the layer.
        steps_per_epoch: steps of a worker in an epoch, at whose end the caches push all updates.
          None: epochs are so long that this does not matter.
        dense_parameters: number of dense parameters. None: those of the model, or 0.
        calibration: what messages cost. None: the defaults of `Calibration`.

    Raises:
      DoesNotFitError: the servers' memory does not suffice. The message has the numbers.
      ValueError: an argument is out of range, or statistics of a table are missing.
    """
    planner = Planner(model_or_configs, statistics, batch_size, step_seconds=step_seconds, **others)
    return planner.plan(topology)


def _stored_row_bytes(traffic: Traffic) -> float:
    """Returns the bytes of a row in the pages of a storage."""
    return max(traffic.server_row_bytes - _INDEX_BYTES, _FLOAT_BYTES)


def _dense_parameters(model: Any) -> int:
    if not isinstance(model, keras.Model):
        return 0
    # The trainable variable of a HetEmbedding stands for its rows.
    rows = {id(v) for layer in embeddings_of(model) for v in layer.trainable_variables}
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables if id(v) not in rows)


def _batches_per_step(statistics: Statistics, batch_size: int) -> int:
    joined = max(1, round(batch_size / statistics.batch_size))
    if abs(joined * statistics.batch_size / batch_size - 1) > 0.05:  # The last may be smaller.
        raise ValueError(
            f"batch_size = {batch_size} is no multiple of the {statistics.batch_size:g} examples of"
            " a batch of the statistics"
        )
    return joined


def _check_memory(plan: Plan) -> None:
    topology = plan.topology
    caches = sum(table.worker_bytes for table in plan.tables.values())
    if caches > 1.01 * topology.worker_memory:
        raise DoesNotFitError(
            f"the caches of a worker need {bytes_text(caches)}, more than worker_memory ="
            f" {bytes_text(topology.worker_memory)}"
        )
    used = plan.server_bytes
    fullest = int(np.argmax(used))
    if used[fullest] > topology.server_memory:
        raise DoesNotFitError(
            f"the rows of ps:{fullest} need {bytes_text(used[fullest])}, more than server_memory ="
            f" {bytes_text(topology.server_memory)}. All rows need {bytes_text(sum(used))}"
        )
