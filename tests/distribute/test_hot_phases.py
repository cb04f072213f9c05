"""Hot phases: a worker trains cached rows without messages, and nothing is lost."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf

BATCH = 4


def model_of(optimizer, rows, **cache):
    ids = keras.Input((2,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(
        2,
        embeddings_initializer="zeros",
        optimizer=rows,
        cache=het_tf.CacheConfig(**cache),
        name="rows",
    )
    model = het_tf.keras.Model(ids, embedding(ids))
    # The gradient of a row is the number of its ids in the batch.
    model.compile(optimizer, lambda y, rows: keras.ops.sum(rows), steps_per_execution=5)
    return model


def share_of(x, hot, phase_batches):
    def share(context):
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(BATCH)
        mine = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        if hot is None:
            return mine
        return het_tf.data.hot_batches(
            mine, lambda x, y: x, hot, batch_size=BATCH, phase_batches=phase_batches
        )

    return share


def trained(strategy, x, hot, phase_batches, epochs=1, optimizer=keras.optimizers.SGD, **cache):
    with strategy.scope():
        model = model_of(optimizer(1.0), "same", **cache)
    model.fit(share_of(x, hot, phase_batches), epochs=epochs, verbose=0)
    return model


def fit(strategy, *args, **kwargs):
    return trained(strategy, *args, **kwargs).get_layer("rows")


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("staleness", [0, 4])
def test_every_example_counts_once(strategy, staleness, lookahead):
    rng = np.random.default_rng(1)
    x = rng.zipf(1.3, (BATCH * strategy.num_workers * 40, 2)) % 1000
    hot = het_tf.data.hot_rows(
        tf.data.Dataset.from_tensor_slices(x).batch(BATCH), lambda x: x, budget=20, sample=1
    )
    assert 0.2 < hot.examples < 0.8
    rows = fit(strategy, x, hot, 7, epochs=2, staleness=staleness, lookahead=lookahead)
    keys, counts = np.unique(x, return_counts=True)
    found = rows.table.lookup(keys)
    np.testing.assert_array_equal(found, np.repeat(-2.0 * counts[:, np.newaxis], 2, 1))
    assert rows.cache_stats()["pending"] == 0


def test_a_hot_phase_sends_two_messages_to_each_server(strategy):
    """One fetches the rows of the phase, the other pushes their updates, with the next fetch."""
    steps, workers, servers = 10, strategy.num_workers, 2
    rng = np.random.default_rng(1)
    x = rng.integers(0, 40, (BATCH * workers * 3 * steps, 2))
    hot = het_tf.data.HotRows((np.arange(40),), 1.0, 1.0)
    for optimizer in (keras.optimizers.Adam, keras.optimizers.SGD):
        rows = fit(strategy, x, hot, steps, optimizer=optimizer, staleness=0)
        stats = rows.cache_stats()
        assert stats["messages"] <= workers * servers * (3 * 2 + 1)
        assert stats["rows_pushed"] > workers * 2 * 40  # all rows at the end of every phase
    without = fit(strategy, x, None, steps, staleness=0)
    assert without.cache_stats()["messages"] >= workers * servers * 3 * steps
    np.testing.assert_array_equal(
        rows.table.lookup(np.arange(40)), without.table.lookup(np.arange(40))
    )


def test_synchronous_steps_have_no_hot_phases(strategy):
    strategy.synchronous = True
    try:
        with pytest.raises(ValueError, match="hot_batches needs a strategy without synchronous"):
            fit(strategy, np.zeros((8, 2), np.int64), het_tf.data.HotRows((), 0.0, 0.0), 2)
    finally:
        strategy.synchronous = False


def test_rows_on_a_device_have_no_hot_phases(strategy):
    hot = het_tf.data.HotRows((np.arange(2),), 0.0, 0.0)
    on_device = {"capacity": None, "device_capacity": 100, "device": "CPU"}
    with pytest.raises(ValueError, match="layer 'rows' in the memory of the host"):
        fit(strategy, np.zeros((32, 2), np.int64), hot, 2, **on_device)


@pytest.mark.parametrize("is_hot", [True, False])
def test_a_hot_phase_begins_with_the_updates_of_all_workers(strategy, is_hot):
    """Without it, a worker reads what it has, within the bounds."""
    x = np.repeat([[1, 2]], BATCH * strategy.num_workers, 0)
    hot = het_tf.data.HotRows((np.arange(1, 3),), 1.0, 1.0) if is_hot else None
    model = trained(strategy, x, hot, 1, staleness=1000)
    model.optimizer.learning_rate = 0.0
    again = model.fit(share_of(x, hot, 1), verbose=0)
    values = model.get_layer("rows").table.lookup(np.array([1, 2]))
    assert (again.history["loss"][0] == values.sum() * BATCH) == is_hot
