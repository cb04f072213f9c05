"""Datasets, variables and lookup tables that were made before the strategy."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import small_models as sm
import tensorflow as tf

import het_tf.keras

DATASETS = [
    "generator",
    "mapped",
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("plain", "shuffled")),
]


@pytest.fixture(scope="module")
def id_counter(strategy):
    with strategy.scope():
        return sm.make_id_counter(het_tf.keras.Model, 32, steps_per_execution=3)


@pytest.mark.parametrize("name", DATASETS)
def test_dataset_made_before_the_strategy(made_before_strategy, id_counter, name):
    dataset = made_before_strategy.datasets[name]
    counts = id_counter.counter.counts
    id_counter.fit(dataset, validation_data=dataset, verbose=0)
    assert counts.numpy().tolist() == 32 * [1]
    id_counter.fit(dataset, steps_per_epoch=16, verbose=0)
    assert np.sum(counts.numpy()) == 64
    id_counter.evaluate(dataset, verbose=0)
    assert counts.numpy().tolist() == 32 * [1]
    predicted = id_counter.predict(dataset, verbose=0)
    weight = id_counter.get_weights()[0]
    ids = np.arange(32).reshape(-1, 1)
    order = np.argsort(np.abs(predicted[:, 0]))  # One is shuffled.
    np.testing.assert_allclose(predicted[order], ids * weight, rtol=1e-6)
    assert len(list(dataset)) == 8


def test_a_workers_own_dataset_with_a_variable_made_before(made_before_strategy, id_counter):
    def share(context, variable):
        plain = sm.id_dataset(range(32), 4)
        plain = plain.shard(context.num_input_pipelines, context.input_pipeline_id)
        return plain.map(lambda x, y: (x + variable - 1.0, y))

    before = made_before_strategy.variable
    with pytest.raises(ValueError, match=r"uses the variable 'Variable:0', .* before the str"):
        id_counter.fit(lambda context: share(context, before), verbose=0)
    for of_after in (before.numpy(), tf.Variable(1.0)):
        id_counter.fit(lambda context, value=of_after: share(context, value), verbose=0)
        assert id_counter.counter.counts.numpy().tolist() == 32 * [1]


def test_variable_made_before_the_strategy(made_before_strategy):
    assert made_before_strategy.variable.numpy() == 1.0


def test_lookup_table_made_before_the_strategy_is_named(made_before_strategy, strategy):
    made = made_before_strategy
    message = "was made before the strategy.* Make the layer or table, .* after `strategy ="
    with strategy.scope():
        words = keras.Input((1,), dtype="string")
        embedding = het_tf.layers.HetEmbedding(1)
        outputs = keras.layers.Flatten()(embedding(made.lookup(words)))
        model = het_tf.keras.Model(words, outputs)
        model.compile("sgd", "mse")
    x, y = np.array([["ant"], ["bee"]]), np.zeros((2, 1))
    for call in (lambda: model.fit(x, y, verbose=0), lambda: model.predict(x, verbose=0)):
        with pytest.raises(ValueError, match=f"Layer {made.lookup.name!r}.*{message}"):
            call()
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        model = het_tf.keras.Model(ids, keras.layers.Flatten()(het_tf.layers.HetEmbedding(1)(ids)))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=f"The data.*{message}"):
        model.fit(made.words, verbose=0)
