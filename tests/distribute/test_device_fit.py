"""Workers with their rows on a device, on a cluster: the host takes the device's place."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
import het_tf.keras
from het_tf.layers import HetEmbedding

KEYS, BATCH, STEPS = 200, 32, 10


def dataset(context):
    rng = np.random.default_rng(context.input_pipeline_id)
    ids = rng.integers(0, KEYS, (BATCH * STEPS, 3))
    labels = (ids.sum(1, keepdims=True) % 2).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)


@pytest.mark.parametrize(
    ("lookahead", "staleness", "combiner", "on_host"),
    [
        pytest.param(0, 0, None, None, marks=pytest.mark.exhaustive),
        (3, 10, "mean", KEYS // 2),
    ],
)
def test_fit(rows_kind, strategy, lookahead, staleness, combiner, on_host):
    with strategy.scope():
        inputs = keras.Input((3,), dtype="int64")
        cache = het_tf.CacheConfig(
            on_host,
            device_capacity=KEYS // 2,
            staleness=staleness,
            lookahead=lookahead,
            device=rows_kind,
        )
        embedding = HetEmbedding(4, seed=1, cache=cache, combiner=combiner)
        hidden = keras.layers.Flatten()(embedding(inputs))
        model = het_tf.keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=5)
    assert embedding.worker_cache.on_device
    history = model.fit(dataset, epochs=2, verbose=0).history
    assert history["loss"][1] < history["loss"][0]
    stats = embedding.cache_stats()
    assert stats["pending"] == 0
    assert stats["hits"] > 0
    assert (stats["checks_spared"] > 0) == (staleness > 0)
    assert (stats["rows_from_host"] > 0) == (on_host is not None)
    assert stats["rows_from_host"] <= stats["rows_to_host"] <= stats["evictions"]
    made = 2 * 3 * STEPS
    assert made <= stats["lookups"] <= made + 3 * 2 * lookahead
    # Every update counts once, whether its row had a line or not.
    assert int(embedding.table.export().clocks.sum()) == stats["updates"]
    # The coordinator's reads are of the table.
    batch = np.arange(6).reshape(2, 3)
    embedded = embedding(batch, training=False)
    rows = np.asarray(embedding.table.lookup(batch))
    np.testing.assert_allclose(embedded, rows if combiner is None else rows.mean(1), rtol=1e-6)


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_without_a_gpu_on_a_worker(strategy):
    cuda = het_tf.ops.build()["cuda"]
    why = "built without CUDA" if cuda is None else "sees no GPU"
    with strategy.scope():
        embedding = HetEmbedding(4, cache=het_tf.CacheConfig(device_capacity=10))
        with pytest.raises(ValueError, match=f"device_capacity = 10: .*{why}"):
            embedding(np.array([1]))
        fallback = HetEmbedding(4, cache=het_tf.CacheConfig(10, device_capacity=10))
        fallback(np.array([1]))
    assert not fallback.worker_cache.on_device
