"""The consistency that het_tf promises, (a) to (h), on the real ops in one process.

The letters are those of the promises: (a) one worker is as without a cache; (b) nothing lost,
nothing doubled; (c) reads miss no more than the bounds allow; (d) staleness 0 hides nothing; (e) a
key's occurrences in a batch are one update; (f) keys stay distinct; (g) a repeated message changes
nothing; (h) new hot keys displace old ones. Schedules and properties are those of the model
(schedules.py); (f) through the layer is in test_layer.py.
"""

import contextlib
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from ops_system import OpsSystem
from schedules import KEYS, Ledger, Lookup, Setup, Update, run, schedules
from wire import RESTARTED, WatchedOps

from het_tf import initializers, ops, optimizers

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=20)


# (b), (c), (e), (f), (g): whatever the schedule, the bounds, the shards, the faults and the policy.


def run_on_ops(schedule, **options):
    with contextlib.closing(WatchedOps(schedule[0], **options)) as system:
        run(schedule, system)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@repeatable
@given(schedule=schedules())
def test_bcefg_count_clock_loses_doubles_and_misses_nothing(policy, schedule):
    run_on_ops(schedule, policy=policy)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@repeatable
@given(schedule=schedules(clock="lamport", same_bounds=True))
def test_bcefg_lamport_clock_keeps_lemma_1(policy, schedule):
    run_on_ops(schedule, policy=policy)


@pytest.mark.parametrize("clock", ["count", "lamport"])
@repeatable
@given(schedule=schedules(bounds=(0,), kinds=("twice", "redeliver", "crash", "restart")))
def test_d_staleness_0_shows_every_update_to_the_next_lookup(clock, schedule):
    run_on_ops(schedule)


@repeatable
@given(schedules(bounds=(0,)))
def test_bcd_without_a_cache_nothing_is_lost_doubled_or_missed(schedule):
    run_on_ops(schedule, cached=False)


# (a): one worker. Steps of integers must come out bit for bit, others up to fp32 rounding.


class WideSetup(Setup):
    dim = 11  # more than a vector register, and not a multiple of one


EXACT = [optimizers.SGD(), optimizers.Momentum(momentum=1.0)]
ROUNDED = [
    optimizers.SGD(weight_decay=0.1),
    optimizers.Momentum(),
    optimizers.Momentum(nesterov=True, clipnorm=1.0),
    optimizers.Adagrad(),
    optimizers.Adagrad(max_norm=0.5),
    optimizers.RowWiseAdagrad(),
    optimizers.RowWiseAdagrad(weight_decay=0.1),
    optimizers.Adam(),
    optimizers.RowWiseAdam(),
    optimizers.Ftrl(),
    optimizers.Ftrl(l1=0.01, l2=0.1, l2_shrinkage=0.01, beta=0.1),
]
CAPACITIES = (1, 3, 1000)
STALENESS = (0, 1, 5, 100, None)


def label(optimizer: optimizers.Optimizer) -> str:
    changed = [f"{k}={v}" for k, v in vars(optimizer).items() if v != getattr(type(optimizer), k)]
    return ",".join([optimizer.name, *changed])


def initializer_for(optimizer: optimizers.Optimizer) -> str:
    return "zeros" if optimizer in EXACT else "uniform"


@functools.cache
def steps(exact: bool):
    """(ids, gradients, learning rate): 12 keys, some repeated in a batch, and a rate that falls."""
    random = np.random.default_rng(5)
    made = []
    for step in range(25):
        ids = random.choice(KEYS, random.integers(1, 9))
        shape = (len(ids), WideSetup.dim)
        grads = random.integers(-3, 4, shape) if exact else random.normal(size=shape)
        rate = 1.0 if exact else 0.1 / (1 + step)
        made.append((ids, grads.astype(np.float32), rate))
    return made


def setup_of_one_worker(shards: int, capacity: int, staleness: int | None) -> WideSetup:
    return WideSetup(1, shards, capacity, read_bound=staleness, write_bound=staleness)


