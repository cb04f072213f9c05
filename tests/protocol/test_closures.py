"""A closure counts once in the protocol model and in the ops; the tests notice if it does not."""

import closure_faults
import pytest
from closures import Closures
from model_system import ModelSystem
from ops_system import OpsSystem
from schedules import Setup

SETUPS = [
    Setup(3, 2, 100, 0, 0),
    Setup(3, 2, 100, 3, 2, slots=True),
    Setup(2, 3, 2, None, None),  # rows leave the cache within a closure
    Setup(3, 2, 1, 1, 5, slots=True),
    Setup(2, 2, 0, 0, 0),  # no cache
    Setup(2, 2, 100, 2, 2, clock="lamport", slots=True),
    Setup(2, 2, 3, 2.0, 3.0, clock="drift"),
]
each_setup = pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"{s.clock}-{s.capacity}")


@each_setup
@pytest.mark.parametrize("seed", range(40))
def test_closures_count_once_in_the_model(setup, seed):
    Closures(ModelSystem(setup), setup, seed, num_closures=15, faults=0.15).play()


@each_setup
@pytest.mark.parametrize("seed", range(20))
def test_closures_count_once_in_the_ops(setup, seed):
    system = OpsSystem(setup)
    try:
        Closures(system, setup, seed, num_closures=15, faults=0.15).play()
    finally:
        system.close()


@pytest.mark.parametrize("setup", [s for s in SETUPS if s.capacity > 0], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_closures_count_once_with_rows_on_a_device(rows_kind, setup, seed):
    system = OpsSystem(setup, device=f"/device:{rows_kind}:0")
    try:
        Closures(system, setup, seed, num_closures=15, faults=0.15).play()
    finally:
        system.close()


@pytest.mark.parametrize("parts", closure_faults.FAULTS, ids=lambda parts: "-".join(parts[-1:]))
def test_faults_are_found(parts):
    shard, cache, _ = parts
    found = 0
    for seed in range(60):
        for setup in SETUPS:
            system = ModelSystem(setup, shard=shard, cache=cache)
            try:
                Closures(system, setup, seed, num_closures=15, faults=0.15).play()
            except (AssertionError, KeyError):
                found += 1
        if found:
            return
    raise AssertionError("nobody noticed")
