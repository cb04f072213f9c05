"""Tables whose rows are on a disk: the same rows as in memory, and errors that name the storage."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf

DIM = 16


@pytest.fixture
def storage(request):
    # Not tmp_path, which may be in memory.
    return het_tf.Storage(memory="256KiB", path=str(request.config.rootpath))


def make(storage, **kwargs):
    ids = keras.Input((8,), dtype="int64")
    layer = het_tf.layers.HetEmbedding(DIM, seed=1, storage=storage, name="rows", **kwargs)
    out = keras.layers.Dense(1, kernel_initializer="ones")(keras.layers.Flatten()(layer(ids)))
    model = het_tf.keras.Model(ids, out)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def batches():
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 10_000, (4096, 8))
    return tf.data.Dataset.from_tensor_slices((ids, rng.normal(size=(4096, 1)))).batch(256)


def rows_of(model):
    exported = model.get_layer("rows").table.export()
    order = np.argsort(exported.keys)
    return [exported.keys[order], exported.values[order], exported.slots[order]]


def check_equal(first, second):
    for one, other in zip(rows_of(first), rows_of(second), strict=True):
        np.testing.assert_array_equal(one, other)


def test_training_is_the_same_to_the_bit(storage, tmp_path):
    in_memory, on_disk = make(None), make(storage)
    for model in (in_memory, on_disk):
        model.fit(batches(), epochs=2, shuffle=False, verbose=0)
    check_equal(in_memory, on_disk)
    stats = on_disk.get_layer("rows").table.stats()
    assert stats["disk_bytes"] > 4 * 256 * 1024
    assert stats["pages_read"] > 100
    assert stats["rows"] == in_memory.get_layer("rows").table.stats()["rows"] > 9000
    # Index and keys are beside the rows: 16 bytes a row.
    assert stats["memory_bytes"] < 256 * 1024 + 40 * stats["rows"]
    # Saving, and going on.
    on_disk.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("rows").storage == storage
    check_equal(on_disk, loaded)
    for model in (in_memory, loaded):
        model.fit(batches(), shuffle=False, verbose=0)
    check_equal(in_memory, loaded)


def test_a_collection_has_the_storage_in_every_table(storage):
    tables = [
        het_tf.layers.TableConfig(name, 100, dim, optimizer="sgd")
        for name, dim in (("a", 2), ("b", 3))
    ]
    features = {
        t.name: het_tf.layers.FeatureConfig(t.name, t, (1, 1), (1, t.embedding_dim)) for t in tables
    }
    collection = het_tf.layers.HetEmbeddingCollection(features, storage=storage)
    copy = type(collection).from_config(collection.get_config())
    assert [layer.storage for layer in copy.layers] == [storage] * 2


def test_what_is_no_storage_is_named(tmp_path):
    with pytest.raises(ValueError, match="memory must be a positive number of bytes"):
        het_tf.Storage("some", "/tmp")
    with pytest.raises(ValueError, match="path must be an absolute path of a folder, not 'rows'"):
        het_tf.Storage("1GB", "rows")
    with pytest.raises(ValueError, match=r"storage must be a het_tf.Storage or None, not '/tmp'"):
        het_tf.layers.HetEmbedding(4, storage="/tmp")
    missing = het_tf.Storage("1GB", str(tmp_path / "missing"))
    layer = het_tf.layers.HetEmbedding(4, storage=missing, optimizer="sgd")
    with pytest.raises(tf.errors.InvalidArgumentError, match="missing' of a storage: no file"):
        layer.build()
    little = het_tf.Storage(4096, "/tmp")
    with pytest.raises(tf.errors.InvalidArgumentError, match="memory = 4096 of a storage must be"):
        het_tf.layers.HetEmbedding(4, storage=little, optimizer="sgd").build()
