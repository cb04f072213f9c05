"""What training a table would send and compute: its trace, trained by the real caches and tables.

There is no model of the protocol here, so that none can differ from it. Every worker has a cache,
all of them have one shard, and all are in this process. The caches are as much smaller than planned
as the trace has fewer keys than the dataset (miniature simulation: Waldspurger et al., ATC 2017).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from het_tf import initializers, ops, optimizers
from het_tf.planner.statistics import TableStatistics, Trace, few_keys, thinned
from het_tf.planner.tables import EmbeddingConfig
from het_tf.runtime.counters import since, sum_stats
from het_tf.runtime.key_counts import added_up
from het_tf.tables.table import NO_CACHE

_LEAST_STEPS = 4  # of a worker
_LEARNING_RATE = 1e-3
_MOST_KEYS = 1_000_000  # of the batches of a replay. Of more, a part is replayed.
_IDLE_STEPS = 40
_MANY_ROWS = 50_000  # of which memory beside the rows is a small part
_HEADER_BYTES = 64  # of a request and of a reply
_numbers = itertools.count()
_known_row_bytes: dict[tuple[Any, ...], tuple[float, float]] = {}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a table costs a step of one worker, after the caches have filled.

    Attributes:
      hit_rate: share of the ids whose row was in the cache.
      bytes_up: bytes of the rows' messages to the servers.
      bytes_down: the same from the servers.
      messages: messages to each server.
      rows_up: rows in messages to the servers.
      rows_down: rows in messages from the servers.
      worker_seconds: CPU time of the worker's lookups and updates.
      server_seconds: CPU time of the servers for them.
      server_row_bytes: memory of a row on a server, with optimizer slots and index.
      worker_row_bytes: memory of a row in a cache. 0: no cache.
    """

    hit_rate: float
    bytes_up: float
    bytes_down: float
    messages: float
    rows_up: float
    rows_down: float
    worker_seconds: float
    server_seconds: float
    server_row_bytes: float
    worker_row_bytes: float


