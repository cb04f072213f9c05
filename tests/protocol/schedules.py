"""Random schedules of workers, shards and faults, and the properties that hold on every one.

A schedule is a `Setup` and a list of events. `run(schedule, system)` carries it out on anything
that has the methods of `System`: the model here, the real ops elsewhere. What a read saw is taken
from the values alone: steps are plain SGD with rate 1 from zero rows, and each update of worker j
adds one to column j, so `value[j]` is how many updates of j are in the row. The last column carries
integer gradients, so that an update applied to the wrong row cannot hide.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
from hypothesis import strategies as st
from protocol_model import MessageLost

# Keys that float32, int32, float64 or a sign bit would fold together.
KEYS = (0, 1, 2, 3, -1, 2**24, 2**24 + 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63))


class System(Protocol):
    """A table on several shards and one cache per worker, all in one address space or not.

    `lookup` and `flush` may raise MessageLost and are then repeated or given up; `update` may raise
    it when it pushes in the same step, and is then not repeated: the update counts as made.
    """

    supports: Collection[str]  # of "lost", "answer_lost", "twice", "redeliver", "crash", "restart"

    def lookup(self, worker: int, keys: Sequence[int]) -> np.ndarray: ...  # [len(keys), dim]
    def update(self, worker: int, keys: Sequence[int], grads: np.ndarray) -> None: ...
    def flush(self, worker: int) -> None: ...

    def table(self) -> Mapping[int, tuple[np.ndarray, np.ndarray, int]]:
        """Every row on the shards, (value, state, clock) by key; caches are not asked."""

    def shard_of(self, key: int) -> int: ...

    def clock(self, worker: int, key: int) -> int | None:
        """The paper's clock of a key the worker holds, None where it holds none or cannot tell."""

    def arm(self, worker: int, shard: int, fault: str) -> None:
        """The next message between the two is lost, its answer is lost, or it arrives twice."""

    def redeliver(self, worker: int, shard: int, nth: int) -> None:
        """A copy of an earlier message arrives now; nobody waits for the answer."""

    def crash(self, worker: int) -> None:
        """The worker is killed and a new one, with an empty cache, takes its place."""

    def restart(self, shard: int) -> None:
        """The shard comes back empty (create, clear and restore look alike to a cache)."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the system is made of. A bound of None is unbounded."""

    num_workers: int
    num_shards: int
    capacity: int
    read_bound: int | None
    write_bound: int | None
    clock: str = "count"
    evict_seed: int = 0

    @property
    def dim(self) -> int:
        return self.num_workers + 1


@dataclasses.dataclass(frozen=True)
class Lookup:
    worker: int
    keys: tuple[int, ...]  # may repeat
    persist: bool = True  # repeat the lookup when a message is lost; else give the step up


@dataclasses.dataclass(frozen=True)
class Update:
    """Of the keys of the worker's last lookup, once; nothing where it has been made already."""

    worker: int
    grad: int = 1


@dataclasses.dataclass(frozen=True)
class Flush:
    worker: int


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str  # a member of System.supports
    worker: int = 0
    shard: int = 0
    nth: int = 0


Event = Lookup | Update | Flush | Fault
Schedule = tuple[Setup, tuple[Event, ...]]


@st.composite
def schedules(
    draw: st.DrawFn,
    workers: Sequence[int] = (1, 2, 3, 4),
    bounds: Sequence[int | None] = (0, 1, 2, 3, 5, None),
    same_bounds: bool = False,
    clock: str = "count",
    kinds: Sequence[str] = ("lost", "answer_lost", "twice", "redeliver", "crash", "restart"),
    max_events: int = 40,
) -> Schedule:
    """Schedules over few keys, so that workers meet, and tiny caches, so that rows are evicted."""
    read = draw(st.sampled_from(bounds))
    write = read if same_bounds else draw(st.sampled_from(bounds))
    setup = Setup(
        num_workers=draw(st.sampled_from(workers)),
        num_shards=draw(st.integers(1, 5)),
        capacity=draw(st.integers(1, 6)),
        read_bound=read,
        write_bound=write,
        clock=clock,
        evict_seed=draw(st.integers(0, 3)),
    )
    some = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    worker = st.integers(0, setup.num_workers - 1)
    shard = st.integers(0, setup.num_shards - 1)
    keys = st.lists(st.sampled_from(some), min_size=1, max_size=6).map(tuple)
    lookup = st.builds(Lookup, worker, keys, st.booleans())
    update = st.builds(Update, worker, st.integers(-3, 3))
    step = st.tuples(lookup, st.integers(-3, 3)).map(
        lambda pair: (pair[0], Update(pair[0].worker, pair[1]))
    )
    alone = [lookup, update, st.builds(Flush, worker)]
    if kinds:
        alone.append(st.builds(Fault, st.sampled_from(kinds), worker, shard, st.integers(0, 9)))
    event = st.one_of(step, step, step, *[single.map(lambda one: (one,)) for single in alone])
    length = draw(st.integers(0, max_events))  # lists alone would mostly be shorter than ten
    events = draw(st.lists(event, min_size=length, max_size=length))
    return setup, tuple(one for group in events for one in group)


def run(schedule: Schedule, system: System) -> None:
    """Carries the schedule out and asserts the properties on the way and at the end."""
    setup, events = schedule
    ledger = Ledger(setup, system)
    for event in events:
        match event:
            case Lookup():
                ledger.lookup(event)
            case Update():
                ledger.update(event)
            case Flush():
                ledger.flush(event.worker)
            case Fault() if event.kind in system.supports:
                ledger.fault(event)
    ledger.finish()


