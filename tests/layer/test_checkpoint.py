"""Tables in tf.train.Checkpoint."""

import keras
import numpy as np
import tensorflow as tf

import het_tf

IDS = np.arange(300).reshape(100, 3)
TARGETS = np.ones(100)


def trained_model() -> tuple[keras.Model, het_tf.layers.HetEmbedding]:
    embedding = het_tf.layers.HetEmbedding(4, optimizer=het_tf.optimizers.Adam(0.01), seed=1)
    ids = keras.Input((3,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(embedding(ids))))
    model.compile("sgd", "mse")
    model.fit(IDS, TARGETS, verbose=0)
    return model, embedding


def test_restore_brings_back_values_slots_and_clocks(tmp_path):
    model, embedding = trained_model()
    rows = embedding.table.export()
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    expected = model.predict(IDS, verbose=0)
    model.fit(IDS, TARGETS, verbose=0)
    assert not np.allclose(model.predict(IDS, verbose=0), expected)

    tf.train.Checkpoint(model=model).restore(path).assert_existing_objects_matched()

    np.testing.assert_array_equal(model.predict(IDS, verbose=0), expected)
    restored = embedding.table.export()
    order, restored_order = np.argsort(rows.keys), np.argsort(restored.keys)
    for name in ("keys", "values", "slots", "clocks"):
        before, after = getattr(rows, name), getattr(restored, name)
        np.testing.assert_array_equal(before[order], after[restored_order])


def test_restore_drops_rows_that_the_checkpoint_does_not_have(tmp_path):
    model, embedding = trained_model()
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    model.fit(IDS + 1000, TARGETS, verbose=0)
    assert embedding.table.size() == 600
    tf.train.Checkpoint(model=model).restore(path).expect_partial()
    assert embedding.table.size() == 300
