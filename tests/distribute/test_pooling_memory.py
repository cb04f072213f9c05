"""A pooled step has no row for each id in between, in whatever tensor or buffer."""

from __future__ import annotations

import contextlib
import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
import het_tf.keras

BAGS, IDS, KEYS, DIM = 8, 6_250, 100, 512
ROW_PER_ID = BAGS * IDS * DIM * 4  # bytes: 102 million

WHERE = {
    "in this process": None,
    "cached": het_tf.CacheConfig(KEYS // 2, staleness=3),
    "not cached": None,
    "on a device": het_tf.CacheConfig(device_capacity=KEYS // 2, device="CPU"),
}


class Scale(keras.layers.Layer):
    """Makes weights that are trained of given ones."""

    def build(self, input_shape):
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        return inputs * self.factor


class GatherThenSum(keras.layers.Layer):
    """Pools as a layer without an op of its own has to."""

    def __init__(self, cache):
        super().__init__()
        self.rows = het_tf.layers.HetEmbedding(DIM, cache=cache)

    def call(self, ids, weights):
        return tf.reduce_sum(self.rows(ids) * weights[..., tf.newaxis], 1)


def status_bytes(pid, which):
    """VmRSS (now) or VmHWM (peak) of a process."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(which))
    return int(line.split()[1]) << 10


def step_bytes(layers, pids):
    """Memory that a step takes at its most in that of the processes which takes most."""
    inputs = [keras.Input((None,), dtype="int64"), keras.Input((None,))]
    scale = Scale()
    scaled = scale(inputs[1])
    pooled = keras.layers.Add()([keras.layers.Dense(1)(x(inputs[0], scaled)) for x in layers])
    model = het_tf.keras.Model(inputs, pooled)
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    ids, weights = rng.integers(0, KEYS, (BAGS, IDS)), rng.random((BAGS, IDS), np.float32) / IDS
    labels = np.ones((BAGS, 1), np.float32)

    def batches(ids_in_a_bag):
        given = tuple(x[:, :ids_in_a_bag] for x in (ids, weights))
        return tf.data.Dataset.from_tensors((given, labels)).repeat(3)

    model.fit(batches(KEYS), verbose=0)  # on every worker, so that it is traced
    before = scale.factor.numpy()
    resident = {pid: status_bytes(pid, "VmRSS") for pid in pids}
    for pid in pids:
        pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM = VmRSS
    model.fit(batches(IDS), verbose=0)
    assert scale.factor.numpy() != before  # through the gradients of the weights
    return max(status_bytes(pid, "VmHWM") - resident[pid] for pid in pids)


@pytest.fixture(params=WHERE)
def where(request, strategy, cluster):
    """Scope of a strategy or of none, a cache, and the processes that train."""
    if request.param == "in this process":
        return contextlib.nullcontext(), None, [os.getpid()]
    if request.param == "on a device" and het_tf.ops.build()["cuda"] is not None:
        pytest.skip("the ops are built with CUDA: the host takes no GPU's place")
    pids = [cluster.process("worker", i).pid for i in range(3)]
    return strategy.scope(), WHERE[request.param], pids


@pytest.mark.exhaustive
def test_four_combiners_take_less_than_one_row_for_each_id(where):
    scope, cache, pids = where
    combiners = ("sum", "mean", "sqrtn", "max")
    with scope:
        layers = [het_tf.layers.HetEmbedding(DIM, combiner=c, cache=cache) for c in combiners]
        assert step_bytes(layers, pids) < ROW_PER_ID
    assert [layer.table.size() for layer in layers] == 4 * [KEYS]


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["cached"], indirect=True)
def test_rows_that_are_gathered_first_are_seen(where):
    scope, cache, pids = where
    with scope:
        assert step_bytes([GatherThenSum(cache)], pids) > ROW_PER_ID
