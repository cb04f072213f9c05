"""Rows that come and go, under random schedules: messages lost and repeated, caches with staleness
that crash and evict, shards that start again, time that passes.

Two things must hold. The real shard does to every message what the plain one of lifetime_model.py
does to it. And whoever asks, with nothing of his own under way, reads the row as it is on its
shard, but for the updates that his bound lets him miss: none of an earlier life, and its initial
value where there is none.
"""

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from lifetime_model import ERA, Lifetimes, MortalShard
from model_system import ModelSystem
from ops_system import OpsSystem
from optimizer_model import Contribution, Sgd
from protocol_model import ABSENT, Config, Push, Reply, Request, Sent
from random_schedules import SAVES, check, drawn
from schedules import Begun, Fault, Player, Schedule
from wire import RESTARTED, parse_reply, parse_request

from het_tf import ops

KINDS = ("evict", "forget", "crash", "restart", "expire", "expire", "audit", "audit", "audit")
ANY = {"bounds": (0, 1, 2, 5, 100), "kinds": KINDS}
SAVED = {**ANY, "kinds": (*SAVES, "expire", "expire", "audit", "audit")}
# With fewer faults, so that what was counted before a save decides what comes after it.
OFTEN_SAVED = {
    "workers": (1, 2),
    "bounds": (0, 1),
    "kinds": ("save", "restore", "restore", "expire"),
    "loss": False,
    "max_events": 60,
}
# Where rows are held and go.
HELD = {
    "workers": (2,),
    "bounds": (0, 100),
    "kinds": ("expire", "audit"),
    "loss": False,
    "capacities": (4, 6),
}


def any_lifetimes(chance: random.Random) -> Lifetimes:
    ends = {
        "age": chance.choice([None, 0, 1, 2, 5]),
        "rare": chance.choice([0, 3]),
        "small": chance.choice([0, 1.2, 2.5]),
    }
    admissions = [
        {"admit": chance.randint(1, 4)},
        {"probability": chance.choice([0, 0.3, 0.7])},
        {"admit": chance.randint(2, 4), "sketch": chance.choice([64, 200])},
    ]
    made = Lifetimes(**chance.choice(admissions), **ends)
    return any_lifetimes(chance) if made.admits_all and made.age is None else made


def counted_lifetimes(chance: random.Random) -> Lifetimes:
    age, sketch = chance.choice([None, 2, 5]), chance.choice([0, 64, 64])
    return Lifetimes(admit=chance.randint(2, 4), age=age, sketch=sketch)


def short_lifetimes(chance: random.Random) -> Lifetimes:
    return Lifetimes(chance.choice([1, 3]), chance.choice([0, 1]))


def cases(
    number: int, options: dict, lifetimes: Callable = any_lifetimes, seed: int = 1
) -> Iterator[tuple[Schedule, Lifetimes]]:
    chance = random.Random(seed)
    return ((schedule, lifetimes(chance)) for schedule in drawn(number, seed, **options))


class Auditor(Player):
    """Every update adds one to its worker's column."""

    now = 0

    def __init__(self, *args):
        super().__init__(*args)
        # What their caches of before have sent may come late: that is not their own any longer.
        self.crashed: set[int] = set()

    def gradients(self, step: Begun, gradient: int) -> np.ndarray:
        gradients = np.zeros((len(step.keys), self.setup.dim))
        for key in dict.fromkeys(step.keys):
            gradients[step.keys.index(key), step.worker] = -1
        return gradients

    def fault(self, event: Fault) -> None:
        if event.kind == "expire":
            self.now += event.nth % 4
            self.system.expire(self.now)
        elif event.kind == "audit":
            self.audit(event.worker)
        else:
            if event.kind == "crash":
                self.crashed.add(event.worker)
            super().fault(event)

    def audit(self, worker: int) -> None:
        if not self.shard_of:
            return
        keys = tuple(self.shard_of)
        for _ in range(2):  # the first may tell the cache that it was forgotten
            self.install(self.flush(worker))
        step = self.lookup(worker, keys)
        while not step.installed:  # a flush that has nothing to send hears of no restart
            self.install(step)
        read, table = self.system.gather(step.handle), self.system.table()
        self.drop(step)
        for key, row in zip(keys, read, strict=True):
            value = table[key][0] if key in table else np.zeros(self.setup.dim)
            if worker not in self.crashed:
                own = row[worker] == value[worker]
                assert own, "own updates are there, once, and no refused ones"
            missed = value - row
            assert (missed >= 0).all(), "read of another life, or a row that is gone"
            assert missed.sum() <= self.setup.read_bound, "more missed than the read bound allows"


