"""Training where every process has one core."""

from __future__ import annotations

import program_runner


def test_trains():
    assert program_runner.result_of("one_core_program.py") == {"counts": [1.0]}
