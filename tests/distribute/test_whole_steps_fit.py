"""Scaled losses and accumulated gradients of several workers, rows included."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import het_tf

STEPS, BATCH = 120, 2


@pytest.fixture
def whole(strategy):
    """The strategy, to be changed for one test."""
    yield strategy
    strategy.dense_staleness = None
    strategy.exactly_once = False


def train(strategy, make_optimizer, cache, x=None):
    """Trains a weight and a row, each of gradient `x` in the mean of a step; both begin at 0.

    Returns:
      The model, the weight and the row.
    """
    with strategy.scope():
        ids, factor = keras.Input((), dtype="int64"), keras.Input((1,))
        rows = het_tf.layers.HetEmbedding(
            1, optimizer="same", embeddings_initializer="zeros", cache=cache, name="rows"
        )
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="dense")
        outputs = keras.layers.Add()([dense(factor), rows(ids) * factor])
        model = het_tf.keras.Model([ids, factor], outputs)
        model.compile(make_optimizer(), lambda _, predicted: -keras.ops.mean(predicted))
    x = np.ones(STEPS * BATCH, np.float32) if x is None else x
    inputs = [np.full(len(x), 5), x[:, None]]
    model.fit(inputs, np.zeros(len(x)), batch_size=BATCH, shuffle=False, verbose=0)
    weight = float(dense.kernel.numpy()[0, 0])
    if strategy.dense_staleness is not None:
        weight = round(weight + float(model.dense_owed.numpy().sum()), 3)  # of rows none is owed
    return model, weight, float(rows.table.lookup([5])[0, 0])


CACHES = {"no cache": None, "staleness 4": het_tf.CacheConfig(8, staleness=4, lookahead=1)}


@pytest.mark.parametrize(
    ("staleness", "cache"),
    [pytest.param(None, "no cache", marks=pytest.mark.exhaustive), (3, "staleness 4")],
)
def test_each_worker_accumulates_its_own_gradients(whole, staleness, cache):
    whole.dense_staleness = staleness
    model, weight, row = train(
        whole,
        lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=4),
        CACHES[cache],
    )
    # A step of a mean gradient of 1 for every 4 of a worker, which keeps at most 3.
    fewest = (STEPS - 3 * whole.num_workers) // 4
    assert row == int(row)
    assert weight == int(weight)
    assert fewest <= row <= STEPS // 4
    assert row == weight or staleness is None  # steps on one variable at once lose some
    assert fewest / 2 < weight <= STEPS // 4
    assert int(model.optimizer.iterations.numpy()) == STEPS // 4
    # What is left is applied with what the next epochs bring.
    assert model.get_layer("rows").table.size() == 1


@pytest.mark.parametrize(
    ("staleness", "cache"),
    [(None, "no cache"), pytest.param(3, "staleness 4", marks=pytest.mark.exhaustive)],
)
def test_a_skipped_step_updates_nothing(whole, staleness, cache):
    whole.dense_staleness = staleness
    x = np.ones(STEPS * BATCH, np.float32)
    x[::6] = 1e38  # of every third step: times any scale that comes beyond float32

    def make():
        optimizer = keras.optimizers.SGD(1.0)
        return keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=2.0**60, dynamic_growth_steps=10_000
        )

    model, weight, row = train(whole, make, CACHES[cache], x)
    assert int(model.optimizer.iterations.numpy()) == STEPS - STEPS // 3
    assert row == STEPS - STEPS // 3
    if staleness is not None:
        assert weight == row
    else:  # steps on one variable at once lose some
        assert 0 < weight <= row
    # Each worker halves its own scale; the least is written back.
    halvings = 60 - np.log2(model.optimizer.inner_optimizer.dynamic_scale.numpy())
    assert STEPS // 3 / whole.num_workers <= halvings <= STEPS // 3


def test_a_worker_that_dies_takes_accumulated_gradients_along(whole):
    whole.exactly_once = True
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=4 .*exactly_once"):
        train(whole, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=4), None)