def trained(setup: Setup, optimizer: optimizers.Optimizer, **options):
    options |= {"optimizer": optimizer, "initializer": initializer_for(optimizer)}
    with contextlib.closing(OpsSystem(setup, **options)) as system:
        for ids, grads, rate in steps(optimizer in EXACT):
            system.learning_rate = rate
            system.lookup(0, ids)
            system.update(0, ids, grads)
        system.flush(0)
        return system.table()


@functools.cache
def trained_on_the_table(optimizer: optimizers.Optimizer):
    """The same steps on a table in this process, with no cache at all."""
    table = ops.table_handle(
        shared_name=f"test_ops_protocol/{label(optimizer)}",
        dim=WideSetup.dim,
        optimizer=optimizer.spec(),
        initializer=initializers.spec(initializer_for(optimizer)),
        seed=3,
    )
    for ids, grads, rate in steps(optimizer in EXACT):
        ops.table_apply(table, ops.unique_ids(tf.constant(ids, tf.int64)), grads, rate)
    keys, *columns = (each.numpy() for each in ops.table_export(table, 0, 1))
    return dict(zip(keys.tolist(), zip(*columns, strict=True), strict=True))


def assert_same(actual, expected, exact: bool, context: str) -> None:
    assert actual.keys() == expected.keys(), context
    for column, what in enumerate(("values", "slots", "clocks")):
        wanted = np.array([expected[key][column] for key in expected])
        got = np.array([actual[key][column] for key in expected])
        if exact or what == "clocks":
            np.testing.assert_array_equal(got, wanted, f"{what}, {context}")
        else:
            atol = 1e-6 * np.max(np.abs(wanted), initial=0)
            np.testing.assert_allclose(got, wanted, 1e-5, atol, err_msg=f"{what}, {context}")


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("optimizer", EXACT + ROUNDED, ids=label)
def test_a_one_worker_is_as_without_a_cache(optimizer, staleness):
    expected = trained_on_the_table(optimizer)
    for shards, capacity in enumerate(CAPACITIES, 1):
        setup = setup_of_one_worker(shards, capacity, staleness)
        for policy in ("lru", "lfu") if capacity == 3 else ("lfu",):
            got = trained(setup, optimizer, policy=policy)
            assert_same(got, expected, optimizer in EXACT, f"{setup}, {policy}")


@pytest.mark.parametrize("optimizer", EXACT + ROUNDED, ids=label)
def test_a_shards_that_apply_the_optimizer_are_as_a_local_table(optimizer):
    expected = trained_on_the_table(optimizer)
    for shards in (1, 3):
        setup = setup_of_one_worker(shards, 1000, 0)
        got = trained(setup, optimizer, cached=False)
        assert_same(got, expected, optimizer in EXACT, f"{setup}")


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_what_is_read_on_the_way_is_as_without_a_cache(capacity, shards):
    """Not only the table in the end: every lookup, with own updates sent or not."""
    setup = setup_of_one_worker(shards, capacity, 5)
    bare = setup_of_one_worker(shards, 1000, 0)
    with (
        contextlib.closing(OpsSystem(setup)) as cached,
        contextlib.closing(OpsSystem(bare, cached=False)) as uncached,
    ):
        for ids, grads, _ in steps(exact=True):
            rows = [system.lookup(0, ids) for system in (cached, uncached)]
            np.testing.assert_array_equal(*rows)
            for system in (cached, uncached):
                system.update(0, ids, grads)


# (c): the bounds are kept in schedules; here they are reached, so nothing tighter holds.


def other_worker_trains(system: OpsSystem, worker: int, times: int, key: int = 0) -> None:
    for _ in range(times):
        system.lookup(worker, (key,))
        grads = np.zeros((1, system.setup.dim))
        grads[0, worker] = -1
        system.update(worker, (key,), grads)


@pytest.mark.parametrize(("read", "write"), [(0, 1), (2, 3), (5, 0), (100, 100)])
def test_c_a_read_misses_read_bound_and_write_bound_of_every_other_worker(read, write):
    setup = Setup(3, 1, capacity=9, read_bound=read, write_bound=write)
    with contextlib.closing(OpsSystem(setup)) as system:
        system.lookup(0, (0,))
        other_worker_trains(system, 1, read)
        system.flush(1)
        for worker in (1, 2):  # the last update of the bound is due, not yet sent
            other_worker_trains(system, worker, write)
        assert system.lookup(0, (0,))[0].sum() == 0  # misses them all
        other_worker_trains(system, 1, 1)
        system.flush(1)
        assert system.lookup(0, (0,))[0][1] >= read + 1  # one more, and they come


