"""Servers that get other rows while workers hit rows that they need not ask for."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import het_tf

IDS, BATCH, STEPS = 8, 4, 60


def minus(y_true, y_pred):
    """A step adds 1 to each row."""
    return -keras.ops.sum(y_pred, -1)


ON_HOST = {"capacity": IDS}
ON_DEVICE = {"device_capacity": IDS, "device": "CPU"}


@pytest.mark.parametrize(
    ("lookahead", "num_layers", "where"),
    [
        (4, 2, ON_HOST),
        pytest.param(0, 1, ON_DEVICE, marks=pytest.mark.exhaustive),
        pytest.param(0, 1, ON_HOST, marks=pytest.mark.exhaustive),
        pytest.param(4, 2, ON_DEVICE, marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_reads_what_its_servers_have(strategy, lookahead, num_layers, where):
    """Rows grow, and are cleared behind the caches' backs; then a step reads them as they began."""
    if where is ON_DEVICE and het_tf.ops.build()["cuda"] is not None:
        pytest.skip("the ops are built with CUDA: the host takes no GPU's place")
    with strategy.scope():
        layers = [
            het_tf.layers.HetEmbedding(
                1,
                embeddings_initializer="ones",
                optimizer=het_tf.optimizers.SGD(1.0),
                cache=het_tf.CacheConfig(**where, staleness=1000, lookahead=lookahead),
            )
            for _ in range(num_layers)
        ]
        ids = keras.Input((IDS,), dtype="int64")
        rows = [layer(ids) for layer in layers]
        outputs = keras.layers.Flatten()(rows[0] if num_layers == 1 else keras.layers.Add()(rows))
        model = het_tf.keras.Model(ids, outputs)
        model.compile(keras.optimizers.SGD(1.0), minus, steps_per_execution=5)
    x = np.tile(np.arange(IDS), (STEPS * BATCH, 1))
    y = np.zeros((len(x), IDS))
    begun = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    assert model.fit(x, y, batch_size=BATCH, verbose=0).history["loss"][-1] != begun
    before = [layer.cache_stats() for layer in layers]
    for layer in layers:
        layer.learning_rate.assign(0.0)
        assert layer.table.lookup(np.arange(IDS)).min() > STEPS
        for shard in range(strategy.num_ps):
            het_tf.ops.table_clear(layer.table.handle(shard))
    assert model.fit(x, y, batch_size=BATCH, verbose=0).history["loss"] == [begun]
    for layer, stats in zip(layers, before, strict=True):
        assert layer.cache_stats()["checks_spared"] > stats["checks_spared"] > 0
