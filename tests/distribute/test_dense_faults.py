"""A worker that trains on a replica of the dense variables goes, and comes back."""

from __future__ import annotations

import program_runner
import pytest

PROGRAM = "dense_fault_program.py"
STEPS, STALENESS, CLOSURE = 600, 40, 6


@pytest.fixture(scope="module")
def seen():
    # TensorFlow knows one cluster at a time, and this process may be on another.
    return program_runner.result_of(PROGRAM)


def check_steps(result, lost):
    # The closure that the worker was running ran again; what it had sent of it counts twice.
    for steps in (result["least"], result["most"], result["iterations"]):
        assert STEPS - lost <= steps <= STEPS + CLOSURE, result


def test_steps_count_but_for_those_that_the_log_says_are_lost(seen):
    result = seen["killed"]
    assert result["lost"], "the log says what was lost"
    assert all(lost <= STALENESS for lost in result["lost"])
    assert not result["ended"]
    check_steps(result, sum(result["lost"]))


def test_no_step_of_a_worker_that_is_told_to_end_is_lost(seen):
    result = seen["terminated"]
    assert not result["lost"]
    assert result["ended"], "the log says that it was sent"
    check_steps(result, 0)
