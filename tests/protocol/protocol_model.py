"""The protocol of DESIGN 3.1-3.3 in plain Python, one cache per worker over several shards.

The C++ is tested against this, so it is written to be read beside the design: no TensorFlow, no
concurrency, every rule once. `clock="lamport"` is the rule of HET (VLDB 2022, arXiv 2112.07221).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

Array = np.ndarray
Step = Callable[
    [Array, Array, Array], tuple[Array, Array]
]  # (value, state, grad) -> (value, state)
Init = Callable[
    [int], tuple[Array, Array]
]  # key -> (value, state): pure, so anybody may compute it

_unique = itertools.count(
    1
)  # cache ids and incarnation ids; the real ones are random 64-bit numbers


class MessageLost(Exception):
    """A message did not arrive, or its answer did not: the sender cannot tell which."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What a table and all its caches agree on. A bound of None is unbounded."""

    step: Step
    init: Init
    read_bound: int | None = 0
    write_bound: int | None = 0
    clock: str = "count"  # or "lamport"
    capacity: int = 1 << 30


@dataclasses.dataclass
class Row:
    """What a shard keeps of a key, and what it answers with."""

    value: Array  # [d]
    state: Array  # [k]
    clock: int


@dataclasses.dataclass
class Line:
    """What a cache keeps of a key. `value` and `state` include every own update."""

    value: Array
    state: Array
    base: int  # the row's clock when last refreshed, moved by own pushes since
    dvalue: Array  # what the `pending` updates changed, none of them in any message yet
    dstate: Array
    pending: int = 0


@dataclasses.dataclass(frozen=True)
class Push:
    """A row on its way up: frozen when the message was cut."""

    dvalue: Array
    dstate: Array
    clock: int  # count: the number of updates; lamport: base + that number


@dataclasses.dataclass(frozen=True)
class Message:
    cache: int
    incarnation: int  # of the shard, as the cache knows it; 0 before the first answer
    sequence: int
    pushes: dict[int, Push]
    checks: dict[int, int]  # key -> clock the cache holds, -1 for a key it does not hold


@dataclasses.dataclass(frozen=True)
class Answer:
    incarnation: int
    rows: dict[int, Row]


class Shard:
    """One part of the table: `sync` is all a cache can ask of it."""

    def __init__(self, config: Config):
        self.config = config
        self.clear()

    def clear(self) -> None:
        """Forgets every row, as creating the shard anew would."""
        self.rows: dict[int, Row] = {}
        self.merged: dict[int, int] = {}  # cache id -> sequence of the last message merged
        self.incarnation = next(_unique)

    def sync(self, message: Message) -> Answer:
        """Merges the pushes, once however often the message arrives, then answers the checks."""
        known = message.incarnation == self.incarnation
        if known and message.pushes and message.sequence > self.merged.get(message.cache, 0):
            self.merged[message.cache] = message.sequence
            for key, push in message.pushes.items():
                self._merge(key, push)
        read_bound = _or_infinite(self.config.read_bound)
        answer = {}
        for key, held in message.checks.items():
            row = self.rows.get(key)
            if row and (held < 0 or not known or row.clock - held > read_bound):
                answer[key] = dataclasses.replace(row)
        if self.config.clock == "lamport" and known:
            answer |= {key: dataclasses.replace(self.rows[key]) for key in message.pushes}
        return Answer(self.incarnation, answer)

    def _merge(self, key: int, push: Push) -> None:
        row = self.rows.setdefault(key, Row(*self.config.init(key), clock=0))
        row.value = row.value + push.dvalue
        row.state = row.state + push.dstate
        count = self.config.clock == "count"
        row.clock = row.clock + push.clock if count else max(row.clock, push.clock)


