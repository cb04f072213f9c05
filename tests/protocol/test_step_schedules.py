"""Synchronous steps on random schedules: every read sees all steps before it, once."""

from __future__ import annotations

import pytest
from step_schedules import steps_of


@pytest.mark.parametrize("first_seed", [0, 100])
def test_members_read_what_one_process_would_read(first_seed):
    for seed in range(first_seed, first_seed + 15):
        with steps_of(seed) as steps:
            steps.play()


def test_24_workers():
    with steps_of(1, most_workers=24) as steps:
        steps.play(rounds=2)
