"""With one worker, training on a cluster is training in one process."""

from __future__ import annotations

import inspect
import json
import os

import keras
import numpy as np
import program_runner
import pytest

PROGRAM = "one_worker_program.py"
CASES = [
    "arrays with class weights, from a later epoch on",
    "dataset, validation with weights in batches",
    "dataset with steps",
]
MORE_CASES = [
    "weights, validation split at times",
    "function with steps",
    "steps without a batch size",
]


def results_of(cases):
    # TensorFlow knows one cluster at a time, and this process may be on another.
    # There is no such proxy: what runs here talks to itself.
    ended = program_runner.run(
        program_runner.PROGRAMS / PROGRAM,
        *cases,
        env={**os.environ, "http_proxy": "http://localhost:9"},
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    # Nothing but warnings: leaving a cluster is quiet.
    assert "Failed to remove" not in ended.stderr
    results = json.loads(ended.stdout.splitlines()[-1])
    assert sorted(results["cases"]) == sorted(cases)
    return results


@pytest.fixture(scope="module")
def results():
    return results_of(CASES)


@pytest.mark.parametrize("case", CASES)
def test_equals_keras(results, case):
    check_equal(*results["cases"][case])


@pytest.mark.exhaustive
def test_equals_keras_in_more_cases(subtests):
    for case, of_case in results_of(MORE_CASES)["cases"].items():
        with subtests.test(case):
            check_equal(*of_case)


def check_equal(ours, theirs):
    assert ours["calls"] == theirs["calls"]
    assert ours["printed"] == theirs["printed"]
    assert ours["iterations"] == theirs["iterations"]
    rates = {"examples_per_s", "MB_up_per_s", "MB_down_per_s"}
    assert ours["history"].keys() - rates == theirs["history"].keys()
    for name, values in theirs["history"].items():
        np.testing.assert_allclose(ours["history"][name], values, rtol=2e-5, err_msg=name)
    for a, b in zip(ours["weights"], theirs["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_every_case_is_tested(results):
    assert sorted(results["all cases"]) == sorted(CASES + MORE_CASES)


def test_every_argument_of_fit_is_tested(results):
    arguments = {*inspect.signature(keras.Model.fit).parameters} - {"self"}
    assert {*results["arguments"]} == arguments


@pytest.mark.parametrize("whose", ["ours", "Keras's"])
def test_arrays_are_shuffled_example_by_example_in_every_epoch(results, whose):
    epochs = results["batches"][whose]["shuffled"]
    in_order = np.arange(20).reshape(4, 5).tolist()
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == 4 * [5]
        assert sorted(number for batch in epoch for number in batch) == list(range(20))
        assert any(batch not in in_order for batch in epoch)  # not whole batches shuffled
    assert len({str(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("whose", ["ours", "Keras's"])
def test_arrays_that_are_not_shuffled_come_in_order(results, whose):
    epochs = results["batches"][whose]["in order"]
    assert epochs == 3 * [np.arange(20).reshape(4, 5).tolist()]


def test_embedding_without_staleness_equals_one_process(results):
    ours, one_process = results["embedding"]
    assert one_process["loss"][-1] < one_process["loss"][0]
    for name, values in one_process.items():
        np.testing.assert_allclose(ours[name], values, rtol=0, atol=1e-5, err_msg=name)