def test_c_unbounded_reads_are_never_refreshed():
    setup = Setup(2, 1, capacity=9, read_bound=None, write_bound=0)
    with contextlib.closing(WatchedOps(setup)) as system:
        system.lookup(0, (0,))
        other_worker_trains(system, 1, 300)
        messages = len(system.exchanges)
        assert system.lookup(0, (0,))[0][1] == 0
        assert len(system.exchanges) == messages  # it did not even ask


@pytest.mark.parametrize("staleness", [0, 1, 2, 10])
def test_c_lamport_clocks_reach_twice_the_staleness_and_no_more(staleness):
    bounds = {"read_bound": staleness, "write_bound": staleness}
    setup = Setup(2, 1, capacity=9, clock="lamport", **bounds)
    with contextlib.closing(WatchedOps(setup)) as system:
        system.lookup(0, (0,))
        apart = []
        for _ in range(5 * staleness + 5):
            other_worker_trains(system, 1, 1)
            system.lookup(0, (0,))
            apart.append(system.clock(1, 0) - system.clock(0, 0))
        assert max(apart) == 2 * staleness


def test_c_a_row_pushed_under_lamport_clocks_comes_back_and_under_count_clocks_need_not():
    for clock, comes_back in (("lamport", True), ("count", False)):
        setup = Setup(2, 1, capacity=9, read_bound=5, write_bound=5, clock=clock)
        with contextlib.closing(WatchedOps(setup)) as system:
            system.lookup(0, (0,))
            other_worker_trains(system, 1, 1)
            system.flush(1)
            other_worker_trains(system, 0, 5)  # the bound: to be pushed by the next lookup
            assert system.lookup(0, (0,))[0].tolist() == [5, comes_back, 0]


# (d)


@pytest.mark.parametrize("clock", ["count", "lamport"])
@pytest.mark.parametrize("capacity", [1, 9])
def test_d_staleness_0_shows_an_update_of_any_worker_to_any_other(capacity, clock):
    setup = Setup(3, 2, capacity, read_bound=0, write_bound=0, clock=clock)
    with contextlib.closing(WatchedOps(setup)) as system:
        ledger = Ledger(setup, system)
        assert ledger.allowed(reader=0, key=KEYS[0]) == (0 if clock == "count" else 6)
        made = np.zeros(3)
        for writer, reader in [*itertools.product(range(3), repeat=2)] * 2:
            other_worker_trains(system, writer, 1)
            made[writer] += 1
            np.testing.assert_array_equal(system.lookup(reader, (0, 1, 2))[0][:3], made)


# (e)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("clock", ["count", "lamport"])
def test_e_200_occurrences_are_one_update(clock, cached):
    setup = Setup(1, 3, capacity=1, read_bound=5, write_bound=5, clock=clock)
    with contextlib.closing(WatchedOps(setup, cached=cached)) as system:
        run((setup, (Lookup(0, (7,) * 200), Update(0))), system)
        value, _, merged = system.table()[7]
        assert (value.tolist(), merged) == ([1, 1], 1)


# (f)


def test_f_keys_stay_distinct_in_caches_messages_and_shards():
    keys = [0, -1, 2**63 - 1, -(2**63)]
    keys += [
        sign * (2**bits + i) for sign in (1, -1) for bits in (24, 31, 32, 53) for i in (-1, 0, 1)
    ]
    setup = Setup(1, 3, capacity=5, read_bound=9, write_bound=9)
    with contextlib.closing(OpsSystem(setup)) as system:
        for repeat in range(3):
            system.lookup(0, keys)
            grads = [[-1, -position] for position in range(len(keys))]
            system.update(0, keys, np.array(grads))
            wanted = [[repeat + 1, (repeat + 1) * position] for position in range(len(keys))]
            np.testing.assert_array_equal(system.lookup(0, keys), wanted)
        system.flush(0)
        assert {key: tuple(row[0]) for key, row in system.table().items()} == dict(
            zip(keys, map(tuple, wanted), strict=True)
        )