class Cache:
    """One worker's cache.

    `send(shard index, message)` returns the shard's answer or raises MessageLost; `victim(keys)`
    chooses which of the evictable keys leaves. After MessageLost from `lookup` or `flush` the
    caller repeats it; from `update` it does not: the update is made, only its push is delayed.
    """

    def __init__(
        self,
        config: Config,
        num_shards: int,
        send: Callable[[int, Message], Answer],
        victim: Callable[[Sequence[int]], int] = lambda keys: keys[0],
    ):
        self.config, self.num_shards, self.send, self.victim = config, num_shards, send, victim
        self.id = next(_unique)
        self.lines: dict[int, Line] = {}
        self.outbox: list[dict[int, Line]] = [{} for _ in range(num_shards)]  # to be pushed next
        self.flight: list[dict[int, Push]] = [
            {} for _ in range(num_shards)
        ]  # pushed, no answer yet
        self.sequence = [0] * num_shards  # of the flight, or of the last one
        self.incarnation = [0] * num_shards
        self.pinned: set[int] = set()  # the current batch

    def shard_of(self, key: int) -> int:
        return key % self.num_shards

    def lookup(self, keys: Sequence[int]) -> Array:
        """Rows [len(keys), d], missing no more of the others' updates than the bounds allow."""
        self.pinned = set(keys)
        for key in self.pinned:
            if line := self._line(key):  # evicted but not sent yet: take it back
                self.lines[key] = line
        self._shrink()
        for shard in range(self.num_shards):
            self._sync(shard, [key for key in self.pinned if self.shard_of(key) == shard])
        return np.stack([self.lines[key].value for key in keys])

    def update(self, keys: Sequence[int], grads: Array) -> None:
        """Makes one update per distinct key of the last lookup. KeyError for any other key."""
        unique, inverse = np.unique(np.asarray(keys, np.int64), return_inverse=True)
        summed = np.zeros((len(unique), *grads.shape[1:]), grads.dtype)
        np.add.at(summed, inverse, grads)
        for key, grad in zip(unique.tolist(), summed, strict=True):
            line = self.lines[key]
            value, state = self.config.step(line.value, line.state, grad)
            line.dvalue = line.dvalue + (value - line.value)
            line.dstate = line.dstate + (state - line.state)
            line.value, line.state = value, state
            line.pending += 1
            if line.pending >= max(1, _or_infinite(self.config.write_bound)):
                self.outbox[self.shard_of(key)][key] = line
        self.pinned -= set(unique.tolist())
        self._shrink()
        if self.config.write_bound == 0:
            self._push_all()

    def flush(self) -> None:
        """Sends everything pending; on return the shards have it."""
        for key, line in self.lines.items():
            if line.pending:
                self.outbox[self.shard_of(key)][key] = line
        self._push_all()

    def clock(self, key: int) -> int | None:
        """The paper's clock, base + pending, of a key held here (cached or still to be sent)."""
        line = self._line(key)
        return None if line is None else line.base + line.pending

    def _line(self, key: int) -> Line | None:
        return self.lines.get(key) or self.outbox[self.shard_of(key)].get(key)

    def _push_all(self) -> None:
        for shard in range(self.num_shards):
            while self.flight[shard] or self.outbox[shard]:
                self._sync(shard, [])

    def _sync(self, shard: int, keys: Iterable[int]) -> None:
        """Exchanges one message: flight up, checks of `keys` up, rows down. None if it is empty."""
        if not self.flight[shard] and self.outbox[shard]:
            self.sequence[shard] += 1
            self.flight[shard] = {k: self._cut(line) for k, line in self.outbox[shard].items()}
            self.outbox[shard] = {}
        flight = self.flight[shard]
        checks = {key: self._held(key, flight.get(key)) for key in keys}
        if not flight and not checks:
            return
        incarnation = self.incarnation[shard]
        answer = self.send(
            shard, Message(self.id, incarnation, self.sequence[shard], flight, checks)
        )
        if answer.incarnation != incarnation:
            self._forget(shard)
            self.incarnation[shard] = answer.incarnation
        elif self.config.clock == "count":
            for key, push in flight.items():
                if line := self._line(key):
                    line.base += push.clock
        self.flight[shard] = {}
        for key in checks.keys() | answer.rows.keys():
            if key in answer.rows:
                self._fill(key, answer.rows[key])
            elif not self._line(key):  # nobody has updated it: what it starts as is known here
                self._fill(key, Row(*self.config.init(key), clock=0))

    def _cut(self, line: Line) -> Push:
        clock = line.pending + (line.base if self.config.clock == "lamport" else 0)
        push = Push(line.dvalue, line.dstate, clock)
        line.dvalue, line.dstate = np.zeros_like(line.dvalue), np.zeros_like(line.dstate)
        line.pending = 0
        return push

    def _held(self, key: int, push: Push | None) -> int:
        line = self.lines.get(key)
        if line is None:
            return -1
        if self.config.clock == "lamport":
            return line.base + line.pending  # of no matter with a push: the row comes back anyway
        return line.base + (push.clock if push else 0)

    def _fill(self, key: int, row: Row) -> None:
        if line := self._line(key):  # own updates that were in no message yet stay on top
            line.value, line.state = row.value + line.dvalue, row.state + line.dstate
            line.base = row.clock
        elif key in self.pinned:
            none = np.zeros_like(row.value), np.zeros_like(row.state)
            self.lines[key] = Line(row.value, row.state, row.clock, *none)

    def _shrink(self) -> None:
        free = [key for key in self.lines if key not in self.pinned]
        while len(self.lines) > self.config.capacity and free:
            key = self.victim(free)
            free.remove(key)
            line = self.lines.pop(key)
            if line.pending:
                self.outbox[self.shard_of(key)][key] = line

    def _forget(self, shard: int) -> None:
        self.lines = {k: line for k, line in self.lines.items() if self.shard_of(k) != shard}
        self.outbox[shard] = {}


def _or_infinite(bound: int | None) -> float:
    return math.inf if bound is None else bound


def sgd(rate: float) -> Step:
    return lambda value, state, grad: (value - rate * grad, state)


def zeros(dim: int, slots: int = 0) -> Init:
    return lambda key: (np.zeros(dim), np.zeros(slots))


def uniform(seed: int, dim: int, slots: int = 0) -> Init:
    """Values in [-0.05, 0.05) of a counter-based generator: a function of seed, key and column."""

    def init(key: int) -> tuple[Array, Array]:
        counter = np.array([0, 0, 0, key % 2**64], np.uint64)
        philox = np.random.Philox(key=seed, counter=counter)
        return np.random.Generator(philox).uniform(-0.05, 0.05, dim), np.zeros(slots)

    return init
