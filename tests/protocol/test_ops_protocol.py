"""The consistency that het_tf promises, on the real ops in one process.

Schedules and properties are those of the model (schedules.py, ledger.py); the same, with fresh
schedules for as long as one likes, is `make fuzz`. That one worker is as without a cache is in
test_protocol_ops.py.
"""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
from ledger import Ledger, run
from named_schedules import EXAMPLES
from ops_system import OpsSystem, WatchedOps
from random_schedules import BOUNDS, SAVES, check, drawn
from schedules import Setup
from wire import RESTARTED

from het_tf import ops

# Whatever the schedule, the bounds, the shards, the faults and the policy.


def run_on_ops(schedule, **options):
    with contextlib.closing(OpsSystem(schedule[0], **options)) as system:
        run(schedule, system)


def run_with_lfu(schedule):
    run_on_ops(schedule, policy="lfu")


@pytest.mark.parametrize("clock", BOUNDS)
def test_loses_doubles_and_misses_nothing(clock):
    for number, schedule in enumerate(drawn(60, clock=clock)):
        check(run_with_lfu if number % 3 == 0 else run_on_ops, schedule)


@pytest.mark.parametrize("clock", BOUNDS)
def test_a_table_that_is_restored_is_what_was_saved(clock):
    for schedule in drawn(20, clock=clock, kinds=SAVES):
        check(run_on_ops, schedule)


@pytest.mark.parametrize("clock", BOUNDS)
def test_hot_phases_lose_and_double_nothing(clock):
    for schedule in drawn(40, clock=clock, keeps=True):
        check(run_on_ops, schedule)


@pytest.mark.exhaustive
@pytest.mark.parametrize("clock", BOUNDS)
def test_many_longer_schedules(clock):
    for schedule in drawn(50, seed=2, clock=clock, max_events=100):
        check(run_with_lfu, schedule)
    for schedule in drawn(50, seed=2, clock=clock, max_events=100, kinds=SAVES):
        check(run_on_ops, schedule)


def test_24_workers():
    for schedule in drawn(1, workers=(24,)):
        check(run_on_ops, schedule)


@pytest.mark.parametrize("clock", BOUNDS)
def test_examples(clock):
    for setup, events in EXAMPLES.values():
        run_on_ops((dataclasses.replace(setup, clock=clock), events))


# The bounds are kept in schedules; here they are reached, so nothing tighter holds.


@contextlib.contextmanager
def watched(**setup):
    with contextlib.closing(WatchedOps(Setup(**setup))) as system:
        yield Ledger(system.setup, system), system


def admit(ledger: Ledger, *workers: int) -> None:
    """A row gets a line once it has come again."""
    for worker in workers:
        for _ in range(5):
            read(ledger, worker)


def read(ledger: Ledger, worker: int, keys: tuple[int, ...] = (0,)) -> np.ndarray:
    """How many updates of each worker the worker finds in each row."""
    step = ledger.lookup(worker, keys)
    ledger.install(step)
    rows = ledger.system.gather(step.handle)
    ledger.drop(step)
    return rows[:, : ledger.setup.num_workers]


def train(ledger: Ledger, worker: int, times: int, keys: tuple[int, ...] = (0,)) -> None:
    for _ in range(times):
        ledger.step(worker, keys)


def flush(ledger: Ledger, worker: int) -> None:
    ledger.install(ledger.flush(worker))


@pytest.mark.parametrize(("bound", "write"), [(0, 1), (2, 3), (5, 0), (100, 100)])
def test_a_read_misses_read_bound_and_write_bound_of_every_other_worker(bound, write):
    with watched(num_workers=3, num_shards=1, capacity=9, read_bound=bound, write_bound=write) as (
        ledger,
        _,
    ):
        admit(ledger, 0, 1, 2)
        train(ledger, 1, bound)
        flush(ledger, 1)
        for worker in (1, 2):  # the last update of the bound is due, not yet sent
            train(ledger, worker, write)
        assert read(ledger, 0).sum() == 0  # misses them all
        train(ledger, 1, 1)
        flush(ledger, 1)
        assert read(ledger, 0)[0, 1] >= bound + 1  # one more, and they come


def test_unbounded_reads_are_never_refreshed():
    with watched(num_workers=2, num_shards=1, capacity=9, read_bound=None, write_bound=0) as (
        ledger,
        system,
    ):
        admit(ledger, 0)
        train(ledger, 1, 300)
        messages = len(system.exchanges)
        assert read(ledger, 0)[0, 1] == 0
        assert len(system.exchanges) == messages  # it did not even ask


@pytest.mark.parametrize("staleness", [0, 1, 2, 10])
def test_lamport_clocks_reach_twice_the_staleness_and_no_more(staleness):
    with watched(
        num_workers=2,
        num_shards=1,
        capacity=9,
        read_bound=staleness,
        write_bound=staleness,
        clock="lamport",
    ) as (ledger, system):
        admit(ledger, 0, 1)
        apart = []
        for _ in range(5 * staleness + 5):
            train(ledger, 1, 1)
            read(ledger, 0)
            apart.append(system.lamport_clock(1, 0) - system.lamport_clock(0, 0))
        assert max(apart) == 2 * staleness


