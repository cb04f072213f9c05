"""The real ops as a `schedules.System`: several shards and caches in this process.

Between a cache and a shard there is only a tensor of bytes here, so faults are easy: a request that
is not handed on, a reply that is not, a request handed on twice.
"""

import collections
import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from protocol_model import MessageLost
from schedules import Setup

from het_tf import initializers, ops, optimizers

_unique = itertools.count()
_NOTHING = tf.zeros([0], tf.uint8)


class OpsSystem:
    def __init__(
        self,
        setup: Setup,
        optimizer: optimizers.Optimizer | None = None,
        learning_rate: float = 1.0,
        initializer: str = "zeros",
        policy: str = "lru",
        cached: bool = True,
    ):
        """Not `cached`: no caches, the shards apply the optimizer; the bounds are then 0."""
        self.supports = {"lost", "answer_lost", "twice", "redeliver", "crash"}
        if setup.read_bound is not None:
            # A cache that need not ask for rows it has learns of a restart only by its next push.
            self.supports.add("restart")
        self.setup = setup
        self.learning_rate = learning_rate
        self._row = {
            "dim": setup.dim,
            "optimizer": (optimizer or optimizers.SGD()).spec(),
            "initializer": initializers.spec(initializer),
            "seed": 3,
            "clock": setup.clock,
            "num_shards": setup.num_shards,
        }
        bounds = {
            name: -1 if bound is None else bound
            for name, bound in (
                ("read_bound", setup.read_bound),
                ("write_bound", setup.write_bound),
            )
        }
        self._cache = {"capacity": setup.capacity, "policy": policy, **bounds, **self._row}
        if not cached:
            self._cache |= {"capacity": 0}
        self._pushes_at_once = not cached or setup.write_bound == 0
        self._tables = [
            ops.table_handle(shared_name=_name("table"), shard=shard, **self._row)
            for shard in range(setup.num_shards)
        ]
        self._caches = [self._new_cache() for _ in range(setup.num_workers)]
        self._tickets: dict[int, tf.Tensor] = {}
        self._armed: dict[tuple[int, int], list[str]] = collections.defaultdict(list)
        self._sent: dict[tuple[int, int], list[tf.Tensor]] = collections.defaultdict(list)

    def lookup(self, worker: int, keys: Sequence[int]) -> np.ndarray:
        unique_ids = ops.unique_ids(tf.constant(keys, tf.int64))
        ticket, requests = ops.cache_lookup(
            self._caches[worker], unique_ids, num_shards=self.setup.num_shards
        )
        self._exchange(worker, ticket, requests)
        self._tickets[worker] = ticket
        return ops.cache_gather(self._caches[worker], ticket).numpy()

    def update(self, worker: int, keys: Sequence[int], grads: np.ndarray) -> None:
        ticket = self._tickets.pop(worker)
        grads = tf.constant(grads, tf.float32)
        ops.cache_update(self._caches[worker], ticket, grads, self.learning_rate)
        del ticket
        if self._pushes_at_once:
            self._flush(worker, everything=False)

    def flush(self, worker: int) -> None:
        self._flush(worker, everything=True)

    def table(self) -> dict[int, tuple[np.ndarray, np.ndarray, int]]:
        rows = {}
        for table in self._tables:
            keys, *columns = (each.numpy() for each in ops.table_export(table, 0, 1))
            rows |= dict(zip(keys.tolist(), zip(*columns, strict=True), strict=True))
        return rows

    def shard_of(self, key: int) -> int:
        key = tf.constant([key], tf.int64)
        return int(ops.shard_of(key, num_shards=self.setup.num_shards)[0])

    def clock(self, worker: int, key: int) -> int | None:
        return None  # the ops do not tell

    def arm(self, worker: int, shard: int, fault: str) -> None:
        self._armed[worker, shard].append(fault)

    def redeliver(self, worker: int, shard: int, nth: int) -> None:
        sent = self._sent[worker, shard]
        if sent:
            ops.table_sync(self._tables[shard], sent[-1 - nth % len(sent)])

    def crash(self, worker: int) -> None:
        for shard in range(self.setup.num_shards):
            self._sent[worker, shard].clear()
            self._armed[worker, shard].clear()
        self._tickets.pop(worker, None)
        self._destroy(self._caches[worker])
        self._caches[worker] = self._new_cache()

    def restart(self, shard: int) -> None:
        ops.table_clear(self._tables[shard])
        self._tickets.clear()

    def stats(self, worker: int) -> dict[str, int]:
        names, values = ops.cache_stats(self._caches[worker])
        return dict(zip([name.decode() for name in names.numpy()], values.numpy(), strict=True))

    def close(self) -> None:
        """Frees tables and caches."""
        self._tickets.clear()
        for handle in self._tables + self._caches:
            self._destroy(handle)

    def _new_cache(self) -> tf.Tensor:
        return ops.cache_handle(shared_name=_name("cache"), **self._cache)

    def _destroy(self, handle: tf.Tensor) -> None:
        tf.raw_ops.DestroyResourceOp(resource=handle)

    def _flush(self, worker: int, everything: bool) -> None:
        ticket, requests = ops.cache_flush(
            self._caches[worker], num_shards=self.setup.num_shards, all=everything
        )
        self._exchange(worker, ticket, requests)

    def _exchange(self, worker: int, ticket: tf.Tensor, requests: list[tf.Tensor]) -> None:
        """All shards at once, as in a step: when one message fails, no reply is taken."""
        replies = [self._send(worker, shard, request) for shard, request in enumerate(requests)]
        if None in [None if reply is None else 0 for reply in replies]:
            raise MessageLost(f"of worker {worker}")
        ops.cache_install(self._caches[worker], ticket, replies)

    def _send(self, worker: int, shard: int, request: tf.Tensor) -> tf.Tensor | None:
        if not request.shape[0]:
            return _NOTHING
        self._sent[worker, shard].append(request)
        fault = self._armed[worker, shard].pop(0) if self._armed[worker, shard] else None
        if fault == "lost":
            return None
        if fault == "twice":
            ops.table_sync(self._tables[shard], request)
        reply = ops.table_sync(self._tables[shard], request)
        return None if fault == "answer_lost" else reply


def _name(kind: str) -> str:
    return f"test_protocol_ops/{kind}/{next(_unique)}"
