"""Workers and parameter servers that die while training."""

from __future__ import annotations

import pathlib
import re
import time

import fault_program as program
import program_runner
import pytest


@pytest.fixture(scope="module")
def seen():
    return program_runner.result_of("fault_program.py")


def test_without_faults_every_example_counts_once(seen):
    run = seen["whole"]
    assert run["counts"] == [1.0]
    assert run["ids"] == [400.0, 400.0]
    assert run["iterations"] == 200
    assert run["warnings"] == []


def test_training_goes_on_without_a_killed_worker(seen):
    run = seen["worker killed"]
    # Every batch is trained, and counted once however often it was run.
    assert run["counts"] == [1.0]
    assert run["ids"] == [400.0, 400.0]
    # A closure of two steps that was under way is run again.
    assert 200 <= run["iterations"] <= 202
    assert seen["without it"]["counts"] == [1.0]


def test_log_says_how_many_updates_were_at_risk(seen):
    text = "\n".join(seen["worker killed"]["warnings"])
    found = re.findall(r"worker (\d+) lost its cache ids/.* at most (\d+) updates", text)
    assert {worker for worker, _ in found} == {"1"}, text
    # What it had told when it was killed, and what it told of the closures that ended meanwhile.
    # Where the monitor was quicker than their results, there is a second warning.
    at_risk = int(found[-1][1])
    told = seen["pending when killed"]["1"]
    in_flight = 2 * 2 * program.STEPS_A_CLOSURE * program.BATCH  # closures for two workers
    assert told <= at_risk <= told + in_flight


def test_flush_skips_a_worker_that_is_down(seen):
    text = "\n".join(seen["worker killed"]["warnings"])
    assert re.search(r"not flushed: worker 1 at localhost:\d+ refuses connections", text)


def test_tables_are_saved_restored_and_cleared_without_a_worker_that_is_down(seen):
    run = seen["tables without it"]
    before, cleared, *restored = run["clocks"]
    assert before > 0
    assert cleared == 0
    assert restored == [before] * 3
    assert run["pending"] == 0


def test_restarted_worker_joins_in(seen):
    assert seen["restarted"]["counts"] == [1.0]
    assert seen["restarted"]["iterations"] == 100


def test_share_of_a_killed_worker_is_given_up(seen):
    assert seen["shares"]["counts"] == [1.0]
    lost = seen["share lost"]
    assert lost["counts"] == [0.0, 1.0]
    assert "worker(s) [1] are down: the rest of their share" in "\n".join(lost["warnings"])


def test_training_goes_on_without_a_worker_that_hangs(seen):
    run = seen["worker stopped"]
    assert run["counts"] == [1.0]
    assert run["ids"] == [400.0] * program.EPOCHS_WITH_A_STOPPED
    text = "\n".join(run["warnings"])
    assert re.search(r"worker 1 at localhost:\d+ does not answer", text), text
    # It is waited for once, by fit, or by the first flush if it hung between two closures: what
    # flushes at the end of later epochs knows that it is lost.
    assert len(run["patient probes"]) <= 1, run["patient probes"]


@pytest.mark.parametrize(
    ("run", "task", "state", "process"),
    [
        ("ps killed", 0, "refuses connections: its process is gone", "exited with status -9"),
        ("ps stopped", 2, "does not answer: its process is there", "(process {}) lives"),
    ],
)
def test_lost_parameter_server_is_named(seen, run, task, state, process):
    error = seen[run]["error"]
    address = seen["addresses"]["ps"][task]
    assert error, "training went on"
    assert f"Parameter server /job:ps/task:{task} at {address} {state}" in error
    assert "resume from the last checkpoint" in error
    log = pathlib.Path(seen["log dir"], f"ps-{task}.log")
    process = process.format(seen["pids"][task])
    assert f"The server of ps {task} {process}. Its log: {log}" in error
    assert f"ps {task} serves" in log.read_text()
    assert seen[run]["seconds"] < 60


def test_servers_end_with_the_process_that_started_them(seen):
    deadline = time.monotonic() + 300
    while any(is_server(pid) for pid in seen["pids"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in seen["pids"] if is_server(pid)] == []


def is_server(pid):
    try:
        return b"server_template" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # It has ended, maybe just now.
        return False