@pytest.mark.parametrize(("clock", "comes_back"), [("lamport", True), ("count", False)])
def test_a_row_that_is_pushed_comes_back_under_lamport_clocks_only(clock, comes_back):
    with watched(
        num_workers=2, num_shards=1, capacity=9, read_bound=5, write_bound=5, clock=clock
    ) as (ledger, _):
        admit(ledger, 0, 1)
        train(ledger, 1, 1)
        flush(ledger, 1)
        train(ledger, 0, 5)  # the bound: to be pushed by the next lookup
        assert read(ledger, 0).tolist() == [[5, comes_back]]


@pytest.mark.parametrize("clock", BOUNDS)
@pytest.mark.parametrize("capacity", [0, 1, 9])
def test_staleness_0_shows_an_update_of_any_worker_to_any_other(capacity, clock):
    with watched(
        num_workers=3,
        num_shards=2,
        capacity=capacity,
        read_bound=0,
        write_bound=0,
        clock=clock,
    ) as (ledger, _):
        made = np.zeros(3)
        for writer, reader in [*itertools.product(range(3), repeat=2)] * 2:
            train(ledger, writer, 1)
            made[writer] += 1
            np.testing.assert_array_equal(read(ledger, reader, (0, 1, 2))[0], made)


# Keys, messages, policies.


def test_keys_stay_distinct_in_caches_messages_and_shards():
    keys = [0, -1, 2**63 - 1, -(2**63)]
    keys += [
        sign * (2**bits + i) for sign in (1, -1) for bits in (24, 31, 32, 53) for i in (-1, 0, 1)
    ]
    setup = Setup(1, 3, capacity=5, read_bound=9, write_bound=9)
    with contextlib.closing(OpsSystem(setup)) as system:
        ledger = Ledger(setup, system)
        for _ in range(3):
            for number, key in enumerate(keys):
                ledger.step(0, (key,), gradient=number)
        step = ledger.lookup(0, tuple(keys))
        ledger.install(step)
        wanted = [[3, 3 * number] for number in range(len(keys))]
        np.testing.assert_array_equal(system.gather(step.handle)[:, [0, -1]], wanted)
        flush(ledger, 0)
        table = system.table()
        assert len(table) == len(keys)
        assert [table[key][0][[0, -1]].tolist() for key in keys] == wanted


@pytest.mark.parametrize("capacity", [0, 9])
def test_a_message_sent_again_changes_nothing(capacity):
    with watched(num_workers=1, num_shards=1, capacity=capacity, read_bound=0, write_bound=0) as (
        ledger,
        system,
    ):
        train(ledger, 0, 5)
        before = system.table()[0]
        sent = ledger.sent[0]
        for step in sent + sent[::-1]:  # all of them, in and out of order
            system.deliver(step.handle, 0, keep=False)
        after = system.table()[0]
        for was, now in zip(before, after, strict=True):
            np.testing.assert_array_equal(was, now)
        names, values = (each.numpy().tolist() for each in ops.table_stats(system.tables[0]))
        stats = dict(zip(names, values, strict=True))
        assert stats[b"pushes_merged"] == 5
        assert stats[b"pushes_repeated"] == 10


def test_a_message_of_before_a_restart_changes_nothing_after_it():
    with watched(num_workers=1, num_shards=1, capacity=9, read_bound=0, write_bound=0) as (
        ledger,
        system,
    ):
        train(ledger, 0, 3)
        sent = list(ledger.sent[0])
        system.restart(0)
        ledger.has_restarted(0)
        for step in sent:
            system.deliver(step.handle, 0, keep=False)
            assert system.table() == {}
        assert read(ledger, 0).sum() == 0
        assert system.exchanges[-1].reply.header["flags"] == RESTARTED


def look_up(system: WatchedOps, keys) -> None:
    step = system.lookup(0, keys)
    for shard in system.shards_with_requests(step):
        system.deliver(step, shard)
    system.install(step)
    system.drop(step)


@pytest.mark.parametrize(("policy", "kept"), [("lfu", True), ("lru", False)])
def test_a_scan_flushes_lru_but_not_lfu(policy, kept):
    """(What the policies keep otherwise: ops/core/cache/eviction_test.cc.)"""
    setup = Setup(1, 1, capacity=100, read_bound=0, write_bound=100)
    with contextlib.closing(WatchedOps(setup, policy=policy)) as system:
        for _ in range(20):
            look_up(system, range(50))
        for first in range(1000, 1400, 20):
            look_up(system, range(first, first + 20))
        look_up(system, range(50))
        hits = len(system.exchanges[-1].request.bases)
        assert hits == (50 if kept else 0)
