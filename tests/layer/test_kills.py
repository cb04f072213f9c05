"""Processes that are killed while they save."""

import json

import kill_program as program
import program_runner
import pytest

KILLS = 10


@pytest.mark.parametrize("kind", program.MANAGERS)
def test_the_latest_checkpoint_is_complete_whenever_its_writer_is_killed(tmp_path, kind):
    ended = program_runner.run(program.__file__, str(tmp_path / "saved"), kind, str(KILLS))
    assert ended.returncode == 0, ended.stderr[-5000:]
    runs = json.loads(ended.stdout.splitlines()[-1])
    assert len(runs) == KILLS + 1
    saved = 0
    for each in runs:
        restored = each["restored"]
        # The save that was under way may have come to its end, untold.
        assert saved <= restored["number"] <= saved + 1
        if restored["number"]:
            # All of it of one save: no row, slot or clock of another, and the variable agrees.
            assert restored["rows"] == program.ROWS
            assert restored["numbers"] == [restored["number"]]
        saved = each["saved"]
    # Some were killed in the middle of it.
    assert any(each["left"] for each in runs)
