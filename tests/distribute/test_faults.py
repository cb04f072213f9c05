"""Workers and parameter servers that die, hang or are told to end while models are trained."""

from __future__ import annotations

import pathlib
import re
import time

import fault_program as program
import program_runner
import pytest

# Updates of a closure that was under way when its worker was lost: it is run again elsewhere.
UNFINISHED = program.STEPS_A_CLOSURE * program.BATCH


@pytest.fixture(scope="module")
def seen():
    return program_runner.result_of("fault_program.py")


def lost_updates(run):
    """Worker -> the number of updates that are lost with its cache at most, by the last warning."""
    text = "\n".join(run["messages"])
    return dict(re.findall(r"worker (\d+) lost its cache ids/.* at most (\d+) updates", text))


def check_steps(run, updates_at_risk=0):
    """Every example was trained and counted, and its update made, whatever was lost."""
    assert run["counts"] == [1.0]
    epochs = len(run["ids"])
    assert run["ids"] == [program.EXAMPLES] * epochs
    # Each step counts itself once, but for those that were lost with the replica of a worker.
    steps = epochs * program.STEPS
    text = "\n".join(run["messages"])
    lost = [int(n) for n in re.findall(r"lost its replica .* at most (\d+) steps", text)]
    at_risk = max(lost, default=0) if updates_at_risk else 0
    assert steps - at_risk <= run["iterations"] <= steps + program.STEPS_A_CLOSURE
    updates = steps * program.BATCH
    assert updates - updates_at_risk <= run["updates"] <= updates + UNFINISHED


def test_without_faults_every_example_counts_once(seen):
    run = seen["whole"]
    check_steps(run)
    assert run["iterations"] == program.STEPS
    assert run["updates"] == program.EXAMPLES
    assert not [text for text in run["messages"] if "worker" in text]


def test_a_killed_worker_loses_at_most_the_updates_that_the_log_says(seen):
    run = seen["worker killed"]
    (lost,) = lost_updates(run).items()
    assert lost[0] == "1"
    # What it had told when it was killed, and what it told of the closures that ended meanwhile.
    # Where the monitor was quicker than their results, there is a second warning.
    at_risk, told = int(lost[1]), seen["pending when killed"]
    assert 0 < told <= at_risk <= told + 4 * UNFINISHED  # closures for two workers
    check_steps(run, at_risk)


def test_flush_skips_a_worker_that_is_down(seen):
    text = "\n".join(seen["worker killed"]["messages"])
    assert re.search(r"not flushed: worker 1 at localhost:\d+ refuses connections", text)


def test_tables_are_saved_restored_and_cleared_without_a_worker_that_is_down(seen):
    run = seen["tables without it"]
    before, cleared, *restored = run["clocks"]
    assert before > 0
    assert cleared == 0
    assert restored == [before] * 3
    assert run["pending"] == 0


def test_restarted_worker_joins_in(seen):
    check_steps(seen["restarted"])


def test_a_worker_that_is_told_to_end_sends_its_updates_first(seen):
    run = seen["worker told to end"]
    log = seen["log of the ended"]
    assert re.search(r"worker 1 ends; .* last updates to \d+ shard\(s\), 0 are down", log), log
    assert lost_updates(run) == {}
    check_steps(run)


def test_share_of_a_killed_worker_is_given_up(seen):
    run = seen["share lost"]
    assert run["counts"] == [0.0, 1.0]
    assert "worker(s) [1] are down: the rest of their share" in "\n".join(run["messages"])


def test_training_goes_on_without_a_worker_that_hangs(seen):
    run = seen["worker stopped"]
    assert run["counts"] == [1.0]
    assert run["ids"] == [program.EXAMPLES] * program.EPOCHS_WITH_A_STOPPED
    text = "\n".join(run["messages"])
    assert re.search(r"worker 1 at localhost:\d+ does not answer", text), text
    # It is waited for once, by fit, or by the first flush if it hung between two closures: what
    # flushes at the end of later epochs knows that it is lost.
    assert seen["probes of the stopped"] <= 1


def check_dense_steps(run, lost):
    # The closure that the worker was running ran again; what it had sent of it counts twice.
    steps = run["epochs"] * program.DENSE_STEPS
    for made in (run["least"], run["most"], run["iterations"]):
        assert steps - lost <= made <= steps + program.DENSE_STEPS_A_CLOSURE, run


def test_a_killed_worker_loses_at_most_the_steps_of_its_replica_that_the_log_says(seen):
    run = seen["replicas"]["killed"]
    assert run["lost"]
    assert all(lost <= program.DENSE_STALENESS for lost in run["lost"])
    assert not run["ended"]
    check_dense_steps(run, sum(run["lost"]))


def test_a_worker_that_is_told_to_end_sends_the_steps_of_its_replica_first(seen):
    run = seen["replicas"]["told to end"]
    assert not run["lost"]
    assert run["ended"]
    check_dense_steps(run, 0)


@pytest.mark.parametrize(
    ("run", "task", "state", "process"),
    [
        ("ps killed", 0, "refuses connections: its process is gone", "exited with status -9"),
        ("ps stopped", 1, "does not answer: its process is there", "(process {}) lives"),
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


def test_whatever_is_called_next_names_the_parameter_server(seen):
    named = f"Parameter server /job:ps/task:0 at {seen['addresses']['ps'][0]}"
    assert len(seen["errors"]) == 23
    assert {name: e for name, e in seen["errors"].items() if not e.startswith(named)} == {}


def test_servers_end_with_the_process_that_started_them(seen):
    deadline = time.monotonic() + 300
    while any(is_server(pid) for pid in seen["pids"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in seen["pids"] if is_server(pid)] == []


def is_server(pid):
    try:
        return b"fork_server" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # It has ended, maybe just now.
        return False
