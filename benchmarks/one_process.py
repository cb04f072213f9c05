"""Workers with caches and the shards of their table, all in this process, driven op by op.

Between a cache and a shard there is only a tensor of bytes: no cluster, no RPC, and so as many
steps a second as the ops can do. Every byte is counted as between machines.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from het_tf import initializers, ops, optimizers
from het_tf.cache_config import DRIFT_UNIT

_unique = itertools.count()


def bound_of_ops(clock: str, bound: float | None) -> int:
    """A bound as the ops take it, in updates or (drift) units of length. None: unbounded."""
    if bound is None:
        return -1
    return round(bound / DRIFT_UNIT) if clock == "drift" else round(bound)


class Workers:
    """One table, and for each worker a cache of it. Worker numbers are 0, 1, ..."""

    def __init__(
        self,
        workers: int,
        dim: int,
        optimizer: optimizers.Optimizer,
        capacity: int,
        *,
        policy: str = "lfu",
        clock: str = "count",
        read_bound: float | None = None,
        write_bound: float | None = None,
        initializer: str = "uniform",
        seed: int = 0,
        shards: int = 1,
    ):
        """Makes tables and caches.

        Args:
          workers: how many.
          dim: columns of a row.
          optimizer: of the table; its learning rate is given with each update.
          capacity: rows of a cache; 0: training without a cache.
          policy: "lfu" or "lru".
          clock: "count", "lamport" or "drift".
          read_bound: in updates or, with clock="drift", in length; None: unbounded.
          write_bound: likewise.
          initializer: of rows, a Keras initializer's name.
          seed: of the table.
          shards: of the table.
        """
        row = {
            "dim": dim,
            "optimizer": optimizer.spec(),
            "initializer": initializers.spec(initializer),
            "seed": seed,
            "clock": clock,
            "num_shards": shards,
        }
        cache = {
            "capacity": capacity,
            "policy": policy,
            "read_bound": bound_of_ops(clock, read_bound),
            "write_bound": bound_of_ops(clock, write_bound),
        }
        self.dim = dim
        self._shards = shards
        self._writes_through = capacity == 0 or cache["write_bound"] == 0
        self._tables = [
            ops.table_handle(shared_name=f"one_process/{next(_unique)}", shard=shard, **row)
            for shard in range(shards)
        ]
        self._caches = [
            ops.cache_handle(shared_name=f"one_process/{next(_unique)}", **cache, **row)
            for _ in range(workers)
        ]
        self._tickets: list[tf.Tensor | None] = [None] * workers

    def lookup(self, worker: int, ids: np.ndarray) -> np.ndarray:
        """Rows of ids, int64 [n], as float32 [n, dim], for `update` to follow."""
        cache = self._caches[worker]
        self._tickets[worker] = None
        unique_ids = ops.unique_ids(tf.constant(ids, tf.int64))
        ticket, requests = ops.cache_lookup(cache, unique_ids, num_shards=self._shards)
        ops.cache_install(cache, ticket, self._replies(requests))
        self._tickets[worker] = ticket
        return ops.cache_gather(cache, ticket).numpy()

    def update(self, worker: int, gradients: np.ndarray, learning_rate: float) -> None:
        """One update of each key of the worker's last lookup. gradients: float32 [n, dim]."""
        ticket, self._tickets[worker] = self._tickets[worker], None
        gradients = tf.constant(gradients, tf.float32)
        ops.cache_update(self._caches[worker], ticket, gradients, learning_rate)
        del ticket
        if self._writes_through:
            self._flush(worker, everything=False)

    def flush(self) -> None:
        """Every worker sends what it has not sent yet."""
        for worker in range(len(self._caches)):
            self._flush(worker, everything=True)

    def apply(self, ids: np.ndarray, gradients: np.ndarray, learning_rate: float) -> None:
        """One update of each key, on the shards and past the caches: to make rows beforehand."""
        shards = ops.shard_of(tf.constant(ids, tf.int64), num_shards=self._shards).numpy()
        for shard, table in enumerate(self._tables):
            mine = shards == shard
            unique_ids = ops.unique_ids(tf.constant(ids[mine], tf.int64))
            ops.table_apply(table, unique_ids, tf.constant(gradients[mine]), learning_rate)

    def table_rows(self, ids: np.ndarray) -> np.ndarray:
        """What the table holds for ids, int64 [n], as float32 [n, dim]."""
        ids = np.asarray(ids, np.int64)
        shards = ops.shard_of(tf.constant(ids), num_shards=self._shards).numpy()
        rows = np.empty((ids.size, self.dim), np.float32)
        for shard, table in enumerate(self._tables):
            (mine,) = np.nonzero(shards == shard)
            rows[mine] = ops.table_lookup(table, tf.constant(ids[mine])).rows.numpy()
        return rows

    def stats(self) -> dict[str, int]:
        """The counters of all caches, summed (`CacheCounter`)."""
        total: collections.Counter[str] = collections.Counter()
        for cache in self._caches:
            names, values = (each.numpy().tolist() for each in ops.cache_stats(cache))
            total.update(dict(zip([name.decode() for name in names], values, strict=True)))
        return dict(total)

    def close(self) -> None:
        """Frees tables and caches."""
        self._tickets = []
        for handle in self._caches + self._tables:
            tf.raw_ops.DestroyResourceOp(resource=handle)

    def _flush(self, worker: int, everything: bool) -> None:
        cache = self._caches[worker]
        ticket, requests = ops.cache_flush(cache, num_shards=self._shards, all=everything)
        ops.cache_install(cache, ticket, self._replies(requests))

    def _replies(self, requests: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [
            ops.table_sync(table, request) if request.shape[0] else request
            for table, request in zip(self._tables, requests, strict=True)
        ]


def single_threaded() -> None:
    """Has TensorFlow use one thread, so that runs can share a machine. Before the first op."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
