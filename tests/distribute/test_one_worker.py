"""With one worker, training on a cluster is training in one process."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

PROGRAM = pathlib.Path(__file__).with_name("one_worker_program.py")
CASES = [
    "arrays",
    "adam, weights, validation split",
    "dataset",
    "dataset with steps",
    "function with steps",
]


@pytest.fixture(scope="module")
def results():
    # TensorFlow knows one cluster at a time, and this process may be on another.
    ended = subprocess.run(
        [sys.executable, str(PROGRAM)],
        # There is no such proxy: what runs here talks to itself.
        env={**os.environ, "http_proxy": "http://localhost:9"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    # Nothing but warnings: leaving a cluster is quiet.
    assert "Failed to remove" not in ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_equals_keras(results, case):
    ours, keras = results[case]
    assert ours["iterations"] == keras["iterations"]
    assert ours["history"].keys() == keras["history"].keys()
    for name, values in keras["history"].items():
        np.testing.assert_allclose(ours["history"][name], values, rtol=2e-5, err_msg=name)
    for a, b in zip(ours["weights"], keras["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_every_case_is_tested(results):
    assert sorted(results) == sorted(CASES)
