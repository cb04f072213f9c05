"""Caches with their rows on a device, through the ops: schedules and faults as for the host's."""

import contextlib
import dataclasses

import numpy as np
import pytest
from ledger import run
from named_schedules import EXAMPLES
from ops_system import OpsSystem, flush, step
from random_schedules import BOUNDS, check, drawn
from schedules import Flush, Lookup, Setup, Update
from test_protocol_ops import one_worker, run_beside_a_table

from het_tf import optimizers

OPTIMIZERS = [optimizers.Momentum(momentum=1.0), optimizers.Adam(weight_decay=0.1)]


def on_device(schedule):
    """Without a line, there is no cache."""
    setup, events = schedule
    return dataclasses.replace(setup, capacity=max(1, setup.capacity)), events


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_one_worker_is_as_without_a_cache(rows_kind, optimizer):
    def play(schedule):
        run_beside_a_table(schedule, optimizer, device=f"/device:{rows_kind}:0")

    for schedule in one_worker(8):
        check(play, on_device(schedule))


def run_on_device(rows_kind, schedule, policy="lru", host_rows=0):
    """Returns how many rows the host had kept when they came again."""
    setup, events = on_device(schedule)
    options = {"device": f"/device:{rows_kind}:0", "host_rows": host_rows}
    with contextlib.closing(OpsSystem(setup, policy=policy, **options)) as system:
        run((setup, events), system)
        return sum(system.stats(w)["rows_from_host"] for w in range(setup.num_workers))


# As in test_ops_protocol.py, with fewer schedules: the rules of link and shard are tested there,
# and longer schedules in ops/cuda/schedule_test.cc.


@pytest.mark.parametrize("clock", BOUNDS)
def test_loses_doubles_and_misses_nothing(rows_kind, clock):
    for policy in ("lru", "lfu"):
        for schedule in drawn(10, clock=clock):
            check(lambda s, policy=policy: run_on_device(rows_kind, s, policy), schedule)


@pytest.mark.parametrize("clock", BOUNDS)
def test_the_same_where_hardly_a_key_has_a_line(rows_kind, clock):
    for schedule in drawn(10, clock=clock, workers=(1, 2), capacities=(1, 1)):
        check(lambda s: run_on_device(rows_kind, s), schedule)


@pytest.mark.parametrize("clock", BOUNDS)
def test_the_same_where_the_host_keeps_what_gave_way(rows_kind, clock):
    steps = [each for key in (1, 2, 3, 2**31) for each in (Lookup(0, (key,)), Update(0)) * 2]
    others = (Lookup(1, (1, 2)), Update(1), Flush(1))
    setup = Setup(2, 2, capacity=2, read_bound=1, write_bound=2, clock=clock)
    assert run_on_device(rows_kind, (setup, (*steps, *others) * 4), host_rows=5) > 0


@pytest.mark.xfail(strict=True, reason="its shard takes the row for sent, the line for watched")
def test_a_value_that_comes_late_does_not_end_the_watch_of_a_line():
    """A step asked for values of rows that have lines, of later steps, when they come."""
    a, b, c, d = 2**24, 2**53, 1, -(2**63)
    events = (
        *(Lookup(1, (a, b, c)), Update(1)),
        Lookup(1, (a, b)),
        *(Lookup(1, (d, b, a, c)), Update(1)),
        *(Lookup(1, (c,)), Update(1)),
        *(Lookup(1, (a,)), Update(1)),
        Update(1, 0),
    )
    run_on_device("CPU", (Setup(2, 1, 2, read_bound=1, write_bound=None, slots=True), events))


@pytest.mark.exhaustive
@pytest.mark.parametrize("clock", BOUNDS)
def test_many_longer_schedules(rows_kind, clock):
    options = {"workers": (1, 3), "capacities": (1, 2), "most_keys": 12}
    for schedule in drawn(80, seed=2, clock=clock, kinds=("crash", "restart"), **options):
        check(lambda s: run_on_device(rows_kind, s, host_rows=5), schedule)


@pytest.mark.parametrize("clock", BOUNDS)
def test_examples(rows_kind, clock):
    for setup, events in EXAMPLES.values():
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
