"""Training where every process has one core."""

from __future__ import annotations

from faults import run_program


def test_trains():
    assert run_program("one_core_program.py") == {"counts": [1.0]}