class Ledger:
    """Remembers every update made, and holds each read and the final table against it."""

    def __init__(self, setup: Setup, system: System):
        self.setup, self.system = setup, system
        self.made: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
        self.batch: dict[int, tuple[int, ...]] = {}  # worker -> keys looked up, not updated yet
        self.unfinished: dict[int, set[int]] = collections.defaultdict(set)

    def lookup(self, event: Lookup) -> None:
        worker = event.worker
        self.batch.pop(worker, None)
        while True:
            try:
                values = self.system.lookup(worker, event.keys)
                break
            except MessageLost:
                if not event.persist:
                    return
        self.unfinished.pop(worker, None)
        self.batch[worker] = event.keys
        for key, value in zip(event.keys, values, strict=True):
            self._check_read(worker, key, value)

    def update(self, event: Update) -> None:
        worker = event.worker
        keys = self.batch.pop(worker, ())
        if not keys:
            return
        unique = dict.fromkeys(keys)
        for key in unique:
            self.made[worker, key].append(event.grad)
        # The first occurrence carries the gradient and the others zeros, but together they are one
        # update: a system that counts occurrences or applies them apart shows in clock or column.
        grads = np.zeros((len(keys), self.setup.dim))
        for key in unique:
            grads[keys.index(key), worker] = -1
            grads[len(keys) - 1 - keys[::-1].index(key), -1] = -event.grad
        try:
            self.system.update(worker, keys, grads)
        except MessageLost:
            self.unfinished[worker] |= unique.keys()

    def flush(self, worker: int) -> None:
        while True:
            try:
                self.system.flush(worker)
                break
            except MessageLost:
                pass
        self.unfinished.pop(worker, None)
        for key, merged in self._merged(worker).items():
            assert merged == len(self.made[worker, key]), "flushed, yet not on the shard"

    def fault(self, event: Fault) -> None:
        if event.kind == "redeliver":
            self.system.redeliver(event.worker, event.shard, event.nth)
        elif event.kind == "crash":
            self._crash(event.worker)
        elif event.kind == "restart":
            self._restart(event.shard)
        else:
            self.system.arm(event.worker, event.shard, event.kind)

    def finish(self) -> None:
        """After a flush of all: every update made is in the table exactly once."""
        for worker in range(self.setup.num_workers):
            self.flush(worker)
        table = self.system.table()
        updated = {key for (_, key), made in self.made.items() if made}
        assert set(table) == updated, "rows come into being by update, and only so"
        for key, (value, _, clock) in table.items():
            made = [self.made[worker, key] for worker in range(self.setup.num_workers)]
            assert value[:-1].tolist() == [len(each) for each in made]
            assert value[-1] == sum(map(sum, made))
            if self.setup.clock == "count":
                assert clock == sum(map(len, made))
            else:
                assert max(map(len, made)) <= clock <= sum(map(len, made))

    def allowed(self, reader: int, key: int) -> float:
        """How many updates of the others a read by `reader` may miss."""
        setup = self.setup
        if setup.read_bound is None or setup.write_bound is None:
            return float("inf")
        others = [worker for worker in range(setup.num_workers) if worker != reader]
        if setup.clock == "lamport":
            return len(others) * (2 * setup.read_bound + 3 * max(1, setup.write_bound))
        if setup.write_bound == 0:  # at most the update of a step whose push has not arrived yet
            return setup.read_bound + sum(key in self.unfinished[worker] for worker in others)
        return setup.read_bound + len(others) * setup.write_bound

    def _check_read(self, worker: int, key: int, value: np.ndarray) -> None:
        made = [len(self.made[each, key]) for each in range(self.setup.num_workers)]
        assert value[worker] == made[worker], "own updates are always there, once"
        missed = [made[each] - value[each] for each in range(self.setup.num_workers)]
        assert min(missed) >= 0, "an update read that nobody made"
        assert sum(missed) <= self.allowed(worker, key), "more updates missed than the bounds allow"
        if self.setup.clock == "lamport":
            self._check_clocks(worker, key)

    def _check_clocks(self, worker: int, key: int) -> None:
        """Lemma 1 at a read: no clock anywhere is further than the bounds ahead of the reader's."""
        own = self.system.clock(worker, key)
        bounds = self.setup.read_bound, self.setup.write_bound
        if own is None or None in bounds:
            return
        for other in range(self.setup.num_workers):
            clock = self.system.clock(other, key)
            ahead = 0 if clock is None else clock - own
            assert ahead <= bounds[0] + max(bounds[1], key in self.unfinished[other])

    def _crash(self, worker: int) -> None:
        self.batch.pop(worker, None)
        self.unfinished.pop(worker, None)
        self.system.crash(worker)
        for key, merged in self._merged(worker).items():
            made = self.made[worker, key]
            lost = len(made) - merged
            assert lost >= 0
            if self.setup.write_bound is not None:
                assert lost <= max(1, self.setup.write_bound), "more lost than was at risk"
            del made[merged:]  # what was pushed is a prefix: updates travel in order

    def _merged(self, worker: int) -> dict[int, int]:
        """How many updates of the worker the shards have, by key."""
        table = self.system.table()
        keys = [key for who, key in self.made if who == worker]
        return {key: int(table[key][0][worker]) if key in table else 0 for key in keys}

    def _restart(self, shard: int) -> None:
        self.batch.clear()  # every step in progress fails
        self.system.restart(shard)
        for worker, key in self.made:
            if self.system.shard_of(key) == shard:
                self.made[worker, key].clear()
