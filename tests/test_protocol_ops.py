"""The real ops keep what the protocol model keeps, on the same schedules."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from ops_system import OpsSystem
from protocol_model import MessageLost
from schedules import Fault, Flush, Lookup, Setup, Update, run, schedules

from het_tf import optimizers

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=100)


def run_on_ops(schedule, **options):
    with contextlib.closing(OpsSystem(schedule[0], **options)) as system:
        run(schedule, system)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@repeatable
@given(schedule=schedules())
def test_count_clock_loses_doubles_and_misses_nothing(policy, schedule):
    run_on_ops(schedule, policy=policy)


@repeatable
@given(schedules(clock="lamport", same_bounds=True))
def test_lamport_clock_loses_and_doubles_nothing(schedule):
    run_on_ops(schedule)


@repeatable
@given(schedules(bounds=(0,), kinds=("twice", "redeliver", "crash", "restart")))
def test_staleness_0_shows_every_update_to_the_next_lookup(schedule):
    run_on_ops(schedule)


@repeatable
@given(schedules(bounds=(0,)))
def test_without_a_cache_nothing_is_lost_doubled_or_missed(schedule):
    run_on_ops(schedule, server_applies=True)


@pytest.mark.parametrize("clock", ["count", "lamport"])
def test_updating_a_key_200_times_in_a_batch_is_one_update(clock):
    setup = Setup(1, 3, capacity=1, read_bound=5, write_bound=5, clock=clock)
    with contextlib.closing(OpsSystem(setup)) as system:
        run((setup, (Lookup(0, (7,) * 200), Update(0))), system)
        assert system.table()[7][2] == 1


OPTIMIZERS = [
    optimizers.SGD(),
    optimizers.SGD(weight_decay=0.01, clipnorm=1.0, max_norm=2.0),
    optimizers.Momentum(),
    optimizers.Momentum(nesterov=True),
    optimizers.Adagrad(),
    optimizers.RowWiseAdagrad(),
    optimizers.Adam(),
    optimizers.RowWiseAdam(),
    optimizers.Ftrl(l1=0.001, l2=0.001),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.spec().replace(" ", "-"))
@settings(repeatable, max_examples=30)
@given(schedule=schedules(workers=(1,), kinds=("lost", "answer_lost", "twice", "redeliver")))
def test_one_worker_is_as_without_a_cache(optimizer, schedule):
    options = {"optimizer": optimizer, "learning_rate": 0.05, "initializer": "uniform"}
    assert_cache_changes_nothing(schedule, options, grad=0.3, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@repeatable
@given(schedule=schedules(workers=(1,), kinds=("lost", "answer_lost", "twice", "redeliver")))
def test_one_worker_with_integer_steps_is_bit_for_bit_as_without_a_cache(policy, schedule):
    options = {"optimizer": optimizers.SGD(), "policy": policy}
    assert_cache_changes_nothing(schedule, options, grad=1.0, rtol=0, atol=0)


def assert_cache_changes_nothing(schedule, options, grad, rtol, atol):
    """Every lookup, and the table in the end, are those of a system that has no cache."""
    setup, events = schedule
    with (
        contextlib.closing(OpsSystem(setup, **options)) as cached,
        contextlib.closing(OpsSystem(setup, **options, server_applies=True)) as plain,
    ):
        keys: tuple[int, ...] = ()
        for event in events:
            match event:
                case Lookup():
                    keys = event.keys
                    values = [until_answered(each.lookup, 0, keys) for each in (cached, plain)]
                    np.testing.assert_allclose(*values, rtol=rtol, atol=atol)
                case Update() if keys:
                    steps = np.arange(1, len(keys) + 1)[:, None] * [1, event.grad]
                    for system in (cached, plain):
                        with contextlib.suppress(MessageLost):
                            system.update(0, keys, grad * steps)
                    keys = ()
                case Flush():
                    until_answered(cached.flush, 0)
                case Fault(kind="redeliver"):
                    cached.redeliver(0, event.shard, event.nth)
                case Fault():
                    cached.arm(0, event.shard, event.kind)
        until_answered(cached.flush, 0)
        until_answered(plain.flush, 0)
        tables = cached.table(), plain.table()
    assert tables[0].keys() == tables[1].keys()
    for key, (value, slots, clock) in tables[1].items():
        np.testing.assert_allclose(tables[0][key][0], value, rtol=rtol, atol=atol)
        np.testing.assert_allclose(tables[0][key][1], slots, rtol=rtol, atol=atol)
        assert tables[0][key][2] == clock


def until_answered(call, *args):
    while True:
        try:
            return call(*args)
        except MessageLost:
            pass
