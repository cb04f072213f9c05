"""HetEmbedding on a real cluster."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf

KEYS = 60
EXAMPLES = 600
BATCH = 20
WIDTH = 3


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Ids spread over all of int64, and a target that depends on each of them."""
    rng = np.random.default_rng(3)
    small = rng.integers(0, KEYS, (EXAMPLES, WIDTH))
    ids = (small * (2**57 + 12345) - 2**62).astype(np.int64)
    target = rng.normal(size=KEYS)[small].sum(1) > 0
    return ids, target.astype(np.float32)


def make_model(strategy, cache, optimizer=None):
    with strategy.scope():
        embedding = het_tf.layers.HetEmbedding(
            8, optimizer=optimizer or het_tf.optimizers.RowWiseAdagrad(0.5), seed=1, cache=cache
        )
        ids = keras.Input((WIDTH,), dtype="int64")
        hidden = keras.layers.Flatten()(embedding(ids))
        model = het_tf.keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(hidden))
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", steps_per_execution=3)
    return model, embedding


CACHES = {
    "no cache": None,
    "staleness 10": het_tf.CacheConfig(1000, staleness=10),
    "tiny": het_tf.CacheConfig(7, staleness=100, policy="lru"),
    "unbounded": het_tf.CacheConfig(1000, staleness=None),
    "lamport": het_tf.CacheConfig(1000, staleness=5, clock="lamport"),
}


@pytest.mark.parametrize(
    "name",
    [
        "tiny",
        pytest.param("lamport", marks=pytest.mark.exhaustive),
        pytest.param("no cache", marks=pytest.mark.exhaustive),
    ],
)
def test_fit_trains_the_table(strategy, name):
    ids, target = examples()
    model, embedding = make_model(strategy, CACHES[name])
    losses = model.fit(ids, target, batch_size=BATCH, epochs=4, verbose=0).history["loss"]

    assert losses[-1] < losses[0] - 0.05
    assert embedding.table.size() == KEYS
    rows = embedding.table.export()
    assert np.any(rows.values != initial_values(embedding, rows.keys))
    stats = embedding.cache_stats()
    assert stats["pending"] == 0
    assert stats["updates"] == stats["updates_pushed"]
    if name != "lamport":
        assert rows.clocks.sum() == stats["updates"]


def initial_values(embedding, keys):
    untouched = het_tf.EmbeddingTable(8, het_tf.optimizers.SGD(), seed=embedding.seed)
    return untouched.lookup(keys)


def test_integer_steps_of_all_workers_add_up(strategy):
    """Nothing lost, nothing doubled: the rows are exactly the sum of what the workers did."""
    with strategy.scope():
        embedding = het_tf.layers.HetEmbedding(
            2,
            optimizer=het_tf.optimizers.SGD(1.0),
            embeddings_initializer="zeros",
            cache=het_tf.CacheConfig(5, staleness=3),
        )
        embedding.build()

    @tf.function
    def steps(ids):
        for _ in tf.range(4):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(embedding(ids) * tf.constant([1.0, -2.0]))
            train_rows(tape, total, embedding)

    batches = np.random.default_rng(5).integers(0, 12, (30, 6))
    for batch in batches:
        strategy.coordinator.schedule(steps, (tf.constant(batch),))
    strategy.flush()

    expected = {key: -4 * np.sum(batches == key) for key in range(12)}
    values = embedding.table.lookup(list(expected))
    np.testing.assert_array_equal(values[:, 0], list(expected.values()))
    np.testing.assert_array_equal(values[:, 1], -2 * values[:, 0])
    rows = embedding.table.export()
    updates = {key: 4 * sum(key in batch for batch in batches) for key in range(12)}
    assert dict(zip(rows.keys.tolist(), rows.clocks.tolist(), strict=True)) == {
        key: count for key, count in updates.items() if count
    }


@pytest.fixture(scope="module")
def unbounded(strategy):
    """A model and its layer, whose workers send updates in flushes only."""
    return make_model(strategy, CACHES["unbounded"])


def test_evaluate_reads_what_all_workers_have_done(unbounded):
    ids, target = examples()
    model, _ = unbounded
    model.fit(ids, target, batch_size=BATCH, epochs=2, verbose=0)
    predictions = model.predict(ids, batch_size=BATCH, verbose=0)[:, 0].astype(np.float64)
    chance = np.where(target > 0, predictions, 1 - predictions)
    expected = -np.log(chance).mean()
    for _ in range(2):  # whatever worker gets which batch
        loss = model.evaluate(ids, target, batch_size=BATCH, verbose=0)
        assert loss == pytest.approx(expected, rel=1e-5)


