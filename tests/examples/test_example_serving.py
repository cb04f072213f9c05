"""examples/serving: a program that trains, and one that serves what it publishes."""

import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "serving"


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_what_one_program_trains_another_serves(tmp_path):
    begin, folder = time.time(), str(tmp_path / "live")
    serves = start(str(EXAMPLE / "serve.py"), folder, "--until", "3")
    trains = start(str(EXAMPLE / "train.py"), folder, "--every", "20ms", "--steps", "200")
    trained, _ = trains.communicate(timeout=300)
    served, _ = serves.communicate(timeout=300)
    assert trains.returncode == serves.returncode == 0
    assert "is the last" in trained
    lines = [json.loads(line) for line in served.splitlines() if line.startswith("{")]
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions))
    assert versions[-1] >= 3
    assert all(0 < line["click"] < 1 for line in lines)
    # What is served is the fresher for each version, and no older than the program.
    ages = [line["age_seconds"] for line in lines]
    assert all(0 <= age <= time.time() - begin for age in ages)
    before = [line["age_of_the_last"] for line in lines[1:]]
    assert all(age < last for age, last in zip(ages[1:], before, strict=True))
