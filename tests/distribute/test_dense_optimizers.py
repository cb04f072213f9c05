"""Several optimizers, models that share layers and steps with a tape, on replicas of variables."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
import het_tf.keras
from het_tf.optimizers.joint_optimizer import scaler_of

BATCHES, BATCH = 12, 8
X = np.ones((BATCHES * BATCH, 4), np.float32)
Y = np.zeros((len(X), 1), np.float32)


@pytest.fixture
def dense(strategy):
    strategy.dense_staleness = 5
    yield strategy
    strategy.dense_staleness = None


class Two(het_tf.keras.Model):
    """Two towers, each with an optimizer of its own, which a step with a tape uses."""

    def train_step(self, data):
        x, _ = data
        logs = {}
        for name, optimizer in {"first": self.optimizer, **self.others}.items():
            tower = self.get_layer(name)
            with tf.GradientTape() as tape:
                loss = -tf.reduce_mean(tf.reduce_sum(tower(x), -1))
            weights = tower.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            logs[name] = loss
        return logs


def two_towers(strategy, second):
    with strategy.scope():
        inputs = keras.Input((4,))
        towers = [
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name=name)
            for name in ("first", "second")
        ]
        model = Two(inputs, [tower(inputs) for tower in towers])
        model.compile(keras.optimizers.SGD(1.0, momentum=0.5))
        model.others = {"second": second()}
        model.others["second"].build(towers[1].trainable_variables)
    return model


def test_a_step_with_two_optimizers(dense):
    model = two_towers(dense, lambda: keras.optimizers.SGD(1.0, momentum=0.5))
    steps = BATCHES // 2
    model.fit(X, Y, batch_size=2 * BATCH, epochs=2, verbose=0)
    # Each server has one weight, and merges what workers send in an order of its own.
    first, second = np.concatenate(model.get_weights()).reshape(2, -1) + np.reshape(
        model.dense_owed, (2, -1)
    )
    np.testing.assert_allclose(first, second, rtol=1e-5)
    # The momentum of 0.5 doubles a step, but for the last ones.
    assert np.all((first > 2 * steps) & (first < 4 * steps))
    optimizers = [model.optimizer, model.others["second"]]
    assert [int(each.iterations.numpy()) for each in optimizers] == [2 * steps] * 2
    slots = [each.variables[2].numpy() for each in optimizers]
    np.testing.assert_array_equal(*slots)
    assert np.all(slots[0] > 1)


@pytest.mark.exhaustive
def test_both_optimizers_count_every_step_without_replicas(dense):
    dense.dense_staleness = None
    model = two_towers(dense, lambda: keras.optimizers.SGD(1.0))
    model.fit(X, Y, batch_size=BATCH, epochs=5, verbose=0)
    optimizers = [model.optimizer, model.others["second"]]
    assert [int(each.iterations.numpy()) for each in optimizers] == [5 * BATCHES] * 2


def test_only_the_compiled_optimizer_accumulates(dense):
    model = two_towers(
        dense, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2, name="slow")
    )
    with pytest.raises(ValueError, match="The optimizer 'slow' accumulates gradients"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


def test_the_compiled_optimizer_accumulates_once(dense):
    """Its gradients are slots of which there is one each."""
    with dense.scope():
        inputs = keras.Input((4,))
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = het_tf.keras.Model(inputs, layer(inputs))
        optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        model.compile(optimizer, lambda _, p: -keras.ops.sum(p, axis=-1))
    for _ in range(2):
        model.train_on_batch(X[:BATCH], Y[:BATCH])
    assert model.get_weights()[0][0, 0] == 1


@pytest.mark.exhaustive
def test_models_that_share_a_layer_train_in_turns(dense):
    with dense.scope():
        shared = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        models = []
        for _ in range(2):
            inputs = keras.Input((4,))
            model = het_tf.keras.Model(inputs, shared(inputs))
            model.compile(keras.optimizers.SGD(1.0), lambda _, p: -keras.ops.sum(p, axis=-1))
            models.append(model)
    for fit in range(4):
        before = shared.get_weights()[0] if fit else 0.0
        models[fit % 2].fit(X, Y, batch_size=BATCH, verbose=0)
        # What is owed to weights that another model has trained since is void.
        added = shared.get_weights()[0] - before
        assert np.all((added >= BATCHES / dense.num_workers) & (added < BATCHES))
    for model in models:
        assert int(model.optimizer.iterations.numpy()) == 2 * BATCHES


def reset(model):
    """Slots and steps as they were before the first one."""
    for variable in model.optimizer.variables:
        if variable is not model.optimizer.learning_rate:
            variable.assign(keras.ops.zeros_like(variable))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "make",
    [
        keras.optimizers.Adam,
        pytest.param(keras.optimizers.Nadam, marks=pytest.mark.exhaustive),  # no fused steps
        pytest.param(
            lambda rate: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate)),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            lambda rate: keras.optimizers.Adam(rate, gradient_accumulation_steps=2),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["Adam", "Nadam", "scaled", "accumulated"],
)
def test_the_bias_of_slots_is_corrected_by_the_steps_that_made_them(dense, make):
    """With a gradient that is always the same every worker steps as one would alone."""
    with dense.scope():
        inputs = keras.Input((4,))
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = het_tf.keras.Model(inputs, layer(inputs))
        model.compile(make(0.01), lambda _, y: -keras.ops.mean(y, -1))
    at = [0.0]
    for _ in range(2):
        model.fit(X, Y, batch_size=BATCH, epochs=5, verbose=0)
        at.append(float(model.get_weights()[0][0, 0] + model.dense_owed.numpy()[0]))
        if scaler_of(model.optimizer) is None:
            reset(model)
    alone, optimizer = keras.Variable(0.0), make(0.01)
    optimizer.build([alone])
    steps = 5 * BATCHES // dense.num_workers
    for _ in range(steps):
        gradient = -1.0
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            gradient = optimizer.scale_loss(gradient)
        optimizer.apply([tf.convert_to_tensor(gradient)])
    # Steps of N workers count 1 / sqrt(N) each. Not all workers make as many, nor has each whole
    # accumulations of gradients.
    np.testing.assert_allclose(np.diff(at), dense.num_workers**0.5 * float(alone), rtol=0.1)