def test_saved_weights_have_all_updates_and_loaded_ones_reach_the_caches(unbounded, tmp_path):
    ids, target = examples()
    model, embedding = unbounded
    embedding.table.clear()
    before = embedding.cache_stats()["updates"]
    model.fit(ids, target, batch_size=BATCH, epochs=1, verbose=0)
    model.save_weights(tmp_path / "one.weights.h5")
    expected = model.predict(ids, batch_size=BATCH, verbose=0)
    updates = embedding.table.export().clocks.sum()
    assert updates == embedding.cache_stats()["updates"] - before

    model.fit(ids, target, batch_size=BATCH, epochs=1, verbose=0)
    assert not np.allclose(model.predict(ids, batch_size=BATCH, verbose=0), expected)
    model.load_weights(tmp_path / "one.weights.h5")

    # Not to the last bit: a cache that alone updated a row added up its steps, a shard their sums.
    predicted = model.predict(ids, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5)
    assert embedding.table.export().clocks.sum() == updates
    losses = model.fit(ids, target, batch_size=BATCH, epochs=1, verbose=0).history["loss"]
    assert losses[0] < -np.log(np.where(target[:, None] > 0, expected, 1 - expected)).mean() + 0.1


@pytest.mark.exhaustive
def test_export_from_a_cluster_is_served_by_stock_ops(unbounded, tmp_path):
    ids, target = examples()
    model, _ = unbounded
    model.fit(ids, target, batch_size=BATCH, epochs=1, verbose=0)
    model.export(tmp_path / "model")
    query = np.concatenate([ids[:40], [[5, 6, 7]]])
    served = tf.saved_model.load(str(tmp_path / "model"))
    expected = model.predict(query, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(served.serve(tf.constant(query)), expected, rtol=1e-5)


def test_clear_reaches_caches_without_a_bound(unbounded):
    ids, target = examples()
    model, embedding = unbounded
    model.fit(ids, target, batch_size=BATCH, epochs=1, verbose=0)
    embedding.table.clear()
    assert embedding.table.size() == 0
    assert embedding.cache_stats()["rows"] == 0


def test_lookup_of_a_million_unknown_keys_adds_no_row(strategy):
    _, embedding = make_model(strategy, None)
    keys = np.arange(1_000_000) * 7919 - 2**61
    values = embedding.table.lookup(keys)
    assert embedding.table.size() == 0
    np.testing.assert_array_equal(values, initial_values(embedding, keys))


def test_nonfinite_gradient_fails_the_step_and_changes_nothing(strategy):
    with strategy.scope():
        cache = het_tf.CacheConfig(10, staleness=0)
        embedding = het_tf.layers.HetEmbedding(2, optimizer="sgd", cache=cache)
        embedding.build()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(embedding(tf.constant([1, 2]))) * float("nan")
        train_rows(tape, loss, embedding)

    with pytest.raises(tf.errors.InvalidArgumentError, match="hold NaN or infinity"):
        strategy.run_on_worker(0, step)
    strategy.flush()
    assert embedding.table.size() == 0


def test_only_a_gradient_that_is_applied_trains_on_a_worker(strategy):
    with strategy.scope():
        embedding = het_tf.layers.HetEmbedding(
            1,
            optimizer=het_tf.optimizers.SGD(1.0),
            embeddings_initializer="zeros",
            cache=het_tf.CacheConfig(10),
        )
        embedding.build()

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            rows = embedding(tf.constant([1, 2]))
            loss = -tf.reduce_sum(rows)
        slope = tape.gradient(loss, rows)
        tape.gradient(loss, embedding.trainable_variables)
        train_rows(tape, loss, embedding)
        return slope

    np.testing.assert_array_equal(strategy.run_on_worker(0, step), [[-1], [-1]])
    strategy.flush()
    np.testing.assert_array_equal(embedding.table.lookup([1, 2]), [[1], [1]])
    np.testing.assert_array_equal(embedding.table.export().clocks, [1, 1])


def test_clipping_by_the_norm_of_all_gradients_has_the_rows_in_it(strategy):
    with strategy.scope():
        cache = het_tf.CacheConfig(10, staleness=0)
        embedding = het_tf.layers.HetEmbedding(
            1, optimizer="same", embeddings_initializer="zeros", cache=cache
        )
        head = keras.layers.Dense(1, kernel_initializer="ones")
        ids = keras.Input((2,), dtype="int64")
        model = het_tf.keras.Model(ids, head(keras.ops.sum(embedding(ids), axis=1)))
        loss = lambda _, predicted: -keras.ops.sum(predicted)  # noqa: E731
        model.compile(keras.optimizers.SGD(1.0, global_clipnorm=0.5), loss=loss)
    model.fit(np.array([[3, 4]]), np.zeros(1), verbose=0)
    # The gradients of two rows and of the bias are -1.
    length = 0.5 / np.sqrt(3)
    np.testing.assert_allclose(embedding.table.lookup([3, 4]), [[length]] * 2, rtol=1e-6)
    np.testing.assert_allclose(head.bias.numpy(), [length], rtol=1e-6)


@pytest.mark.exhaustive
def test_models_that_are_gone_leave_nothing_behind(strategy):
    x, y = examples()
    before = len(strategy.held.caches)
    caches = []
    for _ in range(2):
        model, embedding = make_model(strategy, CACHES["staleness 10"])
        model.fit(x, y, batch_size=BATCH, verbose=0)
        gc.collect()  # A model refers to itself.
        assert len(strategy.held.caches) <= before + 1
        caches.append(weakref.ref(embedding.worker_cache))
    assert [cache() is None for cache in caches] == [True, False]


def test_closures_report_on_the_caches_of_their_own_model(strategy, unbounded):
    _, other = make_model(strategy, CACHES["unbounded"])
    model, embedding = unbounded
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(
                [strategy.held.last_cache_reports(x.worker_cache) for x in (embedding, other)]
            )

    model.fit(*examples(), batch_size=BATCH, verbose=0, callbacks=[Look()])
    own, of_the_other = seen[0]
    assert own
    assert of_the_other == {}


def test_callback_that_would_restore_a_part_of_the_model_is_refused(strategy):
    model, embedding = make_model(strategy, None)
    stop = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    with pytest.raises(ValueError, match=f"not the table of layer '{embedding.name}'"):
        model.fit(*examples(), callbacks=[stop], verbose=0)


def test_a_schedule_counts_the_updates_of_all_workers(strategy):
    schedule = keras.optimizers.schedules.CosineDecay(1.0, 8, warmup_target=2.0, warmup_steps=2)
    with strategy.scope():
        embedding = het_tf.layers.HetEmbedding(
            1,
            optimizer=het_tf.optimizers.SGD(schedule),
            embeddings_initializer="zeros",
            cache=het_tf.CacheConfig(10, staleness=0),
        )
        ids = keras.Input((), dtype="int64")
        model = het_tf.keras.Model(ids, embedding(ids))
        model.compile("sgd", loss=lambda _, outputs: -keras.ops.sum(outputs))
    model.fit(np.array([3]), np.zeros(1), epochs=6, verbose=0)  # one step at a time
    rates = [float(schedule(step)) for step in range(6)]
    np.testing.assert_allclose(embedding.table.lookup(np.array([3])), [[sum(rates)]], rtol=1e-5)


@pytest.mark.exhaustive
def test_the_schedule_of_same_is_asked_with_the_steps_of_all_workers(strategy, monkeypatch):
    """However often the layer is called in a step; by another compile it begins anew."""
    monkeypatch.setattr(strategy, "dense_staleness", 2)
    schedule = keras.optimizers.schedules.CosineDecay(1.0, 8, warmup_target=2.0, warmup_steps=2)
    given = np.full((5, 1), 7, np.float32)
    with strategy.scope():
        embedding = het_tf.layers.HetEmbedding(
            5, 1, optimizer="same", weights=given, cache=het_tf.CacheConfig(10, staleness=0)
        )
        ids = keras.Input((1,), dtype="int64")
        outputs = keras.layers.Add()([embedding(ids), embedding(ids)])
        model = het_tf.keras.Model(ids, keras.layers.Flatten()(outputs))
        loss = lambda _, outputs: -keras.ops.sum(outputs)  # noqa: E731
        model.compile("adagrad", loss)
    np.testing.assert_array_equal(embedding.table.lookup(range(5)), given)
    rates = [2 * float(schedule(step)) for step in range(4)]
    for fits in (1, 2):
        with strategy.scope():
            model.compile(keras.optimizers.SGD(schedule), loss)
        for _ in range(2):
            model.fit(np.array([[3]]), np.zeros(1), epochs=2, verbose=0)  # one step at a time
        rows = embedding.table.lookup(range(5))
        np.testing.assert_allclose(rows[3], 7 + fits * sum(rates), rtol=1e-5)
    np.testing.assert_array_equal(np.delete(rows, 3, 0), given[:4])
