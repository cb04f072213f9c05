"""With one worker, training on a replica of the dense variables is training in one process."""

from __future__ import annotations

import functools

import numpy as np
import program_runner
import pytest

# The steps of optimizers are compared in tests/ops/test_dense_steps.py. Each case here has
# variables of another kind, or other rules for them.
CASES = (
    "adamw, global_clipnorm, schedule, ema, 7",
    "accumulated, schedule",
    "scaled, accumulated, None",
    "scaled, clipped",
    "momentum, clipnorm, 0",
    "adafactor, two fits, noise in validation",
)
MORE_CASES = (
    "scaled, float16, 7",
    "rmsprop",
    "nadam",
    "muon",
    "amsgrad, clipvalue",
    "ema, overwriting",
)


@functools.cache
def results_of(cases):
    # TensorFlow knows one cluster at a time, and this process may be on another.
    return program_runner.result_of("one_worker_dense_program.py", *cases)


def check_equal(ours, keras, is_float16=False):
    # In float16 TensorFlow rounds as it happens to fuse ops, but the scale is the same.
    close = dict(rtol=1e-6, atol=5e-3 if is_float16 else 1e-6)
    for kind in ("weights", "slots", "rows"):
        assert len(ours[kind]) == len(keras[kind])
        for a, b in zip(ours[kind], keras[kind], strict=True):
            np.testing.assert_allclose(a, b, **close, err_msg=kind)
    for name, values in keras["history"].items():
        limit = 1e-2 if is_float16 else 2e-5
        np.testing.assert_allclose(ours["history"][name], values, rtol=limit, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_equals_keras(case):
    check_equal(*results_of(CASES)[case])


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE_CASES)
def test_equals_keras_with_more_optimizers(case):
    check_equal(*results_of(MORE_CASES)[case], is_float16="float16" in case)
