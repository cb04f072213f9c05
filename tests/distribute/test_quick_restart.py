"""Parameter servers that are killed, and are back before anybody notices."""

from __future__ import annotations

import program_runner
import pytest


@pytest.fixture(scope="module")
def seen():
    return program_runner.result_of("quick_restart_program.py")


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for what, values in expected.items():
        assert found[what] == pytest.approx(values, rel=1e-4, abs=1e-6), what


def test_a_lost_server_is_not_waited_for_before_a_save(seen):
    assert seen["recovered"]


def test_what_was_traced_before_a_restore_is_not_used_after_it(seen):
    check_equal(seen["restored half"], seen["half"])
    assert seen["epochs of the second half"] == [0, 1]
    assert seen["whole"]["iterations"] == 2 * seen["half"]["iterations"]


def test_fit_goes_on_whichever_callback_a_server_is_lost_in(seen):
    assert seen["left"] == 0
    assert seen["ended early"] == 3
    assert sorted(set(seen["epochs in one piece"])) == [0, 1, 2, 3]
    check_equal(seen["in one piece"], seen["whole"])
