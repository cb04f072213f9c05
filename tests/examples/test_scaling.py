"""benchmarks/scaling.py: its queueing model against known results, and a run of it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags

_BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _find_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(_BENCHMARKS)
    if "scaling" not in sys.modules:
        # Programs have flags of the same names, and tests of another one may have imported it.
        flags.FLAGS.remove_flag_values(
            [f.name for f in flags.FLAGS.flags_by_module_dict().get("local_step", [])]
        )


def test_mean_value_analysis():
    from scaling import response

    assert response(1, 3.0, [1.0, 2.0]) == 6  # nobody to wait for
    assert response(7, 0.0, [2.0, 2.0, 2.0]) == pytest.approx(2 * (7 + 3 - 1))  # balanced
    assert response(2, 0.0, [1.0, 3.0]) == pytest.approx(1 * 1.25 + 3 * 1.75)
    assert response(500, 5.0, [1.0, 2.0]) == pytest.approx(1000, rel=1e-3)  # the slower one
    assert response(3, 4.0, []) == 4


def test_bytes_of_the_busiest_server():
    from scaling import _busiest_first

    assert _busiest_first(8.0, [], 0.0, 4) == [2, 2, 2, 2]
    # A variable of 10 stays whole, whatever the number of servers.
    assert _busiest_first(4.0, [10.0], 2.0, 2) == [12, 4]
    assert _busiest_first(4.0, [10.0], 2.0, 4) == pytest.approx([11, 5 / 3, 5 / 3, 5 / 3])
    assert _busiest_first(4.0, [10.0], 2.0, 1) == [16]


def test_messages_that_go_ahead_do_not_wait_for_computing():
    from scaling import Step, predict_here, response

    def wire(ahead: bool, compute: float) -> float:
        step = Step(compute, 0.0, 0.0, 0.0, (1e6, 5e5), (2e6, 5e5), ahead)
        return predict_here(step, 3, 8e6 * 1514 / 1448, 16.0)["wire"]

    assert wire(True, 0.5) == wire(True, 5.0) == pytest.approx(response(3, 1.0, [1.0, 2.0]))
    assert wire(False, 0.5) == pytest.approx(response(3, 1.5, [1.0, 2.0]))


def test_runs_that_follow_the_model_are_predicted(tmp_path: pathlib.Path):
    from netns import runs
    from netns.measure import Epoch
    from scaling import response

    sizes = runs.Sizes(2, 100, 20, 128, 128, (256,), 10, 128, 0.1, "adagrad")
    compute, worker, server, rate = 0.01, 0.015, 0.02, 1e9 * 1448 / 1514
    bytes_each_way = 4_000_000

    def run(variant: str, workers: int, servers: int, rate: str | None, seconds: float) -> runs.Run:
        setting = runs.Setting(variant, workers, servers, rate, "default", None, 1, sizes)
        steps = 100 * workers
        moved = {f"worker{i}": 100 * bytes_each_way for i in range(workers)}
        cpu = {f"worker{i}": 100 * (worker if servers else compute) for i in range(workers)}
        if servers:
            moved["ps0"] = steps * bytes_each_way
            cpu |= {"ps0": steps * server, "chief": 0.0}
        counters = {name: 500_000 * steps for name in ("bytes_up", "bytes_down", "messages")}
        idle = 16 * 100 * seconds - sum(cpu.values())
        epoch = Epoch(100 * seconds, moved, moved, cpu, idle, counters, 3_450_000, 0.7)
        return runs.Run(setting, [epoch, epoch])

    on_wire = response(4, compute, [8 * bytes_each_way / rate] * 2)
    path = tmp_path / "runs.json"
    runs.write(
        path,
        [
            run("alone", 2, 0, None, compute),
            run("no_cache", 2, 1, None, worker + server),
            run("no_cache", 4, 1, "1gbit", on_wire),
        ],
    )
    done = subprocess.run(
        [
            *(sys.executable, str(_BENCHMARKS / "scaling.py"), f"--runs={path}"),
            *("--workers=1,1000", "--rates=1gbit,400gbit", f"--json={tmp_path / 'out.json'}"),
        ],
        env=os.environ | {"PYTHONPATH": str(_BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    result = json.loads((tmp_path / "out.json").read_text())
    for each in result["measured"]:
        assert each["predicted"] == pytest.approx(each["ms"], rel=1e-6)
    speed = {(each["rate"], each["workers"]): each["examples_per_s"] for each in result["foreseen"]}
    # One worker on a fast network has nothing but its own and its server's work.
    assert speed["400gbit", 1] == pytest.approx(128 / (worker + server), rel=1e-6)
    # The largest variable is on one server, however many there are.
    least = 8 * 4 * 26 * 128 * 256 / rate
    assert speed["1gbit", 1000] == pytest.approx(128 / least, rel=0.05)
    assert "largest 0%" in done.stdout
