"""Random synchronous steps on the real ops, beside the model of step_model.py.

Every worker has a cache and every server a shard and a barrier. Rounds have some of the workers as
members. Messages come in any order and more than once, replies are lost, and workers die before all
of their messages are sent. After every step, each member must read what the model says.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from optimizer_model import Adagrad, Momentum, Optimizer, Sgd
from schedules import KEYS
from step_model import StepShard

from het_tf import initializers, ops, optimizers

DIM = 2
OPTIMIZERS: Mapping[str, tuple[Optimizer, optimizers.Optimizer, float]] = {
    "sgd": (Sgd(), optimizers.SGD(), 1.0),  # exact: all gradients are integers
    "momentum": (Momentum(momentum=0.9), optimizers.Momentum(momentum=0.9), 0.1),
    "adagrad": (Adagrad(), optimizers.Adagrad(), 0.1),
}
REFUSED = (tf.errors.FailedPreconditionError, tf.errors.AbortedError, tf.errors.CancelledError)
_unique = itertools.count()


@dataclasses.dataclass(eq=False)
class Member:
    """A worker in a round. `ticket` and `keys`: of the step that it has looked up."""

    number: int
    worker: int
    keys: list[list[int]]  # by step
    ticket: Any = None
    is_gone: bool = False


class Steps:
    """A schedule, drawn while it is played."""

    def __init__(self, seed: int, most_workers: int = 5, spares: bool = False):
        """`spares`: whether broken copies of messages are sent to a server of their own."""
        self.chance = random.Random(seed)
        chance = self.chance
        self.optimizer = chance.choice(list(OPTIMIZERS))
        model, given, self.rate = OPTIMIZERS[self.optimizer]
        self.num_workers = chance.randint(2, most_workers)
        self.num_shards = chance.randint(1, 3)
        self.keys = chance.sample(KEYS, chance.randint(1, 6))
        self.row = {
            "dim": DIM,
            "optimizer": given.spec(),
            "initializer": initializers.spec("zeros"),
            "num_shards": self.num_shards,
        }
        self.cache = {
            "capacity": chance.randint(1, 6),
            "policy": chance.choice(["lru", "lfu"]),
            "read_bound": 0,
            "write_bound": 0,
            "synchronous": True,
            **self.row,
        }
        shards = range(self.num_shards)
        self.shards = [StepShard(model, DIM, self.rate) for _ in shards]
        self.tables = [
            ops.table_handle(shared_name=_name(), shard=shard, **self.row) for shard in shards
        ]
        self.barriers = [ops.step_handle(shared_name=_name()) for _ in shards]
        self.caches = [self._new_cache() for _ in range(self.num_workers)]
        self.spare = None
        if spares:
            self.spare = (
                ops.table_handle(shared_name=_name(), shard=0, **self.row),
                ops.step_handle(shared_name=_name()),
            )
        self.round = 0
        self.pool = concurrent.futures.ThreadPoolExecutor(4 * most_workers)
        self.counts: collections.Counter[str] = collections.Counter()

    def play(self, rounds: int = 4) -> None:
        """Plays rounds, then compares the tables with the model."""
        for _ in range(rounds):
            self.play_round()
        for cache in self.caches:
            ticket, requests = ops.cache_flush(cache, num_shards=self.num_shards, all=True)
            self.exchange(cache, ticket, requests)
        for shard, table in zip(self.shards, self.tables, strict=True):
            keys, values, slots, clocks = (x.numpy() for x in ops.table_export(table, 0, 1))
            assert set(keys.tolist()) == shard.rows.keys(), "rows that nobody trained, or none"
            for key, value, slot, clock in zip(keys.tolist(), values, slots, clocks, strict=True):
                row, updates = shard.rows[key]
                self.check(value, row.value)
                self.check(slot, row.slots)
                assert clock == updates, "lost or doubled"

    def play_round(self) -> None:
        """Plays a round: its members look up, and then make the same number of steps."""
        chance, self.round = self.chance, self.round + 1
        workers = chance.sample(range(self.num_workers), chance.randint(1, self.num_workers))
        steps = chance.randint(1, 4)
        members = [
            Member(number, worker, [self.draw_keys() for _ in range(steps)] + [[]])
            for number, worker in enumerate(workers)
        ]
        for barrier in self.barriers:
            ops.step_begin(barrier, self.round, len(members))
        for member in members:
            cache = self.caches[member.worker]
            member.ticket, requests = self.look_up(cache, member.keys[0])
            self.exchange(cache, member.ticket, requests)
        for step in range(steps):
            self.play_step([m for m in members if not m.is_gone], step, step == steps - 1)

    def play_step(self, members: Sequence[Member], step: int, is_last: bool) -> None:
        """All members read, train and send their messages, and those that are left are answered."""
        requests = {}
        for member in self.shuffled(members):
            cache, keys = self.caches[member.worker], member.keys[step]
            for key, row in zip(keys, ops.cache_gather(cache, member.ticket).numpy(), strict=True):
                self.check(row, self.shards[self.shard_of(key)].read(key))
            gradients = np.array(
                [[self.chance.randint(-3, 3) for _ in range(DIM)] for _ in keys], np.float32
            )
            ops.cache_update(cache, member.ticket, tf.constant(gradients), self.rate)
            sums: dict[int, np.ndarray] = {}
            for key, gradient in zip(keys, gradients.astype(np.float64), strict=True):
                sums[key] = sums.get(key, 0) + gradient
            member.ticket, parts = self.look_up(cache, member.keys[step + 1])
            requests[member] = parts, sums
        calls: dict[Member, list[Any]] = {}
        lasting = list(members)
        for member in self.shuffled(members):
            parts, sums = requests[member]
            dies = len(lasting) > 1 and self.chance.random() < 0.05
            shards = self.shuffled(range(self.num_shards))
            for shard in shards[: self.chance.randrange(len(shards))] if dies else shards:
                place = [self.round, member.number, step, int(is_last)]
                mine = {key: sum_ for key, sum_ in sums.items() if self.shard_of(key) == shard}
                self.shards[shard].push(member.number, mine)
                calls.setdefault(member, []).append(
                    (shard, self.send(shard, place, parts[shard], dies))
                )
            if dies:
                lasting.remove(member)
                self.leave(member)
                self.caches[member.worker] = self._new_cache()
                self.counts["deaths"] += 1
        for shard in self.shards:
            shard.merge()
        for member, sent in calls.items():
            if member.is_gone:
                continue
            replies = {shard: self.reply_to(calls_) for shard, calls_ in sent}
            if not is_last and len(lasting) > 1 and self.chance.random() < 0.1:
                lasting.remove(member)
                self.leave(member)  # it did not get the reply
                self.counts["lost replies"] += 1
                continue
            cache = self.caches[member.worker]
            mine = [replies[shard] for shard in range(self.num_shards)]
            if bool(ops.cache_install(cache, member.ticket, mine).incomplete):
                self.ask_again(cache, member.ticket)
        self.counts["steps"] += 1

    def send(self, shard: int, place: list[int], request: tf.Tensor, dies: bool) -> list[Any]:
        """Sends a message, or several times the same. Returns the calls."""
        header = np.asarray(place, np.int64).view(np.uint8)
        message = ops.pack_frames([header, request, np.zeros(0, np.uint8)])
        if self.spare is not None:
            self.send_broken(message.numpy())
        times = 1 + (self.chance.random() < 0.15)
        calls = [
            self.pool.submit(ops.serve_step, self.barriers[shard], [self.tables[shard]], message)
            for _ in range(times)
        ]
        self.counts["messages"] += times
        while dies and not self.has_arrived(shard, place):
            time.sleep(0.001)
        return calls

    def send_broken(self, message: np.ndarray) -> None:
        """A server takes or refuses a message with some other bytes, and serves on."""
        table, barrier = self.spare
        ops.step_begin(barrier, self.round, 1)
        broken = message.copy()
        for _ in range(self.chance.randint(1, 4)):
            broken[self.chance.randrange(len(broken))] = self.chance.randrange(256)
        broken = broken[: self.chance.choice([len(broken), self.chance.randrange(len(broken))])]
        try:
            ops.serve_step(barrier, [table], tf.constant(broken))
        except tf.errors.OpError:
            self.counts["refused"] += 1
        else:
            self.counts["taken"] += 1

    def has_arrived(self, shard: int, place: Sequence[int]) -> bool:
        """Whether the server has a member's message."""
        _, step, absent, _ = ops.step_waiting(self.barriers[shard])
        return int(step) > place[2] or place[1] not in absent.numpy()

    def reply_to(self, calls: Sequence[Any]) -> tf.Tensor:
        """Returns the reply to a message. One call is answered, whatever others are told."""
        replies = []
        for call in calls:
            with contextlib.suppress(*REFUSED):
                replies.append(ops.unpack_frames(call.result(timeout=60), n=2)[0])
        assert replies, "no call was answered"
        return replies[0]

    def leave(self, member: Member) -> None:
        """The others do not wait for a member any longer."""
        member.is_gone, member.ticket = True, None
        for barrier in self.barriers:
            ops.step_leave(barrier, self.round, [member.number])

    def look_up(self, cache: tf.Tensor, keys: Sequence[int]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Begins a lookup. Its requests also push what the last step has updated."""
        unique_ids = ops.unique_ids(tf.constant(keys, tf.int64))
        return ops.cache_lookup(cache, unique_ids, num_shards=self.num_shards)

    def exchange(self, cache: tf.Tensor, ticket: tf.Tensor, requests: list[tf.Tensor]) -> None:
        """Sends requests outside of a step and installs the replies."""
        replies = [
            ops.table_sync(table, request) if request.shape[0] else tf.zeros([0], tf.uint8)
            for table, request in zip(self.tables, requests, strict=True)
        ]
        if bool(ops.cache_install(cache, ticket, replies).incomplete):
            self.ask_again(cache, ticket)

    def ask_again(self, cache: tf.Tensor, ticket: tf.Tensor) -> None:
        """Asks for what a lookup still lacks."""
        self.exchange(cache, ticket, ops.cache_ask_again(cache, ticket, num_shards=self.num_shards))

    def check(self, actual: np.ndarray, expected: np.ndarray) -> None:
        """Compares rows: exactly with SGD."""
        tolerance = 0 if self.optimizer == "sgd" else 1e-5
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)

    def draw_keys(self) -> list[int]:
        """Keys of a step. They may repeat."""
        return self.chance.choices(self.keys, k=self.chance.randint(1, 6))

    def shard_of(self, key: int) -> int:
        return int(ops.shard_of(tf.constant([key], tf.int64), num_shards=self.num_shards)[0])

    def shuffled(self, items: Any) -> list[Any]:
        return self.chance.sample(list(items), len(items))

    def close(self) -> None:
        """Frees caches, tables and barriers."""
        for barrier in self.barriers:
            ops.step_begin(barrier, self.round + 1, 1)  # calls that wait are told
        self.pool.shutdown()
        spare = [] if self.spare is None else self.spare
        for handle in (*self.caches, *self.tables, *self.barriers, *spare):
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

    def _new_cache(self) -> tf.Tensor:
        return ops.cache_handle(shared_name=_name(), **self.cache)


@contextlib.contextmanager
def steps_of(seed: int, **options: Any) -> Iterator[Steps]:
    """A schedule. Prints its seed if it fails."""
    steps = Steps(seed, **options)
    try:
        yield steps
    except BaseException:
        print(f"synchronous steps of {seed=}, {options}")
        raise
    finally:
        steps.close()


def _name() -> str:
    return f"step_schedules/{next(_unique)}"
