"""The real ops keep what the protocol model keeps, on the same schedules."""

import contextlib

import pytest
from hypothesis import given, settings
from ops_system import OpsSystem
from schedules import run, schedules

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=20)


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
