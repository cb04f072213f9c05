"""Layers that are given no cache."""

from __future__ import annotations

import keras
import numpy as np

import het_tf
from het_tf.layers import HetEmbedding


def test_layers_of_a_cluster_have_a_cache(strategy):
    outside = HetEmbedding(4)
    outside.build((None, 3))
    assert outside.stored.cache is None
    ids = np.random.default_rng(0).zipf(1.3, (640, 3)) % 1000
    with strategy.scope():
        inputs = keras.Input((3,), dtype="int64")
        embedding = HetEmbedding(4, combiner="sum", optimizer="sgd")
        without = HetEmbedding(4, combiner="sum", optimizer="sgd", cache=None)
        hidden = keras.layers.Add()([embedding(inputs), without(inputs)])
        model = het_tf.keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile("sgd", "mse")
    assert embedding.stored.cache == het_tf.CacheConfig()
    assert without.stored.cache is None
    assert HetEmbedding.from_config(embedding.get_config()).cache == "auto"
    assert HetEmbedding.from_config(without.get_config()).cache is None
    history = model.fit(ids, ids[:, :1] % 2, batch_size=32, epochs=2, verbose=0).history
    assert embedding.cache_stats()["rows"] >= len(np.unique(ids)), "every id is in a cache"
    assert without.cache_stats()["hits"] == 0
    assert history["hit_rate"][0] < history["hit_rate"][1] <= 1
    assert all(rate > 0 for way in ("up", "down") for rate in history[f"MB_{way}_per_s"])
    assert all(0 <= share < 1 for share in history["waiting"])
    assert 1 <= model.lookahead_stats()["lookahead"] <= 8
