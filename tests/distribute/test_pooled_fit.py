"""Pooled, ragged and sparse lookups on a cluster, looked ahead for."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
import het_tf.keras
from het_tf.layers import HetEmbedding

KEYS, BATCH, STEPS, DIM = 60, 16, 10, 4


def examples(worker, kind, seed=0):
    """A worker's share: ids of its own, weights, and the sum of the weighted ids' values."""
    rng = np.random.default_rng(seed)
    n = BATCH * STEPS
    lengths = rng.integers(0, 4, n)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(1, KEYS, splits[-1])
    weights = rng.choice([0.5, 1.0, 2.0], splits[-1]).astype(np.float32)
    values = np.concatenate([[0], np.cumsum((ids % 3 - 1) * weights)])
    labels = (values[splits[1:]] - values[splits[:-1]]).astype(np.float32)[:, np.newaxis]
    ids = ids + worker * KEYS
    given = tuple(
        tf.RaggedTensor.from_row_splits(x, splits) for x in (ids.astype(np.int64), weights)
    )
    if kind == "dense":
        given = tuple(x.to_tensor(shape=[n, 3]) for x in given)
    if kind == "sparse":
        given = tuple(x.to_sparse() for x in given)
    return tf.data.Dataset.from_tensor_slices((given, labels)).batch(BATCH)


def make_model(strategy, kind, combiner="sum", cache=True, lookahead=4):
    kinds = {"ragged": kind == "ragged", "sparse": kind == "sparse"}
    cache = het_tf.CacheConfig(KEYS // 2, lookahead=lookahead, staleness=5) if cache else None
    with strategy.scope():
        shape = (None,) if kind == "ragged" else (3,)
        ids = keras.Input(shape, dtype="int64", **kinds)
        weights = keras.Input(shape, **kinds)
        layer = HetEmbedding(
            DIM,
            combiner=combiner,
            mask_zero=kind == "dense",
            seed=1,
            optimizer=het_tf.optimizers.SGD(0.2),
            cache=het_tf.CacheConfig(KEYS // 2, lookahead=lookahead, staleness=5)
            if cache
            else None,
        )
        outputs = keras.layers.Dense(1, trainable=False, kernel_initializer="ones")(
            layer(ids, weights)
        )
        model = het_tf.keras.Model([ids, weights], outputs)
        model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=5)
    return model, layer


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("ragged", True),
        pytest.param("sparse", False, marks=pytest.mark.exhaustive),
        pytest.param("dense", True, marks=pytest.mark.exhaustive),
    ],
)
def test_fit_trains_as_one_process_does(strategy, kind, cache):
    model, layer = make_model(strategy, kind, cache=cache)
    history = model.fit(
        lambda context: examples(context.input_pipeline_id, kind), epochs=2, verbose=0
    ).history
    assert history["loss"][1] < history["loss"][0]
    if cache:
        assert model.lookahead_stats()["steps"] == 2 * 3 * STEPS
    # Every worker has ids of its own: each row is that of a plain loop over that worker's batches.
    rows = {}
    for worker in range(3):
        for _ in range(2):
            for (ids, weights), labels in examples(worker, "ragged"):
                train_by_hand(rows, layer, ids, weights, labels.numpy())
    keys = np.array(sorted(rows))
    assert layer.table.size() == len(keys)
    np.testing.assert_allclose(
        layer.table.lookup(keys), [rows[key] for key in keys], rtol=1e-4, atol=1e-5
    )


def train_by_hand(rows, layer, ids, weights, labels):
    """One step of SGD on the mean of squares, of bags pooled by their sum and then summed up."""
    ids, weights = ids.to_list(), weights.to_list()
    fresh = sorted({i for bag in ids for i in bag} - set(rows))
    if fresh:
        initial = initial_rows(layer, np.array(fresh))
        rows.update(zip(fresh, initial, strict=True))
    gradients = {i: np.zeros(DIM) for bag in ids for i in bag}
    for bag, w, label in zip(ids, weights, labels, strict=True):
        output = sum((w_i * rows[i].sum() for i, w_i in zip(bag, w, strict=True)), 0.0)
        for i, w_i in zip(bag, w, strict=True):
            gradients[i] += 2 * (output - label[0]) * w_i / len(ids)
    for i, gradient in gradients.items():
        rows[i] = rows[i] - 0.2 * gradient


def initial_rows(layer, keys):
    table = het_tf.EmbeddingTable(DIM, layer.optimizer, initializer="uniform", seed=1)
    return table.lookup(keys).astype(np.float64)


@pytest.mark.exhaustive
def test_a_dataset_that_is_sent_along_evaluate_and_predict(strategy):
    kind = "sparse"
    model, layer = make_model(strategy, kind, "mean")
    data = examples(0, kind)
    before = model.evaluate(data, verbose=0)
    model.fit(data, epochs=2, verbose=0)
    assert model.evaluate(data, verbose=0) < before
    outputs = model.predict(data.map(lambda x, y: (x,)).take(3), verbose=0)
    assert outputs.shape == (3 * BATCH, 1)
    assert layer.table.size() > 0


def test_weights_that_are_trained_get_their_gradient(strategy):
    with strategy.scope():
        ids = keras.Input((3,), dtype="int64")
        features = keras.Input((3,))
        weights = keras.layers.Dense(3, use_bias=False, kernel_initializer="identity")(features)
        layer = HetEmbedding(
            DIM,
            combiner="sum",
            seed=1,
            cache=het_tf.CacheConfig(KEYS),
            embeddings_initializer="ones",
        )
        outputs = keras.ops.sum(layer(ids, weights), -1, keepdims=True)
        model = het_tf.keras.Model([ids, features], outputs)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    (kernel,) = (v for v in model.trainable_variables if v.name == "kernel")
    before = kernel.numpy()
    x = np.ones((BATCH, 3), np.int64), np.eye(3, dtype=np.float32)[np.arange(BATCH) % 3]
    model.fit(x, np.zeros((BATCH, 1), np.float32), batch_size=BATCH, verbose=0)
    # The output is 4 times the sum of what Dense gives: its gradient has 16 times that.
    counts = np.bincount(np.arange(BATCH) % 3)
    change = 0.1 * 2 * 16 * counts / BATCH
    np.testing.assert_allclose(before - kernel.numpy(), np.stack([change] * 3, 1), rtol=1e-4)