def replay(
    statistics: TableStatistics,
    config: EmbeddingConfig,
    workers: int,
    capacity: int | None,
    batches_per_step: int = 1,
    steps_per_epoch: int | None = None,
) -> Traffic:
    """Trains the trace of a table, and returns what a step costs in the second half.

    Args:
      statistics: statistics of the table's ids.
      config: the table.
      workers: number of workers, which train the batches in turn.
      capacity: rows of a worker's cache. None: all.
      batches_per_step: batches of the trace that make one batch of training.
      steps_per_epoch: steps of a worker after which the caches push everything, as at the end of
        an epoch. None: they never do.

    Raises:
      ValueError: the trace has too few batches.
    """
    if statistics.ids == 0:
        return Traffic(**dict.fromkeys((f.name for f in dataclasses.fields(Traffic)), 0.0))
    joined = _joined(statistics.trace, batches_per_step)
    rounds = len(joined) // workers
    if rounds < _LEAST_STEPS:
        raise ValueError(
            f"the statistics have {len(joined)} batches of a step's size, too few for {workers}"
            f" workers: {_LEAST_STEPS * workers} are needed"
        )
    rate, batches = statistics.rate, joined[: rounds * workers]
    while _size(batches) > _MOST_KEYS:
        if few_keys(batches):
            rounds = max(rounds // 2, _LEAST_STEPS)
            batches = batches[-rounds * workers :]
            break
        rate /= 2
        batches = [thinned(batch, rate) for batch in batches]
    if config.cache is None:
        capacity = 0
    elif capacity is None:
        capacity = statistics.rows + 1
    cluster = _Cluster(
        config, workers, capacity and max(1, round(capacity * rate)), steps_per_epoch
    )
    try:
        half = rounds // 2 * workers
        cluster.train(batches[:half])
        before, seconds_before = cluster.counters(), cluster.seconds.copy()
        cluster.train(batches[half:])
        counted = since(cluster.counters(), before)
        steps = len(batches) - half
        seconds = cluster.seconds - seconds_before - steps * idle_seconds()
    finally:
        cluster.close()
    # Rows that are missed are rare ones, so their number follows from the share of the keys that
    # is in the trace. The most frequent rows may all be in the trace, or none of them. Therefore
    # everything else follows from the number of keys of a batch (as SHARDS-adj does).
    traced = _size(statistics.trace) / len(statistics.trace)
    scale = statistics.keys / statistics.batches / max(traced, 1e-9)
    scale *= _size(joined) / len(joined) / max(_size(batches) / len(batches), 1e-9)
    ids = statistics.ids / statistics.batches * batches_per_step
    server_row_bytes, worker_row_bytes = _row_bytes(config)
    missed = (counted["ids"] - counted["hit_ids"]) / rate / steps
    up, down = (
        (counted[name] - counted["messages"] * _HEADER_BYTES) * scale / steps
        for name in ("bytes_up", "bytes_down")
    )
    return Traffic(
        hit_rate=max(0.0, 1 - missed / ids),
        bytes_up=up,
        bytes_down=down,
        messages=counted["messages"] / steps,
        rows_up=counted["rows_pushed"] * scale / steps,
        rows_down=counted["rows_sent"] * scale / steps,
        worker_seconds=max(0.0, float(seconds[0])) * scale / steps,
        server_seconds=max(0.0, float(seconds[1])) * scale / steps,
        server_row_bytes=server_row_bytes,
        worker_row_bytes=worker_row_bytes,
    )


def _size(batches: Trace) -> int:
    return sum(len(keys) for keys, _ in batches)


def _joined(trace: Trace, batches_per_step: int) -> Trace:
    """Returns batches that are so many times as large."""
    if batches_per_step == 1:
        return trace
    ends = range(batches_per_step, len(trace) + 1, batches_per_step)
    return [added_up(trace[end - batches_per_step : end]) for end in ends]


class _Cluster:
    """Caches and the shard of a table in this process.

    Attributes:
      seconds: float64 [2], CPU time of the workers and of the servers so far.
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        workers: int,
        capacity: int,
        steps_per_epoch: int | None = None,
    ):
        """Makes the shard and the caches, each of `capacity` rows. 0: no cache."""
        name = f"replay/{next(_numbers)}"
        row = {
            "dim": config.dim,
            "optimizer": config.row_optimizer.spec(),
            "initializer": initializers.spec("uniform"),
            "clock": config.cache.clock if config.cache else "count",
            "row_dtype": config.row_dtype,
        }
        attributes: dict[str, Any] = NO_CACHE
        if capacity:
            bounds = config.cache.bound_attributes(workers)
            write_bound = bounds["write_bound"]
            attributes = bounds | {"capacity": capacity, "policy": config.cache.policy}
            attributes["due_bound"] = config.cache.due_bound(write_bound, on_device=False)
        self._writes_through = attributes.get("write_bound", 0) == 0
        self._table = ops.table_handle(shared_name=name, shard=0, **row)
        self._caches = [
            ops.cache_handle(
                shared_name=f"{name}/{worker}", wire_dtype=config.wire_dtype, **attributes, **row
            )
            for worker in range(workers)
        ]
        self._steps_per_epoch = steps_per_epoch
        self._trained = 0
        self._dim = config.dim
        self._ones = tf.ones([0, config.dim])
        self.seconds = np.zeros(2)

    def train(self, batches: Trace) -> None:
        """Trains batches, which the workers take in turn."""
        for keys, counts in batches:
            self._step(self._trained % len(self._caches), np.repeat(keys, counts))
            self._trained += 1
            epoch = self._steps_per_epoch
            if epoch is not None and self._trained % (epoch * len(self._caches)) == 0:
                self.flush()

    def flush(self) -> None:
        """Every worker pushes all updates."""
        for cache in self._caches:
            self._install(cache, *ops.cache_flush(cache, num_shards=1, all=True))

    def _step(self, worker: int, ids: np.ndarray) -> None:
        began, of_server = time.process_time(), self.seconds[1]
        cache = self._caches[worker]
        if len(self._ones) < len(ids):
            self._ones = tf.ones([len(ids), self._dim])
        unique_ids = ops.unique_ids(tf.constant(ids, tf.int64))
        ticket, requests = ops.cache_lookup(cache, unique_ids, num_shards=1)
        self._install(cache, ticket, requests)
        ops.cache_gather(cache, ticket)
        ops.cache_update(cache, ticket, self._ones[: len(ids)], _LEARNING_RATE)
        if self._writes_through:
            self._install(cache, *ops.cache_flush(cache, num_shards=1, all=False))
        self.seconds[0] += time.process_time() - began - (self.seconds[1] - of_server)

    def _install(self, cache: tf.Tensor, ticket: tf.Tensor, requests: Sequence[tf.Tensor]) -> None:
        while True:
            began = time.process_time()
            replies = [ops.table_sync(self._table, r) if r.shape[0] else r for r in requests]
            self.seconds[1] += time.process_time() - began
            _, incomplete = ops.cache_install(cache, ticket, replies)
            if not incomplete:
                return
            requests = ops.cache_ask_again(cache, ticket, num_shards=1)

    def counters(self) -> dict[str, int]:
        """Counters of all caches, and "rows_sent" of the shard."""
        counters = sum_stats(ops.cache_stats(cache) for cache in self._caches)
        return counters | {"rows_sent": self._table_counters()["rows_sent"]}

    def row_bytes(self) -> tuple[float, float]:
        """Memory of a row of the shard and of a cache."""
        table, caches = self._table_counters(), self.counters()
        return (
            table["memory_bytes"] / max(table["rows"], 1),
            caches["memory_bytes"] / caches["rows"] if caches["rows"] else 0.0,
        )

    def _table_counters(self) -> dict[str, int]:
        return sum_stats([ops.table_stats(self._table)])

    def close(self) -> None:
        """Frees everything."""
        for handle in [*self._caches, self._table]:
            tf.raw_ops.DestroyResourceOp(resource=handle)


def _row_bytes(config: EmbeddingConfig) -> tuple[float, float]:
    """Returns the memory of a row of the shard and of a cache, where there are many."""
    kind = config.dim, config.row_optimizer.spec(), config.row_dtype, config.cache is None
    if kind not in _known_row_bytes:
        _known_row_bytes[kind] = _measured_row_bytes(config)
    return _known_row_bytes[kind]


def _measured_row_bytes(config: EmbeddingConfig) -> tuple[float, float]:
    cluster = _Cluster(config, 1, 0 if config.cache is None else _MANY_ROWS + 1)
    try:
        for _ in range(2):  # The second time, all rows are in the cache.
            cluster.train([(np.arange(_MANY_ROWS), np.ones(_MANY_ROWS, np.int32))])
        _, of_worker = cluster.row_bytes()
        cluster.flush()
        of_server, _ = cluster.row_bytes()
        return of_server, of_worker
    finally:
        cluster.close()


@functools.cache
def idle_seconds() -> np.ndarray:
    """Returns the CPU time of a step with a single id: calls of ops, float64 [2] as `seconds`."""
    cluster = _Cluster(EmbeddingConfig("idle", 1, optimizers.SGD()), 1, 10)
    one = [(np.zeros(1, np.int64), np.ones(1, np.int32))]
    try:
        cluster.train(one * _IDLE_STEPS)
        before = cluster.seconds.copy()
        cluster.train(one * _IDLE_STEPS)
        return (cluster.seconds - before) / _IDLE_STEPS
    finally:
        cluster.close()
