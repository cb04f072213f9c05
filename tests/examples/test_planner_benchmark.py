"""benchmarks/planner.py plans for the clusters of runs, and compares."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from het_tf.planner import Calibration

_BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.exhaustive
def test_plans_beside_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(_BENCHMARKS)
    from netns import runs
    from netns.measure import Epoch

    sizes = runs.Sizes(2, 40, 20, 64, 16, (8,), 5000, 64, 0.1, "adagrad")

    def run(variant: str, servers: int, rate: str | None) -> runs.Run:
        setting = runs.Setting(variant, 2, servers, rate, "default", None, 1, sizes)
        moved = {f"{kind}{i}": 10**8 for kind in ("worker", "ps") for i in range(2)}
        cpu = dict.fromkeys(moved, 0.1) | {"chief": 0.05}
        names = ("ids", "hit_ids", "bytes_up", "bytes_down")
        epoch = Epoch(1.0, moved, moved, cpu, 1.0, dict.fromkeys(names, 10**7), 4000, 0.7)
        return runs.Run(setting, [epoch, epoch])

    path, calibration = tmp_path / "runs.json", tmp_path / "calibration.json"
    runs.write(path, [run("alone", 0, None), run("default", 2, None), run("no_cache", 2, "1gbit")])
    calibration.write_text(json.dumps(dataclasses.asdict(Calibration())))
    done = subprocess.run(
        [
            *(sys.executable, str(_BENCHMARKS / "planner.py"), f"--runs={path}"),
            *(f"--calibration={calibration}", f"--json={tmp_path / 'out.json'}"),
        ],
        env=os.environ | {"PYTHONPATH": str(_BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]  # These runs are invented.
    cached, uncached = json.loads((tmp_path / "out.json").read_text())
    assert 0.5 < cached["predicted"]["hit_rate"] < 1
    assert uncached["predicted"]["hit_rate"] == 0
    assert cached["predicted"]["kb"] < uncached["predicted"]["kb"]
    assert [each["measured"]["busiest"] for each in (cached, uncached)] == ["cores", "network"]
