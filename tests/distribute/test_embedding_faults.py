"""Workers and parameter servers that die while a HetEmbedding is trained through its caches."""

from __future__ import annotations

import re

import embedding_fault_program as program
import program_runner
import pytest


@pytest.fixture(scope="module")
def seen():
    return program_runner.result_of("embedding_fault_program.py")


def test_three_workers_train_to_the_end(seen):
    run = seen["whole"]
    assert run["iterations"] == 3 * program.BATCHES
    assert run["clocks"] == run["iterations"] * program.KEYS_A_BATCH
    assert run["loss"][-1] < run["loss"][0]
    assert run["finite"]


def test_a_killed_worker_loses_at_most_what_the_log_says(seen):
    whole, run = seen["whole"], seen["worker killed"]
    assert run["loss"][-1] < whole["loss"][-1]
    text = "\n".join(seen["warnings"])
    found = re.findall(r"worker (\d+) lost its cache .* at most (\d+) updates", text)
    assert {worker for worker, _ in found} == {"1"}, text
    at_risk = int(found[-1][1])  # Late results may have made the first warning too low.
    # Each step counts itself once. A closure that the killed worker had not finished is run again
    # elsewhere, so up to a closure's steps are counted, and their updates made, once more.
    steps = run["iterations"] - whole["iterations"]
    assert 4 * program.BATCHES <= steps <= 4 * program.BATCHES + program.STEPS_A_CLOSURE
    made = run["clocks"] - whole["clocks"]
    unfinished = program.STEPS_A_CLOSURE * program.KEYS_A_BATCH
    assert made >= 4 * program.BATCHES * program.KEYS_A_BATCH - at_risk
    assert made <= 4 * program.BATCHES * program.KEYS_A_BATCH + unfinished


def test_a_worker_that_is_told_to_end_sends_its_updates_first(seen):
    run = seen["worker ended"]
    log = seen["log of the ended"]
    # It may have been told between two epochs, with nothing left to send.
    assert re.search(r"worker 2 ends; .* last updates to [02] shard\(s\), 0 are down", log), log
    assert "worker 2 lost its cache" not in "\n".join(seen["warnings of the ended"])
    steps = run["iterations"] - seen["worker killed"]["iterations"]
    assert 4 * program.BATCHES <= steps <= 4 * program.BATCHES + program.STEPS_A_CLOSURE
    made = run["clocks"] - seen["worker killed"]["clocks"]
    unfinished = program.STEPS_A_CLOSURE * program.KEYS_A_BATCH
    assert 0 <= made - 4 * program.BATCHES * program.KEYS_A_BATCH <= unfinished


def test_a_killed_parameter_server_is_named(seen):
    address = seen["addresses"]["ps"][1]
    assert "error" in seen, "training went on"
    assert f"Parameter server /job:ps/task:1 at {address}" in seen["error"]
    assert seen["seconds"] < 60


def test_whatever_is_called_next_names_the_parameter_server(seen):
    named = f"Parameter server /job:ps/task:1 at {seen['addresses']['ps'][1]}"
    assert len(seen["errors"]) == 22
    assert {name: e for name, e in seen["errors"].items() if not e.startswith(named)} == {}
