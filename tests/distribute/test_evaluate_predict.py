"""`evaluate` and `predict` on a cluster equal those of one process."""

from __future__ import annotations

import gc
import threading

import keras
import numpy as np
import pytest
import small_models as sm
import tensorflow as tf
from tracing import graph_def, record_closures

import het_tf.keras

METRICS = ["accuracy", "auc", "mae"]


@pytest.fixture(scope="module")
def pair(strategy):
    """The same model under the strategy and without."""
    with strategy.scope():
        model = sm.make_classifier(het_tf.keras.Model)
    local = sm.make_classifier(keras.Model)
    for m in (model, local):
        m.compile("sgd", "binary_crossentropy", metrics=METRICS)
    return model, local


@pytest.fixture(scope="module")
def data():
    return sm.make_data(150, seed=3)


@pytest.fixture(scope="module")
def expected(pair, data):
    return pair[1].evaluate(*data, verbose=0, return_dict=True)


def shares(x, y):
    def share(context):
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(11)

    return share


def test_evaluate_equals_a_single_process(pair, data, expected):
    dataset = tf.data.Dataset.from_tensor_slices(data)
    for args in (data, (dataset.batch(13),), (shares(*data),)):
        logs = pair[0].evaluate(*args, verbose=0, return_dict=True)
        assert logs == pytest.approx(expected, rel=1e-5)


def test_evaluate_returns_what_keras_returns(pair, data, expected):
    model, local = pair
    np.testing.assert_allclose(
        model.evaluate(*data, verbose=0), local.evaluate(*data, verbose=0), rtol=1e-5
    )
    by_metric = {name: float(value) for name, value in model.get_metrics_result().items()}
    assert by_metric == pytest.approx(expected, rel=1e-5)


def test_evaluate_some_steps(pair, data):
    x, y = data
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    some = pair[0].evaluate(dataset, steps=4, verbose=0)
    np.testing.assert_allclose(some, pair[1].evaluate(x[:40], y[:40], verbose=0), rtol=1e-5)


def test_evaluate_with_sample_weights(pair, data):
    weights = np.linspace(0, 2, len(data[0]))
    logs = [m.evaluate(*data, sample_weight=weights, verbose=0)[0] for m in pair]
    np.testing.assert_allclose(*logs, rtol=1e-5)


def test_predict_is_in_the_order_of_the_input(pair, data):
    model, local = pair
    x, y = data
    expected = local.predict(x, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(7)
    for args in ({"x": x, "batch_size": 7}, {"x": dataset}, {"x": lambda: dataset}):
        np.testing.assert_allclose(model.predict(**args, verbose=0), expected, atol=1e-6)
    first = model.predict(dataset, steps=3, verbose=0)
    np.testing.assert_allclose(first, expected[:21], atol=1e-6)


def test_predict_does_not_wait_for_the_destruction_of_its_iterator(pair, data):
    destroyed, may_be_destroyed = threading.Event(), threading.Event()
    x, _ = data

    def batches():
        try:
            while True:
                yield x[:10]
        finally:
            assert may_be_destroyed.wait(60)
            destroyed.set()

    spec = tf.TensorSpec([10, *x.shape[1:]], x.dtype)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    assert len(pair[0].predict(dataset, steps=3, verbose=0)) == 30
    gc.collect()
    assert not destroyed.is_set()
    may_be_destroyed.set()
    assert destroyed.wait(60)


def test_predict_keeps_the_structure(strategy):
    with strategy.scope():
        inputs = keras.Input((1,))
        model = het_tf.keras.Model(inputs, {"same": inputs, "square": inputs * inputs})
    x = np.arange(40, dtype=np.float32).reshape(-1, 1)
    outputs = model.predict(x, batch_size=3, verbose=0)
    np.testing.assert_array_equal(outputs["same"], x)
    np.testing.assert_array_equal(outputs["square"], x * x)


def test_predict_of_ragged_outputs_says_so(strategy):
    class Ragged(het_tf.keras.Model):
        def call(self, inputs):
            return inputs

        def predict_step(self, data):
            return tf.RaggedTensor.from_tensor(data)

    with strategy.scope():
        model = Ragged()
    with pytest.raises(ValueError, match="needs dense outputs"):
        model.predict(np.zeros([4, 2], np.float32), verbose=0)


def test_evaluate_needs_compile(strategy):
    with strategy.scope():
        model = sm.make_classifier(het_tf.keras.Model)
    with pytest.raises(ValueError, match=r"Call compile\(\)"):
        model.evaluate(np.zeros([4, sm.FEATURES]), np.zeros([4, 1]))


def test_weights_are_read_once_a_closure(pair, data, monkeypatch):
    """Not in each step: the loop over steps is a function that the closure's graph calls."""
    model, _ = pair
    closures = record_closures(monkeypatch)
    model.evaluate(*data, verbose=0)
    model.predict(data[0], verbose=0)
    assert len(closures) == 2
    for closure in closures:
        graph = graph_def(closure)
        outside = sum(node.op == "ReadVariableOp" for node in graph.node)
        within = sum(
            node.op == "ReadVariableOp" for f in graph.library.function for node in f.node_def
        )
        assert outside >= len(model.trainable_variables)
        assert within == 0


def test_strings_for_a_model_of_numbers_are_named(pair, data):
    words = np.full(np.shape(data[0]), "a")
    dataset = tf.data.Dataset.from_tensor_slices((words, data[1])).batch(10)
    for call in (
        lambda: pair[0].fit(words, data[1], verbose=0),
        lambda: pair[0].evaluate(dataset, verbose=0),
        lambda: pair[0].predict(words, verbose=0),
    ):
        with pytest.raises(ValueError, match=r"x holds strings, .* take none \('.*' of float32\)"):
            call()


def test_a_model_takes_strings_that_it_makes_ids_of(strategy):
    words = np.array([["a"], ["b"], ["a"], ["c"]])
    with strategy.scope():
        inputs = keras.Input((1,), dtype="string")
        ids = keras.layers.StringLookup(vocabulary=["a", "b"])(inputs)
        rows = het_tf.layers.HetEmbedding(2, embeddings_initializer="ones", optimizer="same")(ids)
        model = het_tf.keras.Model(inputs, keras.ops.sum(rows, (1, 2)))
        model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit(words, np.zeros(4), batch_size=4, verbose=0)
    # Each example adds 2 * 2 / 4 to the gradient of its row, of two columns of ones.
    np.testing.assert_allclose(model.predict(words, verbose=0), [-2, 0, -2, 0])
