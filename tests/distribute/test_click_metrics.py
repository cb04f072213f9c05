"""Normalized entropy and calibration, summed over workers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import het_tf
import het_tf.keras

NAMES = ["normalized_entropy", "calibration"]


def expected(label, chance, weight):
    mean = np.average(label, weights=weight)
    losses = [
        np.average(-(label * np.log(p) + (1 - label) * np.log(1 - p)), weights=weight)
        for p in (chance, mean)
    ]
    return [losses[0] / losses[1], (weight * chance).sum() / (weight * label).sum()]


def make_model():
    ids = keras.Input((2,), dtype="int64")
    rows = het_tf.layers.HetEmbedding(4, embeddings_initializer="normal", seed=1)(ids)
    chance = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(rows))
    model = het_tf.keras.Model(ids, chance)
    metrics = [het_tf.keras.metrics.NormalizedEntropy(), het_tf.keras.metrics.Calibration()]
    model.compile("sgd", "binary_crossentropy", weighted_metrics=metrics)
    return model


def test_metrics_of_workers_add_up(strategy, tmp_path):
    rng = np.random.default_rng(0)
    ids, label = rng.integers(0, 50, (700, 2)), rng.integers(0, 2, (700, 1))
    weight = rng.random(700)
    with strategy.scope():
        model = make_model()
    chance = model.predict(ids, verbose=0)
    found = model.evaluate(ids, label, sample_weight=weight, verbose=0, return_dict=True)
    right = expected(label[:, 0], chance[:, 0].astype(np.float64), weight)
    np.testing.assert_allclose([found[name] for name in NAMES], right, rtol=1e-4)
    history = model.fit(ids, label, verbose=0).history
    assert history["normalized_entropy"][0] > 0
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert set(NAMES) <= set(loaded.evaluate(ids, label, verbose=0, return_dict=True))


@pytest.mark.parametrize("weight", [0.5, [0.5, 2.0], [[0.5], [2.0]], [[0.5, 1.0], [2.0, 0.0]]])
def test_a_weight_counts_for_all_labels_of_its_example(weight):
    label, chance = np.array([[1, 0], [0, 1]]), np.array([[0.75, 0.5], [0.25, 0.5]])
    given = np.array(weight)
    each = np.broadcast_to(given[:, None] if given.ndim == 1 else given, (2, 2))
    right = expected(label.ravel(), chance.ravel(), each.ravel())
    for metric in het_tf.keras.metrics.NormalizedEntropy(), het_tf.keras.metrics.Calibration():
        metric.update_state(label, chance, weight)
        assert float(metric.result()) == pytest.approx(right[NAMES.index(metric.name)])


def test_a_model_without_examples_or_clicks_has_no_figures():
    for metric in het_tf.keras.metrics.NormalizedEntropy(), het_tf.keras.metrics.Calibration():
        assert float(metric.result()) == 0
        metric.update_state([0, 0], [0.25, 0.5])
        assert np.isfinite(float(metric.result()))
        metric.reset_state()
        metric.update_state([[1], [0]], [[0.75], [0.5]])
        value = expected(np.array([1, 0]), np.array([0.75, 0.5]), np.ones(2))
        assert float(metric.result()) == pytest.approx(value[NAMES.index(metric.name)])
