"""Processes that are killed while they save."""

import json

import kill_program as program
import program_runner
import pytest

CHOSEN = ["before rows", "after rows"]


@pytest.mark.parametrize(
    ("kind", "moments"),
    [
        ("ours", CHOSEN),
        ("chain", CHOSEN),
        *(
            pytest.param(kind, [*CHOSEN, *["at random"] * 8], marks=pytest.mark.exhaustive)
            for kind in program.MANAGERS
        ),
    ],
)
def test_the_latest_checkpoint_is_complete_whenever_its_writer_is_killed(tmp_path, kind, moments):
    ended = program_runner.run(program.__file__, str(tmp_path / "saved"), kind, *moments)
    assert ended.returncode == 0, ended.stderr[-5000:]
    runs = json.loads(ended.stdout.splitlines()[-1])
    assert len(runs) == len(moments) + 1
    saved = 0
    for run, before in zip(runs, [None, *moments], strict=True):
        restored = run["restored"]
        # The save that was under way when the process before was killed may have come to its end,
        # untold.
        assert saved <= restored["number"] <= saved + (before == "at random")
        if restored["number"]:
            # All of it of one save: no row, slot or clock of another, and the variable agrees.
            assert restored["rows"] == program.ROWS
            assert restored["numbers"] == [restored["number"]]
        saved = run["saved"]
    for run, moment in zip(runs, moments, strict=False):
        # What was written of the save that was under way.
        assert run["left"] or moment != "after rows"
