"""What was made before the strategy goes on working: datasets, with their tables, and lookups."""

from __future__ import annotations

import keras
import made_before
import numpy as np
import pytest
import small_models as sm
import tensorflow as tf

import het_tf.keras

DATASETS = [
    "StringLookup",
    "generator",
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("mutable table", "mapped", "plain", "shuffled", "table", "dense table")
    ),
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


def test_tables_and_variables_made_before_the_strategy(made_before_strategy):
    made = made_before_strategy
    assert made.table.lookup(tf.constant(["word 7", "no"])).numpy().tolist() == [7, -1]
    assert made.mutable.lookup(tf.constant(["word 7"])).numpy().tolist() == [[7]]
    made.mutable.insert(["new"], [[40.0]])
    assert made.mutable.lookup(tf.constant(["new"])).numpy().tolist() == [[40]]
    assert made.dense.lookup(tf.constant(["word 7", "no"])).numpy().tolist() == [7, -1]
    made.dense.erase(tf.constant(["word 7"]))
    assert made.dense.lookup(tf.constant(["word 7"])).numpy().tolist() == [-1]
    with pytest.raises(tf.errors.InvalidArgumentError, match="empty_key"):
        made.dense.insert([""], [1.0])
    made.dense.insert(["word 7"], [7.0])
    assert made.layer(["word 3"]).numpy().tolist() == [3]
    assert made.variable.numpy() == 1.0


@pytest.mark.exhaustive
def test_model_looks_words_up(made_before_strategy, strategy):
    words = np.array([[word] for word in made_before.WORDS] * 8)
    labels = np.array([[0.0], [1.0], [0.0], [1.0]] * 8, np.float32)
    with strategy.scope():
        lookup = made_before_strategy.word_layer
        inputs = keras.Input((1,), dtype="string")
        embedding = het_tf.layers.HetEmbedding(4, optimizer=het_tf.optimizers.SGD(0.5))
        hidden = keras.layers.Flatten()(embedding(lookup(inputs)))
        model = het_tf.keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    dataset = tf.data.Dataset.from_tensor_slices((words, labels)).batch(8)
    model.fit(dataset, epochs=20, verbose=0)
    assert model.evaluate(dataset, verbose=0) < 0.05
    assert sorted(embedding.table.export().keys) == [1, 2, 3, 4]