def run(schedule: Schedule, system) -> None:
    setup, events = schedule
    auditor = Auditor(setup, system)
    auditor.play(events)
    for worker in range(setup.num_workers):
        auditor.audit(worker)
    for steps in auditor.open:
        for step in list(steps):
            auditor.drop(step)
    # Everybody has heard of everything, so time ends what it should.
    system.expire(auditor.now + 100)
    assert system.rules.age is None or not system.table()
    for worker in range(setup.num_workers):
        auditor.audit(worker)


class MortalModel(ModelSystem):
    supports = frozenset((*KINDS, *SAVES))

    def __init__(self, setup, lifetimes: Lifetimes, shard: type[MortalShard] = MortalShard):
        mortal = type("Shard", (shard,), {"lifetimes": lifetimes})
        super().__init__(dataclasses.replace(setup, slots=False), shard=mortal)
        self.rules = lifetimes

    def expire(self, now: int) -> int:
        return sum(shard.expire(now) for shard in self.shards)

    def table(self):
        return {key: (v, s, clock % ERA) for key, (v, s, clock) in super().table().items()}


class MortalOps(OpsSystem):
    """The real ops, and beside each shard a plain one that gets the same messages."""

    supports = MortalModel.supports - {"evict", "forget"}

    def __init__(self, setup, lifetimes: Lifetimes, **options):
        super().__init__(
            dataclasses.replace(setup, slots=False), lifetimes=lifetimes.spec(), **options
        )
        self.rules, self.setup = lifetimes, setup
        plain = type("Shard", (MortalShard,), {"lifetimes": lifetimes})
        config = Config(Sgd(), lambda key: np.zeros(setup.dim))
        config = dataclasses.replace(config, num_shards=setup.num_shards)
        self.plain = [plain(config) for _ in range(setup.num_shards)]
        self.expire(0)  # time begins

    def deliver(self, sending, shard: int, keep: bool = True) -> None:
        reply = ops.table_sync(self.tables[shard], sending.requests[shard])
        if keep:
            sending.replies[shard] = reply
        request, answer = parse_request(sending.requests[shard]), parse_reply(reply)
        said = self.ask_plain(shard, request, bool(answer.header["flags"] & RESTARTED))
        assert answer.header["acknowledged"] == said.acknowledged
        asked, unasked = np.split(
            answer.rows, [len(answer.rows) - int(answer.header["num_unasked"])]
        )
        queries = [request.queries[q] for q in asked["query"]]
        for keys, rows, expected in (
            (queries, asked, said.rows),
            (unasked["query"].tolist(), unasked, said.unasked),
        ):
            clocks = dict(zip(keys, rows["clock"].tolist(), strict=True))
            assert clocks == {key: clock for key, (_, clock) in expected.items()}

    def ask_plain(self, shard: int, request, restarted: bool) -> Reply:
        plain, cache, dim = self.plain[shard], int(request.header["cache_id"]), self.setup.dim
        if cache not in plain.sessions:
            plain.sessions[cache] = [object(), 0, 0]
        pushes = []
        for push in request.pushes:
            floats, rows = push.floats.reshape(-1, dim).astype(float), {}
            for row, gradient in zip(push.gradients, floats, strict=False):
                made = rows.setdefault(int(row["key"]), Sent((), None, 0, 0))
                gradients = (*made.gradients, (gradient, 1.0))
                rows[int(row["key"])] = Sent(gradients, None, len(gradients), 0)
            for row, change in zip(push.contributions, floats[len(push.gradients) :], strict=True):
                count = int(row["updates"])
                made = Contribution(count, 1.0, change, np.zeros(0), np.zeros(dim))
                rows[int(row["key"])] = Sent((), made, count, 0)
            pushes.append(Push(push.sequence, rows))
        checks = dict.fromkeys(request.queries, ABSENT)
        checks |= zip(request.checked_keys, request.bases, strict=True)
        epoch = None if restarted else (plain.incarnation, plain.sessions[cache][0])
        bare = frozenset(request.checked_keys[int(request.header["num_checks"]) :])
        cut, watch, seen = (int(request.header[name]) for name in ("cut", "watch", "seen"))
        bound = int(request.header["read_bound"])
        plain.config = dataclasses.replace(plain.config, read_bound=bound)
        return plain.sync(Request(cache, epoch, cut, tuple(pushes), checks, bare, watch, seen))

    def restart(self, shard: int) -> None:
        super().restart(shard)
        self.plain[shard].clear()

    def save(self) -> None:
        super().save()
        self.plainly_saved = [plain.save() for plain in self.plain]

    def write(self) -> None:
        if self.cuts:  # a sketch is what it is when it is written
            for plain, (_, saved) in zip(self.plain, self.plainly_saved, strict=True):
                saved["sketches"] = copy.deepcopy(plain.sketches)
        super().write()

    def restore(self) -> None:
        super().restore()
        for plain, saved in zip(self.plain, self.plainly_saved, strict=True):
            plain.restore(saved)

    def expire(self, now: int) -> int:
        if self.rules.age is None:
            return 0
        self.write()
        self.now = now
        expired = [int(ops.table_expire(table, now)) for table in self.tables]
        assert expired == [plain.expire(now) for plain in self.plain]
        return sum(expired)

    def table(self):
        table = super().table()
        rows = {key: row for plain in self.plain for key, row in plain.rows.items()}
        assert table.keys() == rows.keys()
        for key, (row, clock) in rows.items():
            np.testing.assert_array_equal(table[key][0], row.value)
            assert table[key][2] == clock % ERA
        return table


