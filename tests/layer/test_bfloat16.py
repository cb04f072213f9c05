"""Rows and messages in bfloat16, each for itself."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf import optimizers

IDS = np.arange(64).reshape(32, 2)


def on_the_grid(values: np.ndarray) -> bool:
    return bool((values == values.astype(ml_dtypes.bfloat16).astype(np.float32)).all())


def fitted(layer: het_tf.layers.HetEmbedding, steps: int = 4) -> keras.Model:
    """A model of the layer after that many steps, which change all elements alike."""
    inputs = keras.Input((2,), dtype="int64")
    model = keras.Model(inputs, layer(inputs))
    # All gradients are -0.001, a fourth of what the neighbours of 1 are apart above it, and less.
    loss = lambda _, predicted: -0.001 * keras.ops.sum(predicted) * len(IDS)  # noqa: E731
    model.compile("sgd", loss=loss, auto_scale_loss=False)
    for _ in range(steps):
        model.train_on_batch(IDS, np.zeros(len(IDS)))
    return model


def ones(optimizer=None, **arguments) -> het_tf.layers.HetEmbedding:
    return het_tf.layers.HetEmbedding(
        16, optimizer=optimizer or optimizers.SGD(1.0), embeddings_initializer="ones", **arguments
    )


def test_rows_of_a_local_table(tmp_path):
    layers = {dtype: ones(row_dtype=dtype, seed=3) for dtype in ("float32", "bfloat16")}
    models = {dtype: fitted(layer, steps=20) for dtype, layer in layers.items()}
    rows = {dtype: layer.table.export().values for dtype, layer in layers.items()}
    change = rows["float32"].mean() - 1
    assert change > 0
    assert on_the_grid(rows["bfloat16"])
    assert not on_the_grid(rows["float32"])
    # Of 1024 values, each with a deviation of at most sqrt(20 * 2^-7 * step).
    deviation = np.sqrt(2.0**-7 * change / 1024)
    assert abs(rows["bfloat16"].mean() - 1 - change) < 6 * deviation
    layer = layers["bfloat16"]
    assert layer.get_config()["row_dtype"] == "bfloat16"
    models["bfloat16"].save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), layer(IDS))


def test_weights_of_ftrl():
    """They follow from slots, which follow from the rounded weights."""
    layers = {
        dtype: ones(optimizers.Ftrl(0.1, l1=1e-4), row_dtype=dtype, seed=3)
        for dtype in ("float32", "bfloat16")
    }
    for layer in layers.values():
        fitted(layer, steps=20)
    exact, rounded = (layer.table.export().values for layer in layers.values())
    assert on_the_grid(rounded)
    assert rounded.std() > 0
    deviation = rounded.std() / np.sqrt(rounded.size)
    assert exact.mean() > 100 * deviation
    assert abs(rounded.mean() - exact.mean()) < 6 * deviation


def test_checkpoints_have_the_rows(tmp_path):
    layer = ones(optimizers.Adagrad(1.0), row_dtype="bfloat16")
    saved = tf.train.Checkpoint(fitted(layer)).save(str(tmp_path / "rows"))
    for dtype in ("bfloat16", "float32"):
        other = ones(optimizers.Adagrad(1.0), row_dtype=dtype)
        tf.train.Checkpoint(fitted(other, steps=1)).restore(saved)
        rows, read = (each.table.export() for each in (layer, other))
        order, read_order = np.argsort(rows.keys), np.argsort(read.keys)
        for name in ("keys", "values", "slots", "clocks"):
            one, two = getattr(rows, name)[order], getattr(read, name)[read_order]
            np.testing.assert_array_equal(one, two, err_msg=name)


def test_memory_of_a_row():
    keys = np.arange(100_000)
    memory = []
    for dtype in ("float32", "bfloat16"):
        table = het_tf.EmbeddingTable(64, optimizers.RowWiseAdagrad(), row_dtype=dtype)
        table.assign(keys, np.ones((len(keys), 64), np.float32))
        memory.append(table.stats()["memory_bytes"] / len(keys))
    assert memory[1] < 0.65 * memory[0]


def test_first_values_are_rounded_to_the_nearest():
    values = np.random.default_rng(1).normal(size=(9, 3)).astype(np.float32)
    layer = het_tf.layers.HetEmbedding(9, 3, weights=values, row_dtype="bfloat16")
    layer.build()
    np.testing.assert_array_equal(
        layer.table.lookup(np.arange(9)), values.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_a_collection_hands_them_on():
    table = het_tf.layers.TableConfig("t", 10, 4)
    feature = het_tf.layers.FeatureConfig("f", table, (None, 2), (None, 4))
    layer = het_tf.layers.HetEmbeddingCollection(
        [feature], row_dtype="bfloat16", wire_dtype="bfloat16"
    )
    copy = het_tf.layers.HetEmbeddingCollection.from_config(layer.get_config())
    for each in (layer, copy):
        assert [x.row_dtype for x in each.layers] == ["bfloat16"]
        assert [x.wire_dtype for x in each.layers] == ["bfloat16"]


def test_other_dtypes_are_refused():
    for name in ("row_dtype", "wire_dtype"):
        with pytest.raises(ValueError, match=f'{name} must be "float32" or "bfloat16", not'):
            ones(**{name: "float16"})


@pytest.mark.parametrize(
    ("row_dtype", "wire_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_rows_on_a_device(rows_kind, row_dtype, wire_dtype):
    cache = het_tf.CacheConfig(device_capacity=1000, device=rows_kind)
    layer = ones(row_dtype=row_dtype, wire_dtype=wire_dtype, cache=cache)
    model = fitted(layer)
    layer.flush()
    for _ in range(4):
        for _ in range(4):
            model.train_on_batch(IDS, np.zeros(len(IDS)))
        layer.flush()
    rows = layer.table.export().values
    exact = 1 + 20 * 0.001 * len(IDS)
    assert on_the_grid(rows) == (row_dtype == "bfloat16")
    assert abs(rows.mean() - exact) < 0.05 * (exact - 1)
    if row_dtype == "bfloat16":  # a pushed row came back
        np.testing.assert_array_equal(layer(IDS), layer.table.lookup(IDS))
