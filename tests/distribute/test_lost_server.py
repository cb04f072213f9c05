"""Training that goes on from a checkpoint when a parameter server was lost and came back."""

from __future__ import annotations

import program_runner
import pytest


@pytest.fixture(scope="module")
def seen():
    return program_runner.result_of("lost_server_program.py")


def check_equal(found, expected, *more):
    for what in ("keys", "rows", "dense", "iterations", *more):
        assert found[what] == pytest.approx(expected[what], rel=1e-4, abs=1e-6), what


@pytest.mark.parametrize(
    ("run", "epochs"),
    [
        ("Keras's backup", [0, 0, 1, 1, 2]),
        ("replicas", [0, 1, 1, 2]),
        ("manager", [0, 1, 1, 2]),
    ],
)
def test_training_goes_on_as_if_no_server_had_been_lost(seen, run, epochs):
    assert seen["whole"]["epochs"] == [0, 1, 2]
    assert seen[run]["epochs"] == epochs, "\n".join(seen[run]["warnings"])
    check_equal(seen[run], seen["whole"], "loss")


def test_fit_goes_on_whichever_callback_a_server_is_lost_in(seen):
    """In validation, and after the last step; the other runs lose it in the middle of an epoch."""
    run = seen["our backup"]
    assert seen["hooks left"] == []
    assert sum("ended early" in text for text in run["warnings"]) == 2
    assert sorted(set(run["epochs"])) == [0, 1, 2]
    check_equal(run, seen["whole"])


def test_a_publisher_goes_on_when_a_server_was_lost_and_came_back(seen):
    # What it could not publish meanwhile was no error of `fit`.
    assert seen["versions in fit"] > 0
    assert seen["served"] == {"off": pytest.approx(0, abs=1e-6), "version": 0, "trouble": ""}


def test_a_recovery_waits_until_the_other_servers_reach_the_one_that_came_back(seen):
    assert seen["across servers"] == {"recovered": True, "error": None, "connected": True}


def test_what_was_traced_before_a_restore_is_not_used_after_it(seen):
    check_equal(seen["after a loss"], seen["before a loss"], "loss", "predicted")
    check_equal(seen["one more epoch after a loss"], seen["one more epoch"], "loss")


def test_one_call_restores_the_latest_checkpoint_if_there_is_one(seen):
    assert seen["nothing to restore"] is None
    assert seen["restored"] == seen["latest"]
    assert seen["rows restored"] == len(seen["whole"]["keys"])
