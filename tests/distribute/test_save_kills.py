"""Parameter servers, and training programs, that are killed while checkpoints are written."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal

import program_runner
import pytest
import save_kill_program as program
import standalone

# What is saved, and how often something is killed. A chain has full checkpoints, too.
SERIES = [
    ("chain", 1),
    *(pytest.param(kind, 3, marks=pytest.mark.exhaustive) for kind in program.MANAGERS),
]


def arguments(folder: pathlib.Path, kind: str, seed: int, kills: int) -> list[str]:
    return [program.__file__, str(folder / "saved"), kind, str(seed), str(kills)]


@pytest.mark.parametrize(("kind", "kills"), SERIES)
def test_the_latest_checkpoint_is_complete_whenever_a_server_is_killed(tmp_path, kind, kills):
    ended = program_runner.run(*arguments(tmp_path, kind, 1, kills))
    assert ended.returncode == 0, ended.stderr[-5000:]
    restores = list(map(json.loads, ended.stdout.splitlines()))
    assert len(restores) == kills
    for restore in restores:
        assert restore["right"], restores
        # The save that was under way may have come to its end without being reported.
        assert restore["saved"] <= restore["restored"] <= restore["saved"] + 1, restores


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "kills"), SERIES)
def test_the_latest_checkpoint_is_complete_whenever_its_program_is_killed(tmp_path, kind, kills):
    saved = 0
    with contextlib.ExitStack() as stack:
        servers = standalone.Servers(stack, num_ps=2)
        chief = servers.address()
        for seed in range(kills + 1):
            killed = servers.start(*arguments(tmp_path, kind, seed, kills), chief=chief)
            output, errors = killed.communicate(timeout=3600)
            assert killed.returncode == -signal.SIGKILL, errors[-5000:]
            restore, *numbers = map(json.loads, output.splitlines())
            assert restore["right"], restore
            # The save that was under way may have come to its end without being reported.
            assert saved <= restore["restored"] <= saved + 1, (saved, restore)
            saved = [restore["restored"], *numbers][-1]
    assert saved > 0
