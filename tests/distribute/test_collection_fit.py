"""HetEmbeddingCollection under fit on a cluster: one lookup and one message for all features."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tracing import count_server_calls, record_closures

import het_tf
import het_tf.keras
from het_tf.layers import FeatureConfig, HetEmbeddingCollection, TableConfig

BATCH, STEPS, KEYS = 16, 10, 30


def configs(features):
    tables = [
        TableConfig(
            f"table{i}", KEYS, 4, optimizer=het_tf.optimizers.Adagrad(0.1), initializer="normal"
        )
        for i in range(max(1, features // 2))
    ]
    return {f"f{i}": FeatureConfig(f"f{i}", tables[i % len(tables)]) for i in range(features)}


def dataset(features, kind="dense"):
    def make(context):
        rng = np.random.default_rng(context.input_pipeline_id)
        n = BATCH * STEPS
        ids = {}
        for i in range(features):
            splits = np.concatenate([[0], np.cumsum(rng.integers(1, 4, n))])
            values = rng.integers(0, KEYS, splits[-1])
            ids[f"f{i}"] = tf.RaggedTensor.from_row_splits(values, splits)
            if kind == "sparse":
                ids[f"f{i}"] = ids[f"f{i}"].to_sparse()
        if kind == "dense":
            ids = {f"f{i}": rng.integers(0, KEYS, (n, 1)) for i in range(features)}
            labels = ids["f0"][:, 0] % 2
        else:
            labels = splits[1:] - splits[:-1]
        labels = labels.astype(np.float32)[:, np.newaxis]
        return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)

    return make


def make_model(strategy, features, kind="dense", staleness=5, concatenate=False):
    kinds = {"ragged": kind == "ragged", "sparse": kind == "sparse"}
    shape = {"dense": (1,), "ragged": (None,), "sparse": (3,)}[kind]
    with strategy.scope():
        cache = het_tf.CacheConfig(KEYS * features, staleness=staleness, lookahead=3)
        layer = HetEmbeddingCollection(
            configs(features), cache=cache, seed=1, concatenate=concatenate
        )
        inputs = keras.tree.map_structure(
            lambda feature: keras.Input(shape, dtype="int64", name=feature.name, **kinds),
            layer.feature_configs,
        )
        outputs = keras.tree.flatten(layer(inputs))
        joined = keras.layers.Concatenate()(outputs) if features > 1 else outputs[0]
        model = het_tf.keras.Model(inputs, keras.layers.Dense(1)(joined))
        model.compile(keras.optimizers.Adam(0.02), "mse", steps_per_execution=5)
    return model, layer


@pytest.mark.parametrize(
    ("kind", "concatenate"),
    [
        ("dense", True),
        pytest.param("sparse", False, marks=pytest.mark.exhaustive),
        pytest.param("ragged", False, marks=pytest.mark.exhaustive),
    ],
)
def test_features_are_looked_up_ahead_and_together(strategy, kind, concatenate):
    model, layer = make_model(strategy, 3, kind, concatenate=concatenate)
    losses = model.fit(dataset(3, kind), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    made = 3 * 3 * STEPS
    assert model.lookahead_stats()["steps"] == made
    (group,) = layer.layers
    stats = group.cache_stats()
    assert stats["lookups"] == made
    assert stats["pending"] == 0
    assert group.table.size() > KEYS / 2
    assert (
        model.evaluate(dataset(3, kind)(tf.distribute.InputContext(3, 0, 1)), verbose=0) < losses[0]
    )


@pytest.mark.exhaustive
def test_many_features_send_the_messages_of_one(strategy, monkeypatch):
    calls = []
    for features in (1, 7):
        model, layer = make_model(strategy, features, staleness=0)
        closures = record_closures(monkeypatch)
        inputs = {f"f{i}": np.full((32, 1), i % KEYS) for i in range(features)}
        model.fit(inputs, np.ones((32, 1)), batch_size=BATCH, verbose=0)
        (group,) = layer.layers
        assert group.cache_stats()["lookups"] == 2
        assert group.table.size() > 0
        calls += map(count_server_calls, closures)
    assert len(calls) == 2
    assert calls[0] == calls[1]
