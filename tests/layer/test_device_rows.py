"""HetEmbedding with its rows on a device: a local table, and what is refused."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf import optimizers

IDS = np.random.default_rng(0).integers(-25, 25, (512, 3))
LABELS = (IDS.sum(axis=1) > 0).astype(np.float32)


def fitted(cache: het_tf.CacheConfig | None, optimizer: optimizers.Optimizer, compiled="sgd"):
    keras.utils.set_random_seed(1)
    layer = het_tf.layers.HetEmbedding(4, seed=2, optimizer=optimizer, cache=cache)
    inputs = keras.Input((3,), dtype="int64")
    summed = keras.ops.sum(layer(inputs), axis=1)
    model = het_tf.keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(summed))
    model.compile(compiled, "binary_crossentropy")
    history = model.fit(IDS, LABELS, batch_size=32, epochs=3, shuffle=False, verbose=0).history
    return model, layer, history["loss"]


@pytest.mark.parametrize(
    ("rows", "optimizer"), [(1000, optimizers.SGD(0.5)), (8, optimizers.RowWiseAdagrad(0.1))]
)
def test_trains_what_a_table_in_the_process_trains(rows_kind, rows, optimizer):
    _, plain, losses = fitted(None, optimizer)
    cache = het_tf.CacheConfig(device_capacity=rows, device=rows_kind)
    model, layer, on_device = fitted(cache, optimizer)
    np.testing.assert_allclose(on_device, losses, rtol=1e-4)
    stats = layer.cache_stats()
    assert stats["updates"] > 500
    assert (stats["evictions"] > 0) == (rows < 50)
    layer.flush()
    assert layer.cache_stats()["pending"] == 0
    wanted, got = plain.table.export(), layer.table.export()
    order = np.argsort(wanted.keys), np.argsort(got.keys)
    np.testing.assert_array_equal(got.keys[order[1]], wanted.keys[order[0]])
    np.testing.assert_array_equal(got.clocks[order[1]], wanted.clocks[order[0]])
    np.testing.assert_allclose(got.values[order[1]], wanted.values[order[0]], rtol=1e-3, atol=1e-5)
    # Read again after rows were put back.
    predicted = model.predict(IDS[:8], verbose=0)
    layer.table.clear()
    assert not np.allclose(model.predict(IDS[:8], verbose=0), predicted)


def test_saved_rows_have_what_was_on_the_device(rows_kind, tmp_path):
    cache = het_tf.CacheConfig(device_capacity=100, device=rows_kind)
    model, layer, _ = fitted(cache, optimizers.SGD(0.5))
    wanted = model.predict(IDS[:8], verbose=0)
    model.save_weights(tmp_path / "m.weights.h5")
    other, _, _ = fitted(cache, optimizers.SGD(0.1))
    other.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_allclose(other.predict(IDS[:8], verbose=0), wanted, rtol=1e-5)
    restored = keras.saving.deserialize_keras_object(
        json.loads(json.dumps(keras.saving.serialize_keras_object(layer)))
    )
    assert restored.cache == cache


def test_without_a_gpu_it_is_an_error_that_says_so():
    if tf.config.list_logical_devices("GPU"):
        pytest.skip("there is a GPU")
    layer = het_tf.layers.HetEmbedding(4, cache=het_tf.CacheConfig(device_capacity="auto"))
    why = "built without CUDA" if het_tf.ops.build()["cuda"] is None else "sees no GPU"
    with pytest.raises(ValueError, match=f"device_capacity = 'auto': .*{why}.*With a capacity"):
        layer(np.array([1]))


def test_without_a_gpu_and_with_a_capacity_rows_are_on_the_host():
    if tf.config.list_logical_devices("GPU"):
        pytest.skip("there is a GPU")
    cache = het_tf.CacheConfig(10, device_capacity=100)
    layer = het_tf.layers.HetEmbedding(4, cache=cache)
    layer(np.array([1]))
    assert not layer.worker_cache.on_device
    assert layer.cache_stats() == {}


@pytest.mark.exhaustive
def test_gradients_of_several_steps(rows_kind):
    seen = []
    for cache in (None, het_tf.CacheConfig(device_capacity=100, device=rows_kind)):
        compiled = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
        _, layer, losses = fitted(cache, optimizers.SGD(0.5), compiled)
        layer.flush()
        rows = layer.table.export()
        seen.append((losses, rows.values[np.argsort(rows.keys)]))
    for host, on_device in zip(*seen, strict=True):
        np.testing.assert_allclose(on_device, host, rtol=1e-3, atol=1e-5)


def test_configs_that_cannot_be(subtests):
    for arguments, message in [
        (
            {"device_capacity": 0},
            'device_capacity must be an integer from 1 to 1073741824 or "auto", not 0',
        ),
        ({"device_capacity": "all"}, "device_capacity .* not 'all'"),
        ({"device_capacity": 9, "device": "TPU"}, 'device must be "GPU" or "CPU", not \'TPU\''),
        ({"device_capacity": 9, "capacity": 0}, "capacity .* not 0"),
    ]:
        with subtests.test(message), pytest.raises(ValueError, match=message):
            het_tf.CacheConfig(**arguments)


def test_rows_pooled_on_the_device(rows_kind, subtests):
    for combiner in ("mean", "max"):
        with subtests.test(combiner):
            check_pooled(rows_kind, combiner)


def check_pooled(rows_kind, combiner):
    ids = tf.ragged.constant([[1, 2, 3], [], [3, 7, 5, 3], [1]], dtype=tf.int64)
    factors = tf.constant(np.random.default_rng(1).normal(size=(4, 5)), tf.float32)
    seen = []
    for cache in (None, het_tf.CacheConfig(device_capacity=2, device=rows_kind)):
        layer = het_tf.layers.HetEmbedding(
            5, seed=2, optimizer=optimizers.Adagrad(0.5), cache=cache, combiner=combiner
        )
        layer.build()

        @tf.function
        def step(layer=layer):
            with tf.GradientTape() as tape:
                pooled = layer(ids)
                loss = tf.reduce_sum(pooled * factors)
            train_rows(tape, loss, layer)
            return pooled

        if cache is not None:
            ops_there = {op.type for op in step.get_concrete_function().graph.get_operations()}
            assert {"Het>CachePool", "Het>CacheUpdatePooled"} <= ops_there
            assert "Het>CacheGather" not in ops_there
        pooled = [step().numpy() for _ in range(3)]
        layer.flush()
        rows = layer.table.export()
        order = np.argsort(rows.keys)
        seen.append((*pooled, rows.values[order], rows.clocks[order]))
    for host, on_device in zip(*seen, strict=True):
        np.testing.assert_allclose(on_device, host, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "compiled", [{"gradient_accumulation_steps": 4}, {"global_clipnorm": 0.01}], ids=str
)
def test_pooled_rows_that_wait_for_the_optimizer(rows_kind, compiled):
    seen = []
    for cache in (None, het_tf.CacheConfig(device_capacity=100, device=rows_kind)):
        keras.utils.set_random_seed(1)
        layer = het_tf.layers.HetEmbedding(
            4, seed=2, optimizer=optimizers.SGD(0.5), cache=cache, combiner="mean"
        )
        inputs = keras.Input((3,), dtype="int64")
        outputs = keras.layers.Dense(1, activation="sigmoid")(layer(inputs))
        model = het_tf.keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1, **compiled), "binary_crossentropy")
        losses = model.fit(IDS, LABELS, 32, epochs=2, shuffle=False, verbose=0).history["loss"]
        layer.flush()
        rows = layer.table.export()
        seen.append((losses, rows.values[np.argsort(rows.keys)]))
    for host, on_device in zip(*seen, strict=True):
        np.testing.assert_allclose(on_device, host, rtol=1e-3, atol=1e-5)


def test_rows_pooled_with_weights(rows_kind, subtests):
    for combiner in ("sum", "sqrtn", "max"):
        with subtests.test(combiner):
            check_pooled_with_weights(rows_kind, combiner)


def check_pooled_with_weights(rows_kind, combiner):
    ids = tf.constant([[1, 2, 3], [3, 7, 5]])
    given = np.random.default_rng(1).uniform(0.5, 2.0, (2, 3)).astype(np.float32)
    seen = []
    for cache in (None, het_tf.CacheConfig(device_capacity=100, device=rows_kind)):
        layer = het_tf.layers.HetEmbedding(
            4, seed=2, optimizer=optimizers.SGD(0.5), cache=cache, combiner=combiner
        )
        weights = tf.Variable(given)
        for _ in range(2):
            with tf.GradientTape() as tape:
                pooled = layer(ids, weights=weights)
                loss = tf.reduce_sum(pooled**2)
            *of_rows, of_weights = tape.gradient(loss, [*layer.trainable_variables, weights])
            layer.anchor.assign(*of_rows)
        layer.flush()
        rows = layer.table.export()
        order = np.argsort(rows.keys)
        seen.append((pooled.numpy(), of_weights.numpy(), rows.values[order], rows.clocks[order]))
    for host, on_device in zip(*seen, strict=True):
        np.testing.assert_allclose(on_device, host, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_is_an_error_that_names_the_layer(rows_kind):
    cache = het_tf.CacheConfig(device_capacity=100, device=rows_kind)
    layer = het_tf.layers.HetEmbedding(2, name="users", optimizer=optimizers.SGD(1.0), cache=cache)
    ids = tf.constant([5, 6, 6])

    def train(gradients):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) * tf.constant(gradients))
        train_rows(tape, loss, layer)

    bad = "users: gradients, or their squares, hold NaN or infinity for 1 of 2 keys; no row was"
    for one, other in [(np.nan, 1.0), (-np.inf, 1.0), (1e20, 1.0), (3e38, 3e38)]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=bad):
            train([[1.0, 1.0], [1.0, one], [1.0, other]])
    layer.learning_rate.assign(np.inf)
    with pytest.raises(tf.errors.InvalidArgumentError, match="users: learning_rate = inf"):
        train(np.ones((3, 2), np.float32))
    layer.flush()
    assert layer.table.size() == 0
    layer.learning_rate.assign(1.0)
    train(np.ones((3, 2), np.float32))
    layer.flush()
    assert layer.table.export().clocks.tolist() == [1, 1]
