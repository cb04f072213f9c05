"""A cache costs no more bytes than none, where users stand: under `fit` on a cluster."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import het_tf

EXAMPLES, FIELDS, BATCH, KEYS = 2400, 13, 48, 5000


def bytes_of_fit(strategy, cache, optimizer) -> tuple[float, float]:
    """Bytes of requests and of replies in two epochs of ids of which few are frequent."""
    rng = np.random.default_rng(0)
    ids = np.exp(rng.random((EXAMPLES, FIELDS)) * np.log(KEYS)).astype(np.int64)
    ids += KEYS * np.arange(FIELDS)
    with strategy.scope():
        inputs = keras.Input((FIELDS,), dtype="int64")
        layer = het_tf.layers.HetEmbedding(16, optimizer=optimizer, cache=cache, seed=1)
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs)))
        model = het_tf.keras.Model(inputs, outputs)
        # Closures of so many steps that these overlap.
        model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=16)
    model.fit(ids, np.ones((EXAMPLES, 1), np.float32), batch_size=BATCH, epochs=2, verbose=0)
    stats = layer.cache_stats()
    assert stats["updates"] == stats["updates_pushed"] > 0
    return stats["bytes_up"], stats["bytes_down"]


@pytest.mark.parametrize(
    "optimizer", ["Adagrad", pytest.param("RowWiseAdagrad", marks=pytest.mark.exhaustive)]
)
def test_a_cache_costs_no_more_than_none(strategy, optimizer):
    def bytes_with(cache):
        return np.array(bytes_of_fit(strategy, cache, getattr(het_tf.optimizers, optimizer)(0.05)))

    none = bytes_with(None)
    # Steps are looked up ahead by default, and a later one's lookup takes along what is to be sent.
    up, down = bytes_with(het_tf.CacheConfig(2000)) / none
    assert max(up, down) < 1.03
    # Of replies docs/concepts.md promises less here: rows that two steps have at once need slots.
    up, _ = bytes_with(het_tf.CacheConfig(2000, staleness=0)) / none
    assert up < 1.03
