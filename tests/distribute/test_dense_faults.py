"""A worker that trains on a replica of the dense variables is killed, and comes back."""

from __future__ import annotations

import pathlib

import programs

PROGRAM = pathlib.Path(__file__).with_name("dense_fault_program.py")
STEPS, STALENESS, CLOSURE = 600, 40, 6


def test_steps_count_but_for_those_that_the_log_says_are_lost():
    # TensorFlow knows one cluster at a time, and this process may be on another.
    result = programs.result_of(PROGRAM)
    assert result["lost"], "the log says what was lost"
    assert all(lost <= STALENESS for lost in result["lost"])
    lost = sum(result["lost"])
    # The closure that the worker was running ran again; what it had sent of it counts twice.
    for steps in (result["least"], result["most"], result["iterations"]):
        assert STEPS - lost <= steps <= STEPS + CLOSURE
