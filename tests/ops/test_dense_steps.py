"""The ops that step dense variables, and Keras's optimizers by them."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from het_tf import ops
from het_tf.compat.keras_internals import stepping_within
from het_tf.keras.worker_step.dense_variables import fused_update_step

REFUSED = tf.errors.InvalidArgumentError
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, epsilon=0.3),
    "adamw with all": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5),
        weight_decay=0.1,
        global_clipnorm=1.0,
        use_ema=True,
        ema_momentum=0.5,
    ),
}


def fused_steps(optimizer):
    update_step = fused_update_step(optimizer)
    return stepping_within(optimizer, contextlib.nullcontext, update_step)


def train(make, fused, steps=30):
    """What a model's variables and its optimizer's are after some steps, and the ops of a step."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(3)])
    model.compile(make(), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    optimizer = model.optimizer
    data = np.random.default_rng(1).normal(size=[steps, 4, 10]).astype(np.float32)

    @tf.function
    def step(batch):
        if not fused:
            model.train_step((batch[:, :7], batch[:, 7:]))
            return
        with fused_steps(model.optimizer):
            model.train_step((batch[:, :7], batch[:, 7:]))

    for batch in data:
        step(batch)
    assert model.optimizer is optimizer
    kinds = {op.type for op in step.get_concrete_function(data[0]).graph.get_operations()}
    return [v.numpy() for v in (*model.variables, *optimizer.variables)], kinds


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_steps_are_those_of_keras(name):
    keras_s, _ = train(OPTIMIZERS[name], fused=False)
    ours, kinds = train(OPTIMIZERS[name], fused=True)
    assert any("Apply" in kind for kind in kinds)
    assert len(ours) == len(keras_s)
    for a, b in zip(ours, keras_s, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.01, amsgrad=True),
        lambda: keras.optimizers.Nadam(0.01),
        lambda: type("Mine", (keras.optimizers.SGD,), {})(0.1),
    ],
)
def test_others_step_as_before(make):
    """Also subclasses of those that could be fused: their steps may be others."""
    keras_s, _ = train(make, fused=False, steps=5)
    ours, kinds = train(make, fused=True, steps=5)
    assert not any("Apply" in kind for kind in kinds)
    for a, b in zip(ours, keras_s, strict=True):
        np.testing.assert_array_equal(a, b)


def test_sparse_gradients_step_as_before():
    def train(fused):
        keras.utils.set_random_seed(1)
        table = keras.layers.Embedding(10, 4)
        model = keras.Sequential([keras.Input((2,), dtype="int64"), table])
        model.compile(keras.optimizers.Adagrad(0.1), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        batch = (tf.constant([[1, 2], [2, 3]], tf.int64), tf.ones([2, 2, 4]))
        if fused:
            with fused_steps(model.optimizer):
                model.train_step(batch)
        else:
            model.train_step(batch)
        return table.embeddings.numpy()

    np.testing.assert_array_equal(train(True), train(False))


def test_a_value_that_was_read_stays():
    variable, accumulator = tf.Variable([1.0, 2.0]), tf.Variable([0.1, 0.1])
    before = variable.read_value()
    ops.apply_adagrad(variable.handle, accumulator.handle, [1.0, 1.0], 0.5, epsilon=0.0)
    np.testing.assert_array_equal(before, [1.0, 2.0])
    np.testing.assert_allclose(accumulator, [1.1, 1.1])
    np.testing.assert_allclose(variable, np.array([1.0, 2.0]) - 0.5 / np.sqrt(1.1), rtol=1e-6)


def test_bad_steps_are_refused():
    variable, accumulator = tf.Variable([1.0, 2.0]), tf.Variable([0.1, 0.1])

    def step(a, b, gradient, rate=0.5):
        ops.apply_adagrad(a.handle, b.handle, gradient, rate, epsilon=1e-7)

    with pytest.raises(REFUSED, match=r"variable is float of shape \[2\], gradient .* \[3\]"):
        step(variable, accumulator, [1.0, 1.0, 1.0])
    with pytest.raises(REFUSED, match=r"slot 0 is float of shape \[3\], gradient .* \[2\]"):
        step(variable, tf.Variable([0.1] * 3), [1.0, 1.0])
    with pytest.raises(REFUSED, match=r"slot 0 is int32 of shape \[2\], gradient is float"):
        step(variable, tf.Variable([1, 2]), [1.0, 1.0])
    with pytest.raises(REFUSED, match=r"not different ones"):
        step(variable, variable, [1.0, 1.0])
    with pytest.raises(REFUSED, match=r"learning_rate must be a scalar, not of shape \[1\]"):
        step(variable, accumulator, [1.0, 1.0], [0.5])
    np.testing.assert_array_equal(variable, [1.0, 2.0])
    np.testing.assert_array_equal(accumulator, np.array([0.1, 0.1], np.float32))