def run_on_model(schedule: Schedule, lifetimes: Lifetimes, shard=MortalShard) -> None:
    run(schedule, MortalModel(schedule[0], lifetimes, shard))


def run_on_ops(schedule: Schedule, lifetimes: Lifetimes, **options) -> None:
    with contextlib.closing(MortalOps(schedule[0], lifetimes, **options)) as system:
        run(schedule, system)


def check_all(play: Callable, some: Iterator[tuple[Schedule, Lifetimes]], **options) -> None:
    for schedule, lifetimes in some:
        check(lambda part, lifetimes=lifetimes: play(part, lifetimes, **options), schedule)


def test_the_model_reads_rows_as_they_are_and_as_they_were_saved():
    for options in (ANY, SAVED):
        check_all(run_on_model, cases(60, options))


def test_the_ops_do_as_the_model_and_read_rows_as_they_are():
    check_all(run_on_ops, cases(60, ANY))


def test_the_ops_do_as_the_model_when_they_are_restored():
    check_all(run_on_ops, cases(40, SAVED))


def test_the_ops_do_as_the_model_with_counts_that_are_restored():
    check_all(run_on_ops, cases(40, OFTEN_SAVED, counted_lifetimes))


def test_the_ops_do_as_the_model_where_rows_often_go():
    check_all(run_on_ops, cases(60, HELD))


def test_rows_on_a_device_do_as_the_model():
    for host_rows in (0, 5):
        check_all(run_on_ops, cases(15, ANY), device="/device:CPU:0", host_rows=host_rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [ANY, SAVED, OFTEN_SAVED, HELD])
def test_many_longer_schedules(options):
    longer = options | {"max_events": 100}
    check_all(run_on_ops, cases(60, longer, seed=2))
    check_all(run_on_ops, cases(40, longer, counted_lifetimes, seed=2))


# The tests notice.


class SaysNothingOfRowsThatAreGone(MortalShard):
    def sync(self, request):
        reply = super().sync(request)
        rows = {key: row for key, row in reply.rows.items() if key in self.rows}
        return dataclasses.replace(reply, rows=rows)


class BeginsEveryLifeWithTheSameClock(MortalShard):
    def expire(self, now):
        expired = super().expire(now)
        self.gone = 0
        return expired


class TakesAnyRowForThePresentOne(MortalShard):
    def is_stale(self, key, base):
        return self.rows[key][1] % ERA - base % ERA > self.config.read_bound


class ForgetsToTellOfRefusals(MortalShard):
    def sync(self, request):
        reply = super().sync(request)
        told = {key: base for key, base in request.checks.items() if base < ERA}
        rows = {k: row for k, row in reply.rows.items() if k in self.rows or k not in told}
        return dataclasses.replace(reply, rows=rows)


@pytest.mark.parametrize(
    "fault",
    [
        SaysNothingOfRowsThatAreGone,
        BeginsEveryLifeWithTheSameClock,
        TakesAnyRowForThePresentOne,
        ForgetsToTellOfRefusals,
    ],
)
def test_a_built_in_fault_is_found(fault):
    for schedule, lifetimes in cases(60, HELD, short_lifetimes):
        try:
            run_on_model(schedule, lifetimes, fault)
        except (AssertionError, ValueError):
            return
    raise AssertionError("nobody noticed")