# (g)


@pytest.mark.parametrize("cached", [True, False])
def test_g_a_message_sent_again_changes_nothing(cached):
    setup = Setup(1, 1, capacity=9, read_bound=0, write_bound=0)
    with contextlib.closing(OpsSystem(setup, cached=cached)) as system:
        other_worker_trains(system, 0, 5)
        sent, table = system._sent[0, 0], system._tables[0]
        before = system.table()
        for request in sent + sent[::-1]:  # all of them, in and out of order
            ops.table_sync(table, request)
        assert_same(system.table(), before, exact=True, context="after the repeats")
        stats = dict(zip(*(each.numpy().tolist() for each in ops.table_stats(table)), strict=True))
        assert stats[b"pushes_merged"] == 5
        assert stats[b"pushes_repeated"] == 10


def test_g_a_message_of_before_a_restart_changes_nothing_after_it():
    setup = Setup(1, 1, capacity=9, read_bound=0, write_bound=0)
    with contextlib.closing(WatchedOps(setup)) as system:
        other_worker_trains(system, 0, 3)
        system.restart(0)
        for nth in range(6):
            system.redeliver(0, 0, nth)
        # The cache's first message was cut before it knew the shard, and held no push.
        assert system.table() == {}
        assert system.lookup(0, (0,)).sum() == 0
        assert system.exchanges[-1].reply.header["flags"] == RESTARTED


# (h): batches of 14 ids drawn from a hot set and 6 that never come again.


def stream(hot: range, num_steps: int, seed: int):
    random = np.random.default_rng(seed)
    often = 1 / np.sqrt(1 + np.arange(len(hot)))
    for step in range(num_steps):
        cold = 10**6 * (seed + 1) + 6 * step + np.arange(6)
        yield [*random.choice(hot, 14, p=often / often.sum()).tolist(), *cold.tolist()]


def hit_rate(system: WatchedOps, hot: range, num_steps: int, seed: int) -> float:
    """Of the hot keys looked up, the part that was cached: checked, and not asked for."""
    before = len(system.exchanges)
    for keys in stream(hot, num_steps, seed):
        system.lookup(0, keys)
    requests = [each.request for each in system.exchanges[before:]]
    hits = [key in hot for request in requests for key in request.checked_keys]
    asked = [key in hot for request in requests for key in request.queries]
    return sum(hits) / sum(asked)


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("capacity", [40, 80])  # less than the hot set, and more
def test_h_new_hot_keys_displace_old_ones(capacity, policy):
    old_hot, new_hot = range(60), range(1000, 1060)
    setup = Setup(1, 1, capacity, read_bound=100, write_bound=100)
    with (
        contextlib.closing(WatchedOps(setup, policy=policy)) as aged,
        contextlib.closing(WatchedOps(setup, policy=policy)) as fresh,
    ):
        assert hit_rate(aged, old_hot, 400, seed=0) > 0.45
        # A use counts half as much 4 capacities later: after 16, an old one hardly counts.
        settle = 16 * capacity // 20
        for system in (aged, fresh):
            hit_rate(system, new_hot, settle, seed=1)
        rates = [hit_rate(system, new_hot, 100, seed=2) for system in (aged, fresh)]
        assert rates[0] == pytest.approx(rates[1], abs=0.05)
        assert rates[1] > 0.45


@pytest.mark.parametrize(("policy", "kept"), [("lfu", True), ("lru", False)])
def test_h_a_scan_flushes_lru_but_not_lfu(policy, kept):
    setup = Setup(1, 1, capacity=100, read_bound=100, write_bound=100)
    with contextlib.closing(WatchedOps(setup, policy=policy)) as system:
        for _ in range(20):
            system.lookup(0, range(50))
        for first in range(1000, 1400, 20):
            system.lookup(0, range(first, first + 20))
        system.lookup(0, range(50))
        hits = len(system.exchanges[-1].request.bases)
        assert hits == (50 if kept else 0)
