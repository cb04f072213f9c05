"""Caches with their rows on a device, through the ops: schedules and faults as for the host's."""

import contextlib
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from ledger import run
from named_schedules import EXAMPLES
from ops_system import OpsSystem, flush, step
from schedules import Setup, schedules
from test_ops_protocol import BOUNDS
from test_protocol_ops import EXACT, BesideATable, WideSetup, label, one_worker

from het_tf import optimizers

OPTIMIZERS = [*EXACT, optimizers.RowWiseAdagrad(weight_decay=0.1), optimizers.Adam()]
repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=8)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=label)
def test_one_worker_is_as_without_a_cache(rows_kind, optimizer):
    exact = optimizer in EXACT
    options = {"optimizer": optimizer, "initializer": "zeros" if exact else "uniform"}
    played = []

    @repeatable
    @given(schedule=one_worker)
    def play(schedule):
        setup, events = schedule
        setup = WideSetup(**{**vars(setup), "capacity": max(1, setup.capacity)})
        with contextlib.closing(
            OpsSystem(setup, device=f"/device:{rows_kind}:0", **options)
        ) as system:
            player = BesideATable(setup, system, exact)
            player.play(events)
            player.finish()
            played.append(system.stats(0)["updates"])
            tf.raw_ops.DestroyResourceOp(resource=player.plain)

    play()
    assert sum(played) > 0


def run_on_device(rows_kind, schedule, policy="lru", host_rows=0):
    """Returns how many rows the host had kept when they came again."""
    setup, events = schedule
    setup = dataclasses.replace(setup, capacity=max(1, setup.capacity))
    options = {"device": f"/device:{rows_kind}:0", "host_rows": host_rows}
    with contextlib.closing(OpsSystem(setup, policy=policy, **options)) as system:
        run((setup, events), system)
        return sum(system.stats(w)["rows_from_host"] for w in range(setup.num_workers))


# As in test_ops_protocol.py, with fewer schedules: the rules of link and shard are tested there.


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("clock", BOUNDS)
def test_loses_doubles_and_misses_nothing(rows_kind, clock, policy):
    @settings(repeatable, max_examples=12)
    @given(schedule=schedules(clock=clock, bounds=BOUNDS[clock]))
    def play(schedule):
        run_on_device(rows_kind, schedule, policy)

    play()


@pytest.mark.parametrize("clock", BOUNDS)
def test_the_same_where_hardly_a_key_has_a_line(rows_kind, clock):
    @settings(repeatable, max_examples=12)
    @given(schedule=schedules(workers=(1, 2), clock=clock, bounds=BOUNDS[clock], capacities=(1, 1)))
    def play(schedule):
        run_on_device(rows_kind, schedule)

    play()


@pytest.mark.parametrize("clock", BOUNDS)
def test_the_same_where_the_host_keeps_what_gave_way(rows_kind, clock):
    """(Longer schedules: ops/cuda/schedule_test.cc.)"""
    kept = []
    options = {"clock": clock, "bounds": BOUNDS[clock], "kinds": ("crash", "restart")}

    @settings(repeatable, max_examples=100)
    @given(schedule=schedules(workers=(1, 3), capacities=(1, 2), most_keys=12, **options))
    def play(schedule):
        kept.append(run_on_device(rows_kind, schedule, host_rows=5))

    play()
    # By Lamport clocks a row is not kept that had updates when it left.
    assert sum(kept) > 0 or clock == "lamport"


@pytest.mark.parametrize("clock", BOUNDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(rows_kind, name, clock):
    setup, events = EXAMPLES[name]
    run_on_device(rows_kind, (dataclasses.replace(setup, clock=clock), events))


@pytest.mark.parametrize("clock", ["count", "lamport"])
def test_beside_a_cache_on_the_host(rows_kind, clock):
    """Two workers, one with its rows on the device: what each reads and what comes of it."""
    setup = Setup(2, 2, capacity=4, read_bound=1, write_bound=2, clock=clock)
    keys = np.array([3, 1, 3, 4, 2, 9])
    tables = []
    for device in ("", f"/device:{rows_kind}:0"):
        with contextlib.closing(OpsSystem(setup, device=device)) as system:
            random = np.random.default_rng(1)
            for t in range(12):
                gradients = random.integers(-3, 4, (len(keys), setup.dim)).astype(np.float32)
                rows = step(system, t % 2, keys, gradients)
                np.testing.assert_array_equal(rows[0], rows[2])
            for worker in range(2):
                flush(system, worker)
            assert system.stats(0)["pending"] == 0
            tables.append(
                {key: (value.tolist(), g) for key, (value, _, g) in system.table().items()}
            )
    # Every gradient counts once, whatever was cached where.
    assert tables[0] == tables[1]
