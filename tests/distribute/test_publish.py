"""Publishing from parameter servers while workers train."""

import keras
import numpy as np
import tensorflow as tf
from small_models import id_dataset

import het_tf


def test_fit_publishes_what_the_workers_made(strategy, tmp_path):
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        embedding = het_tf.layers.HetEmbedding(
            4,
            optimizer=het_tf.optimizers.SGD(0.1),
            cache=het_tf.CacheConfig(capacity=1000, staleness=50),
            seed=3,
        )
        hidden = keras.layers.Flatten()(embedding(ids))
        model = het_tf.keras.Model(ids, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    numbers = np.arange(512) % 97
    dataset = id_dataset(numbers, 8).repeat()
    with het_tf.serving.publish(model, tmp_path / "model", every=0.001) as publisher:
        served = tf.saved_model.load(str(tmp_path / "model"))
        model.fit(dataset, epochs=1, steps_per_epoch=30, callbacks=[publisher], verbose=0)
        in_fit = publisher.version
    assert in_fit >= 1
    late = tf.saved_model.load(str(tmp_path / "model"))
    query = np.arange(200)[:, np.newaxis]
    expected = model.predict(query, verbose=0)
    for each in (served, late):
        while int(each.freshness()["version"]) < publisher.version:
            assert each.freshness()["trouble"].numpy() == b""
        np.testing.assert_allclose(each.serve(query), expected, rtol=0, atol=1e-6)
    assert embedding.table.size() == 97
