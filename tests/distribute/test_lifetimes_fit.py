"""Rows that come and go under fit: two parameter servers, three workers with a cache each."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
import het_tf.keras

IDS, STEPS = 40, 12


def dataset_fn():
    """Each batch has every id once."""
    ids = np.arange(IDS)[:, np.newaxis]
    return tf.data.Dataset.from_tensors((ids, np.zeros((IDS, 1), np.float32))).repeat()


class Days(keras.callbacks.Callback):
    """An epoch is a day. What workers hold back is sent before it ends."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.expired = []

    def on_epoch_begin(self, epoch, logs=None):
        self.embedding.flush()
        self.expired.append(self.embedding.table.expire(epoch))


def test_rows_that_went_are_new_rows_to_all_workers(strategy):
    with strategy.scope():
        embedding = het_tf.layers.HetEmbedding(
            1,
            embeddings_initializer="zeros",
            optimizer=het_tf.optimizers.SGD(1.0),
            cache=het_tf.CacheConfig(IDS, staleness=100, lookahead=2),
            expiry=het_tf.Expiry(age=1, time="given"),
            key_ranges=[het_tf.KeyRange(0, 9)],
        )
        ids = keras.Input((1,), dtype="int64")
        model = het_tf.keras.Model(ids, keras.layers.Flatten()(embedding(ids)))
        # Each step takes one from each row.
        model.compile("sgd", lambda y, p: keras.ops.sum(p, axis=-1) * IDS, steps_per_execution=2)
    days, everything = Days(embedding), np.arange(IDS)[:, np.newaxis]
    model.fit(dataset_fn, epochs=3, steps_per_epoch=STEPS, callbacks=[days], verbose=0)
    embedding.flush()
    table = embedding.table
    # Rows with a rule have the last day's updates, all of them and no others; the rest have all.
    values = table.lookup(everything[:, 0])[:, 0]
    np.testing.assert_array_equal(values[:10], -3 * STEPS)
    np.testing.assert_array_equal(values[10:], -STEPS)
    assert days.expired == [0, IDS - 10, IDS - 10]
    np.testing.assert_array_equal(model.predict(everything, verbose=0)[:, 0], values)
    # Every worker hears of it with its next lookup, whatever the staleness.
    assert table.expire(50) == IDS - 10
    after = model.predict(everything, verbose=0)[:, 0]
    np.testing.assert_array_equal(after[:10], -3 * STEPS)
    np.testing.assert_array_equal(after[10:], 0)
    assert table.stats()["rows_created"] == 10 + 3 * (IDS - 10)


def test_a_cache_that_never_asks_is_warned_of(strategy):
    def build(cache, **arguments):
        with strategy.scope():
            layer = het_tf.layers.HetEmbedding(
                2, optimizer="sgd", cache=cache, name="users", **arguments
            )
            layer.build()

    unbounded = het_tf.CacheConfig(10, staleness=None)
    expiry = het_tf.Expiry(age=10)
    with pytest.warns(UserWarning, match=r"layer users: rows expire, .* no read bound"):
        build(unbounded, expiry=expiry)
    with pytest.warns(UserWarning, match=r"no read bound"):
        build(unbounded, key_ranges=[het_tf.KeyRange(0, 9, expiry=expiry)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(unbounded)
        build(None, expiry=expiry)
        build(het_tf.CacheConfig(10), expiry=expiry)
        build(het_tf.CacheConfig(10, read_bound=100, write_bound=None), expiry=expiry)
