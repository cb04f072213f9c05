"""Parameter servers, and training programs, that are killed while checkpoints are written.

HET_TF_SAVE_KILLS=25 has each killed more often.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import save_kill_program as program
import standalone

KILLS = int(os.environ.get("HET_TF_SAVE_KILLS", "2"))


def arguments(folder: pathlib.Path, kind: str, seed: int) -> list[object]:
    return [program.__file__, folder / "saved", kind, seed, KILLS]


@pytest.mark.parametrize("kind", program.MANAGERS)
def test_the_latest_checkpoint_is_whole_whenever_a_server_is_killed(tmp_path, kind):
    run = [sys.executable, *map(str, arguments(tmp_path, kind, seed=1))]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-5000:]
    told = list(map(json.loads, ended.stdout.splitlines()))
    assert len(told) == KILLS
    for each in told:
        assert each["right"], told
        # The save that was under way may have come to its end, untold.
        assert each["saved"] <= each["restored"] <= each["saved"] + 1, told


@pytest.mark.parametrize("kind", program.MANAGERS)
def test_the_latest_checkpoint_is_whole_whenever_its_program_is_killed(tmp_path, kind):
    saved = 0
    with contextlib.ExitStack() as stack:
        servers = standalone.Servers(stack, num_ps=2)
        chief = servers.address()
        for seed in range(KILLS + 1):
            killed = servers.start(arguments(tmp_path, kind, seed), chief)
            said, errors = killed.communicate(timeout=3600)
            assert killed.returncode == -signal.SIGKILL, errors[-5000:]
            told, *numbers = map(json.loads, said.splitlines())
            assert told["right"], told
            # The save that was under way may have come to its end, untold.
            assert saved <= told["restored"] <= saved + 1, (saved, told)
            saved = [told["restored"], *numbers][-1]
    assert saved > 0
