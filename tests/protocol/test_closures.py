"""A closure counts once in the protocol model and in the ops; the tests notice if it does not."""

import contextlib

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
# Of the faults that are built in, one run in six finds the one that hides best.
RUNS = list(enumerate(SETUPS * 5))


def play(system, setup: Setup, seed: int, **options) -> None:
    print(f"{seed=}, {setup}")
    Closures(system, setup, seed, **options).play()


def play_on_ops(setup: Setup, seed: int, device: str = "", **options) -> None:
    with contextlib.closing(OpsSystem(setup, device=device)) as system:
        play(system, setup, seed, **options)


def test_closures_count_once_in_the_model():
    for seed, setup in RUNS:
        play(ModelSystem(setup), setup, seed)


def test_closures_count_once_in_the_ops():
    for seed, setup in RUNS[: 3 * len(SETUPS)]:
        play_on_ops(setup, seed)


def test_closures_count_once_with_rows_on_a_device(rows_kind):
    for seed, setup in RUNS[: 2 * len(SETUPS)]:
        if setup.capacity > 0:
            play_on_ops(setup, seed, f"/device:{rows_kind}:0")


@pytest.mark.exhaustive
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_many_closures_count_once(setup):
    for seed in range(100, 110):
        play_on_ops(setup, seed, num_closures=20)


@pytest.mark.parametrize("parts", closure_faults.FAULTS, ids=lambda parts: parts[-1])
def test_faults_are_found(parts):
    shard, cache, _ = parts
    for seed, setup in RUNS:
        try:
            play(ModelSystem(setup, shard=shard, cache=cache), setup, seed)
        except (AssertionError, KeyError):
            return
    raise AssertionError("nobody noticed")
