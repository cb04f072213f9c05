"""Training that goes on from a checkpoint when a parameter server was lost and came back."""

from __future__ import annotations

import itertools

import pytest
from faults import run_program


@pytest.fixture(scope="module")
def seen():
    return run_program("lost_server_program.py")


@pytest.mark.parametrize(
    ("run", "lost_in"),
    [("backup", 1), ("before the first backup", 0), ("our backup", 1), ("manager", 1)],
)
def test_training_goes_on_as_if_no_server_had_been_lost(seen, run, lost_in):
    assert seen["whole"]["epochs"] == [0, 1, 2]
    # The epoch begins again; more than once, should the server not be ready then.
    begun = {epoch: len(list(each)) for epoch, each in itertools.groupby(seen[run]["epochs"])}
    assert list(begun) == [0, 1, 2]
    assert [epoch for epoch, times in begun.items() if times > 1] == [lost_in]
    assert seen[run]["loss"] == pytest.approx(seen["whole"]["loss"], rel=1e-5)
    for what in ("keys", "rows", "dense", "iterations"):
        assert seen[run][what] == pytest.approx(seen["whole"][what], rel=1e-4, abs=1e-6), what


def test_one_call_restores_the_latest_checkpoint_if_there_is_one(seen):
    assert seen["nothing to restore"] is None
    assert seen["restored"] == seen["latest"]
    assert seen["rows restored"] == len(seen["whole"]["keys"])


def test_a_manager_is_a_checkpoint_manager(strategy):
    with pytest.raises(TypeError, match=r"must be a .* het_tf\.checkpoint\.Manager, not 'f"):
        strategy.restore_or_initialize("folder")
