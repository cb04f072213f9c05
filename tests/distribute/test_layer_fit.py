"""What tests/layer shows of a layer in one process, on a cluster."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import het_tf
import het_tf.keras
from het_tf import CacheConfig, optimizers
from het_tf.layers import HetEmbedding


@pytest.mark.exhaustive
def test_rows_and_messages_in_bfloat16(strategy):
    ids = np.arange(64).reshape(32, 2)
    stats, rows = {}, {}
    for row_dtype, wire_dtype in [
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
    ]:
        with strategy.scope():
            layer = HetEmbedding(
                16,
                optimizer=optimizers.SGD(1.0),
                embeddings_initializer="ones",
                cache=CacheConfig(1000, staleness=2),
                row_dtype=row_dtype,
                wire_dtype=wire_dtype,
            )
            inputs = keras.Input((2,), dtype="int64")
            model = het_tf.keras.Model(inputs, layer(inputs))
            model.compile("sgd", loss=lambda _, outputs: -0.1 * keras.ops.sum(outputs))
        model.fit(ids, np.zeros(len(ids)), batch_size=4, epochs=6, verbose=0)
        of = row_dtype, wire_dtype
        rows[of], stats[of] = layer.table.export().values, layer.cache_stats()
        assert stats[of]["pending"] == 0
        rounded = rows[of].astype(ml_dtypes.bfloat16).astype(np.float32)
        assert (rounded == rows[of]).all() == (row_dtype == "bfloat16")
    exact = rows["float32", "float32"]
    for of, values in rows.items():
        assert values.shape == exact.shape
        assert abs(values.mean() - exact.mean()) < 0.005 * exact.mean(), of
    for way in ("bytes_up_push", "bytes_down"):
        short, long = (stats["bfloat16", wire][way] for wire in ("bfloat16", "float32"))
        # A row has 16 values, and 16 bytes beside them.
        assert 0.4 * long < short < 0.85 * long, way


@pytest.mark.parametrize(
    "order",
    [
        "eager map lookup predict",
        "map eager lookup predict",
        pytest.param("lookup map predict eager", marks=pytest.mark.exhaustive),
        pytest.param("predict map eager lookup", marks=pytest.mark.exhaustive),
    ],
)
def test_a_layer_may_be_used_in_a_dataset_and_otherwise_in_any_order(strategy, order):
    """Each has the functions that servers run in a library of its own."""
    x = np.arange(8).reshape(4, 2)
    with strategy.scope():
        inputs = keras.Input((2,), dtype="int64")
        layer = HetEmbedding(4, optimizer=optimizers.SGD(1.0))
        model = het_tf.keras.Model(inputs, layer(inputs))
        model.compile("sgd", "mse", steps_per_execution=1)
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(3)
    uses = {
        "eager": lambda: layer(tf.constant(x)).numpy(),
        "map": lambda: np.concatenate(list(dataset.map(layer).as_numpy_iterator())),
        "lookup": lambda: layer.table.lookup(x),
        "predict": lambda: model.predict(x, verbose=0),
    }
    first = {use: uses[use]() for use in order.split()}
    model.fit(x, np.ones((4, 2, 4), np.float32), batch_size=4, verbose=0)
    last = {use: uses[use]() for use in order.split()}
    for rows in (first, last):
        for use, found in rows.items():
            np.testing.assert_allclose(found, rows["lookup"], rtol=1e-6, err_msg=use)
    assert np.abs(last["lookup"] - first["lookup"]).min() > 0


class SumOfRows(keras.metrics.Metric):
    """The sum of some rows of a layer, which each step looks up."""

    def __init__(self, layer: HetEmbedding):
        super().__init__(name="sum_of_rows")
        self.layer = [layer]  # no layer of the metric's
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(self.layer[0](tf.constant([1, 2]))))

    def result(self):
        return self.total


def test_a_layer_may_be_used_by_a_loaded_model_a_metric_and_data_of_steps(strategy, tmp_path):
    """Each builds functions with lookups of its own; the servers know functions by name."""
    x, ones = np.arange(8).reshape(4, 2), np.ones((4, 2, 4), np.float32)
    with strategy.scope():
        inputs = keras.Input((2,), dtype="int64")
        layer, other = (HetEmbedding(4, optimizer=optimizers.SGD(1.0)) for _ in range(2))
        model = het_tf.keras.Model(inputs, layer(inputs))
        measured = het_tf.keras.Model(inputs, other(inputs))
        measured.compile("sgd", "mse", metrics=[SumOfRows(layer)])
        rows = keras.Input((2, 4))
        of_rows = het_tf.keras.Model(rows, keras.layers.Dense(4)(rows))
        of_rows.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((x, ones)).batch(2)
    of_rows.fit(data.map(lambda x, y: (layer(x), y)), verbose=0)
    measured.fit(data, verbose=0)
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    found = {
        "eager": loaded.layers[1](tf.constant(x)).numpy(),
        "map": np.concatenate(list(data.map(lambda x, y: loaded.layers[1](x)))),
        "predict": loaded.predict(x, verbose=0),
        "data": np.concatenate(list(data.map(lambda x, y: layer(x)))),
    }
    for use, each in found.items():
        np.testing.assert_allclose(each, layer.table.lookup(x), rtol=1e-6, err_msg=use)
    assert measured.evaluate(data, verbose=0, return_dict=True)["sum_of_rows"] == pytest.approx(
        2 * layer.table.lookup([1, 2]).sum(), rel=1e-5
    )


def of_ids() -> HetEmbedding:
    return HetEmbedding(
        1,
        optimizer=optimizers.SGD(1.0),
        embeddings_initializer="zeros",
        cache=CacheConfig(10, staleness=0),
    )


def summing(model: keras.Model) -> keras.Model:
    model.compile("sgd", loss=lambda _, predicted: -keras.ops.sum(predicted))
    return model


def test_large_ids_without_an_input(strategy):
    ids = np.array([[2**24, 2**24 + 1], [2**53 + 1, -(2**62) - 1], [2**31, 5]])
    with strategy.scope():
        layer = of_ids()
        model = summing(het_tf.keras.Sequential([layer]))
    model.fit(ids, np.zeros(len(ids)), verbose=0)
    assert sorted(layer.table.export().keys) == sorted(ids.ravel())
    layer.table.clear()
    examples = lambda: tf.data.Dataset.from_tensors((ids, np.zeros(len(ids))))  # noqa: E731
    model.fit(examples, epochs=1, verbose=0)
    assert sorted(layer.table.export().keys) == sorted(ids.ravel())


def test_ids_that_are_cast_are_checked_as_they_were_fed(strategy):
    with strategy.scope():
        layer = of_ids()
        inputs = keras.Input((2,), dtype="int32")
        model = summing(het_tf.keras.Model(inputs, layer(inputs)))
    message = "were cast to int32, which does not hold 2147483653"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        model.fit(np.array([[1, 2**31 + 5]]), np.zeros(1), verbose=0)
    assert layer.table.size() == 0


def test_bound_weights_regularizer_and_constraint(strategy):
    rows, dim = 300, 8
    start = np.random.default_rng(1).normal(size=(rows, dim)).astype(np.float32)
    with strategy.scope():
        layer = HetEmbedding(
            rows,
            dim,
            weights=start,
            embeddings_regularizer=keras.regularizers.L2(0.5),
            embeddings_constraint="non_neg",
            optimizer=optimizers.SGD(0.1),
            cache=CacheConfig(100, staleness=0),
        )
        inputs = keras.Input((3,), dtype="int64")
        model = het_tf.keras.Model(inputs, 0.0 * layer(inputs))
        model.compile("sgd", "mse")
    np.testing.assert_array_equal(layer.table.lookup(np.arange(rows)), start)
    ids = np.array([[1, 2, 1], [5, 5, 5]])
    history = model.fit(ids, np.zeros((2, 3, dim)), batch_size=2, epochs=1, verbose=0).history
    np.testing.assert_allclose(history["loss"], 0.5 * (start[[1, 2, 5]] ** 2).sum(), rtol=1e-5)
    wanted = np.maximum(start[[1, 2, 5]] * (1 - 0.1 * 2 * 0.5), 0)
    np.testing.assert_allclose(layer.table.lookup(np.array([1, 2, 5])), wanted, rtol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"input_dim = 300\), not 300"):
        model.fit(np.array([[1, 2, 300]]), np.zeros((1, 3, dim)), verbose=0)
