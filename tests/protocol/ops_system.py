"""The real ops as a `schedules.System`: several shards and caches in this process.

Between a cache and a shard there is only a tensor of bytes here, so a message arrives when a
schedule says so, as often as it says.
"""

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from schedules import Setup
from wire import REQUEST_HEADER, Reply, Request, parse_reply, parse_request

from het_tf import initializers, ops, optimizers

DRIFT_UNIT = 2.0**-14  # of clocks and bounds (ops/core/row/clock.h)
_unique = itertools.count()
_NOTHING = tf.zeros([0], tf.uint8)


@dataclasses.dataclass(eq=False)
class Sending:
    """A step and what it has been answered."""

    worker: int
    cache: tf.Tensor
    ticket: tf.Tensor | None  # None: the step is over
    requests: list[tf.Tensor]
    replies: list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Exchange:
    worker: int
    shard: int
    request: Request
    reply: Reply


class OpsSystem:
    supports = frozenset({"crash", "restart", "save", "restore"})
    unit = DRIFT_UNIT

    def __init__(
        self,
        setup: Setup,
        optimizer: optimizers.Optimizer | None = None,
        learning_rate: float = 1.0,
        initializer: str = "zeros",
        policy: str = "lru",
        device: str = "",
        host_rows: int = 0,
        lifetimes: str = "",
    ):
        """device: "" or that whose memory has the caches' rows ("/device:CPU:0").

        host_rows: that a cache keeps on the host when they have given way there.
        """
        self.setup = setup
        self.learning_rate = learning_rate
        plain = optimizers.Momentum(momentum=0.0) if setup.slots else optimizers.SGD()
        self.row = {
            "dim": setup.dim,
            "optimizer": (optimizer or plain).spec(),
            "initializer": initializers.spec(initializer),
            "seed": 3,
            "clock": setup.clock,
        }
        self._cache = {
            "capacity": setup.capacity,
            "policy": policy,
            "read_bound": self._in_units(setup.read_bound),
            "write_bound": self._in_units(setup.write_bound),
            "num_shards": setup.num_shards,
            **self.row,
        }
        self._device = device
        if device:
            self._cache["device_capacity"] = self._cache.pop("capacity")
            self._cache["capacity"] = host_rows
        self.tables = [
            ops.table_handle(
                shared_name=_name("table"),
                shard=shard,
                num_shards=setup.num_shards,
                lifetimes=lifetimes,
                **self.row,
            )
            for shard in range(setup.num_shards)
        ]
        self.caches = [self._new_cache() for _ in range(setup.num_workers)]
        self._closures: list[tf.Tensor | None] = [None] * setup.num_workers
        self._open: list[set[Sending]] = [set() for _ in range(setup.num_workers)]
        self._lifetimes = lifetimes
        self._folder = tempfile.TemporaryDirectory()
        self.cuts: list[Any] = []  # that are not written yet
        self._saved: list[dict[str, Any]] = []  # by shard, as table_restore takes it
        self.now = -1  # table_expire's last

    def lookup(self, worker: int, keys: Sequence[int]) -> Sending:
        unique_ids = ops.unique_ids(tf.constant(keys, tf.int64), on_device=bool(self._device))
        ticket, requests = ops.cache_lookup(
            self.caches[worker], unique_ids, num_shards=self.setup.num_shards
        )
        return self._begin(worker, ticket, requests)

    def flush(self, worker: int, everything: bool = True) -> Sending:
        ticket, requests = ops.cache_flush(
            self.caches[worker], num_shards=self.setup.num_shards, all=everything
        )
        return self._begin(worker, ticket, requests)

    def keep(self, worker: int, keeps: bool) -> None:
        ops.cache_keep(self.caches[worker], keeps)

    def begin(self, worker: int, number: int) -> None:
        self._closures[worker] = ops.cache_begin_closure(self.caches[worker], number)

    def commit(self, worker: int, done: int) -> Sending:
        ticket, requests = ops.cache_commit_closure(
            self.caches[worker], self._closures[worker], done, num_shards=self.setup.num_shards
        )
        return self._begin(worker, ticket, requests)

    def end(self, worker: int) -> bool:
        try:
            ops.cache_end_closure(self.caches[worker], self._closures[worker])
        except tf.errors.CancelledError:
            return False
        return True

    def give_up(self, worker: int) -> None:
        self._closures[worker] = None

    def shards_with_requests(self, sending: Sending) -> list[int]:
        return [shard for shard, request in enumerate(sending.requests) if request.shape[0]]

    def num_pushes(self, sending: Sending, shard: int) -> int:
        request = sending.requests[shard].numpy().tobytes()
        return int(np.frombuffer(request, REQUEST_HEADER, 1)[0]["num_pushes"])

    def deliver(self, sending: Sending, shard: int, keep: bool = True) -> None:
        reply = ops.table_sync(self.tables[shard], sending.requests[shard])
        if keep:
            sending.replies[shard] = reply

    def install(self, sending: Sending) -> bool:
        installed = ops.cache_install(sending.cache, sending.ticket, sending.replies)
        incomplete = bool(installed.incomplete)
        if incomplete:
            sending.requests = ops.cache_ask_again(
                sending.cache, sending.ticket, num_shards=self.setup.num_shards
            )
            sending.replies = [_NOTHING] * self.setup.num_shards
        return incomplete

    def gather(self, sending: Sending) -> np.ndarray:
        return ops.cache_gather(sending.cache, sending.ticket).numpy()

    def update(self, sending: Sending, gradients: np.ndarray) -> None:
        gradients = tf.constant(gradients, tf.float32)
        ops.cache_update(sending.cache, sending.ticket, gradients, self.learning_rate)
        self.drop(sending)

    def drop(self, sending: Sending) -> None:
        sending.ticket = None
        self._open[sending.worker].discard(sending)

    def table(self) -> dict[int, tuple[np.ndarray, np.ndarray, int]]:
        rows = {}
        for table in self.tables:
            keys, *columns = (each.numpy() for each in ops.table_export(table, 0, 1))
            rows |= dict(zip(keys.tolist(), zip(*columns, strict=True), strict=True))
        return rows

    def shard_of(self, key: int) -> int:
        key = tf.constant([key], tf.int64)
        return int(ops.shard_of(key, num_shards=self.setup.num_shards)[0])

    def clock(self, worker: int, key: int) -> int | None:
        return None  # the ops do not tell

    def evict(self, worker: int, nth: int) -> None:
        raise NotImplementedError("the policy decides")

    def crash(self, worker: int) -> None:
        for sending in list(self._open[worker]):
            self.drop(sending)
        self._destroy(self.caches[worker])
        self.caches[worker] = self._new_cache()

    def restart(self, shard: int) -> None:
        self.write()
        ops.table_clear(self.tables[shard])

    def forget(self, worker: int, shard: int) -> None:
        raise NotImplementedError("a shard forgets after a day of requests")

    def save(self) -> None:
        self.write()
        self.cuts = [ops.table_cut(table) for table in self.tables]

    def write(self) -> None:
        """Writes what was cut. Until then a table waits that sets or drops rows."""
        cuts, self.cuts = self.cuts, []
        folder = f"{self._folder.name}/{next(_unique)}"
        for shard, cut in enumerate(cuts):
            self._saved[shard:] = [self._write(f"{folder}_{shard}", self.tables[shard], cut)]

    def _write(self, prefix: str, table: tf.Tensor, cut: Any) -> dict[str, Any]:
        rows = ops.table_save(table, cut.snapshot, prefix=prefix, part="rows", config="")
        assert int(rows) == int(cut.rows)
        numbers = {"rows": rows, "dropped": 0, "elapsed": 0, "candidates": cut.candidates}
        return {
            "prefixes": [prefix],
            "parts": ["rows"],
            **{name: tf.cast([number], tf.int64) for name, number in numbers.items()},
            "time": self.now,
            "ages": "expire" in self._lifetimes,
            "sketches": "sketch" in self._lifetimes,
        }

    def restore(self) -> None:
        self.write()
        for table, saved in zip(self.tables, self._saved, strict=True):
            assert int(ops.table_restore(table, **saved)) == int(saved["rows"][0])
            self.now = saved["time"]

    def stats(self, worker: int) -> dict[str, int]:
        names, values = ops.cache_stats(self.caches[worker])
        return dict(zip([name.decode() for name in names.numpy()], values.numpy(), strict=True))

    def close(self) -> None:
        """Frees tables and caches."""
        self.write()
        self._folder.cleanup()
        for worker, sendings in enumerate(self._open):
            for sending in list(sendings):
                self.drop(sending)
            self._destroy(self.caches[worker])
        for table in self.tables:
            self._destroy(table)

    def _begin(self, worker: int, ticket: tf.Tensor, requests: list[tf.Tensor]) -> Sending:
        replies = [_NOTHING] * len(requests)
        sending = Sending(worker, self.caches[worker], ticket, list(requests), replies)
        self._open[worker].add(sending)
        return sending

    def _in_units(self, bound: float | None) -> int:
        if bound is None:
            return -1
        return math.floor(bound / self.unit) if self.setup.clock == "drift" else int(bound)

    def _new_cache(self) -> tf.Tensor:
        with tf.device(self._device or "/device:CPU:0"):
            return ops.cache_handle(shared_name=_name("cache"), **self._cache)

    def _destroy(self, handle: tf.Tensor) -> None:
        tf.raw_ops.DestroyResourceOp(resource=handle)


