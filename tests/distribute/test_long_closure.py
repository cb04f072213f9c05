"""A closure that takes longer than gRPC lets a connection be silent, with one core."""

from __future__ import annotations

from faults import run_program


def test_a_closure_that_runs_for_long_runs_once():
    assert run_program("long_closure_program.py") == {"runs": 1}
