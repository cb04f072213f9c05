"""Training that goes on from a checkpoint when a parameter server was lost and came back."""

from __future__ import annotations

import program_runner
import pytest
import second_cluster_program


@pytest.fixture(scope="module")
def seen():
    return program_runner.result_of("lost_server_program.py")


@pytest.mark.parametrize(
    ("run", "epochs"),
    [
        ("backup", [0, 1, 1, 2]),
        ("before the first backup", [0, 0, 1, 2]),
        ("our backup", [0, 1, 1, 2]),
        ("back at once", [0, 1, 1, 2]),
        ("back at once, replicas", [0, 1, 1, 2]),
        ("manager", [0, 1, 1, 2]),
    ],
)
def test_training_goes_on_as_if_no_server_had_been_lost(seen, run, epochs):
    assert seen["whole"]["epochs"] == [0, 1, 2]
    assert seen[run]["epochs"] == epochs, "\n".join(seen[run]["warnings"])
    assert seen[run]["loss"] == pytest.approx(seen["whole"]["loss"], rel=1e-5)
    for what in ("keys", "rows", "dense", "iterations"):
        assert seen[run][what] == pytest.approx(seen["whole"][what], rel=1e-4, abs=1e-6), what


def test_a_publisher_goes_on_when_a_server_was_lost_and_came_back(seen):
    assert seen["versions in fit"] > 0
    assert seen["served"] == {"off": pytest.approx(0, abs=1e-6), "version": 0, "trouble": ""}
    # What it could not publish meanwhile was no error of `fit`.
    assert seen["our backup"]["epochs"] == [0, 1, 1, 2]


def test_a_recovery_waits_until_the_other_servers_reach_the_one_that_came_back(seen):
    assert seen["across servers"] == {"error": None, "connected": True}


def test_one_call_restores_the_latest_checkpoint_if_there_is_one(seen):
    assert seen["nothing to restore"] is None
    assert seen["restored"] == seen["latest"]
    assert seen["rows restored"] == len(seen["whole"]["keys"])


def test_what_is_left_of_another_cluster_is_left_alone():
    seen = program_runner.result_of("second_cluster_program.py")
    assert seen["path"]
    assert seen["recoveries"] == 1
    assert seen["rows"] == seen["rows before"]
    assert sum(seen["rows"]) == second_cluster_program.ROWS
    assert len(seen["said"]) == 4
    for said in seen["said"]:
        assert "has connected this process to another cluster" in said
    assert seen["rows of the second"] == second_cluster_program.ROWS


def test_a_manager_is_a_checkpoint_manager(strategy):
    with pytest.raises(TypeError, match=r"must be a .* het_tf\.checkpoint\.Manager, not 'f"):
        strategy.restore_or_initialize("folder")
