"""One worker on the real ops, on random schedules with faults, is as one without a cache.

The other properties of the protocol are held against the ops in test_ops_protocol.py.
"""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from ops_system import OpsSystem
from protocol_model import MessageLost
from schedules import Fault, Flush, Lookup, Update, schedules

from het_tf import optimizers

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=20)
one_worker = schedules(workers=(1,), kinds=("lost", "answer_lost", "twice", "redeliver"))

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
@repeatable
@given(schedule=one_worker)
def test_any_optimizer(optimizer, schedule):
    options = {"optimizer": optimizer, "learning_rate": 0.05, "initializer": "uniform"}
    assert_cache_changes_nothing(schedule, options, grad=0.3, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@repeatable
@given(schedule=one_worker)
def test_integer_steps_bit_for_bit(policy, schedule):
    options = {"optimizer": optimizers.SGD(), "policy": policy}
    assert_cache_changes_nothing(schedule, options, grad=1.0, rtol=0, atol=0)


def assert_cache_changes_nothing(schedule, options, grad, rtol, atol):
    """Every lookup, and the table in the end, are those of a system that has no cache."""
    setup, events = schedule
    with (
        contextlib.closing(OpsSystem(setup, **options)) as cached,
        contextlib.closing(OpsSystem(setup, **options, cached=False)) as plain,
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
