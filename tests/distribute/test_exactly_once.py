"""Updates of rows count once, whichever workers die."""

from __future__ import annotations

import program_runner
import pytest


@pytest.mark.parametrize(
    ("kills", "workers"), [(3, 2), pytest.param(12, 3, marks=pytest.mark.exhaustive)]
)
def test_every_example_counts_once_though_workers_are_killed(kills, workers):
    seen = program_runner.result_of(
        "exactly_once_program.py", f"--kills={kills}", f"--workers={workers}"
    )
    assert len(seen["killed"]) == kills
    assert seen["epochs"] > 0
    assert seen["wrong"] == []