class WatchedOps(OpsSystem):
    """OpsSystem that reads along."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.exchanges: list[Exchange] = []

    def deliver(self, sending: Sending, shard: int, keep: bool = True) -> None:
        request = sending.requests[shard]
        reply = ops.table_sync(self.tables[shard], request)
        if keep:
            sending.replies[shard] = reply
        exchange = Exchange(sending.worker, shard, parse_request(request), parse_reply(reply))
        self.exchanges.append(exchange)

    def lamport_clock(self, worker: int, key: int) -> int:
        """What a lookup says of a row that is held: with its check, or with what it pushes."""
        probe = self.lookup(worker, (key,))
        request = parse_request(probe.requests[self.shard_of(key)])
        self.drop(probe)
        if key in request.checked_keys:
            return request.bases[request.checked_keys.index(key)]
        rows = [row for push in request.pushes for row in (*push.gradients, *push.contributions)]
        return max(int(row["clock"]) for row in rows if row["key"] == key)


# Steps on a network that works, one at a time.


def step(
    system: OpsSystem, worker: int, keys: Sequence[int], gradients: np.ndarray | None = None
) -> np.ndarray:
    """Reads rows [len(keys), dim]; with gradients of that shape, updates them."""
    sending = system.lookup(worker, keys)
    _answer(system, sending)
    rows = system.gather(sending)
    if gradients is None:
        system.drop(sending)
        return rows
    system.update(sending, gradients)
    if system.setup.write_bound == 0 or system.setup.capacity == 0:
        flush(system, worker, everything=False)
    return rows


def flush(system: OpsSystem, worker: int, everything: bool = True) -> None:
    sending = system.flush(worker, everything)
    _answer(system, sending)
    system.drop(sending)


def _answer(system: OpsSystem, sending: Sending) -> None:
    incomplete = True
    while incomplete:
        for shard in system.shards_with_requests(sending):
            system.deliver(sending, shard)
        incomplete = system.install(sending)


def _name(kind: str) -> str:
    return f"test_protocol_ops/{kind}/{next(_unique)}"
