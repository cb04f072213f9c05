"""With one worker, training on a replica of the dense variables is training in one process."""

from __future__ import annotations

import numpy as np
import program_runner
import pytest

PROGRAM = "one_worker_dense_program.py"
CASES = [
    "accumulated, None",
    "accumulated, 7",
    "scaled, None",
    "scaled, 0",
    "scaled, accumulated, None",
    "scaled, clipped, 7",
    "float16, 7",
    "sgd",
    "momentum, clipnorm",
    "adam",
    "adamw, global_clipnorm, schedule",
    "adagrad",
    "ema",
    "rmsprop",
    "adadelta",
    "adamax",
    "nadam",
    "ftrl",
    "lion",
    "lamb",
    "adafactor",
    "muon",
    "amsgrad, clipvalue",
    "ema, overwriting",
    "two fits",
    "noise in validation",
]


@pytest.fixture(scope="module")
def results():
    # TensorFlow knows one cluster at a time, and this process may be on another.
    return program_runner.result_of(PROGRAM)


@pytest.mark.parametrize("case", CASES)
def test_equals_keras(results, case):
    ours, keras = results[case]
    # In float16 TensorFlow rounds as it happens to fuse ops, but the scale is the same.
    close = dict(rtol=1e-6, atol=1e-6) if "float16" not in case else dict(rtol=1e-6, atol=5e-3)
    for kind in ("weights", "slots", "rows"):
        assert len(ours[kind]) == len(keras[kind])
        for a, b in zip(ours[kind], keras[kind], strict=True):
            np.testing.assert_allclose(a, b, **close, err_msg=kind)
    for name, values in keras["history"].items():
        limit = 2e-5 if "float16" not in case else 1e-2
        np.testing.assert_allclose(ours["history"][name], values, rtol=limit, err_msg=name)


def test_every_case_is_tested(results):
    assert sorted(results) == sorted(CASES)
