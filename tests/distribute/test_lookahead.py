"""Lookups begun while the step before computes, in one message for all layers."""

from __future__ import annotations

import collections
import logging
import threading
import uuid

import keras
import numpy as np
import pytest
import tensorflow as tf
from tracing import count_server_calls, graph_def, record_closures

import het_tf
import het_tf.keras
from het_tf.keras.worker_step.step_queue import Window
from het_tf.layers import HetEmbedding
from het_tf.runtime.broadcast import cluster_devices, visit

KEYS, BATCH, STEPS = 200, 32, 12


def dataset(context):
    """A worker's share: STEPS batches."""
    rng = np.random.default_rng(context.input_pipeline_id)
    ids = rng.integers(0, KEYS, (BATCH * STEPS, 3))
    labels = (ids.sum(1, keepdims=True) % 2).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)


def make_model(strategy, layers=2, lookahead=1, staleness=10):
    """A model with several embeddings of the same ids; those of the first are hashed before."""
    with strategy.scope():
        inputs = keras.Input((3,), dtype="int64")
        cache = het_tf.CacheConfig(KEYS, staleness=staleness, lookahead=lookahead)
        embeddings = [HetEmbedding(4, seed=i, cache=cache) for i in range(layers)]
        parts = [embeddings[0](keras.layers.Hashing(KEYS)(inputs))]
        parts += [embedding(inputs) for embedding in embeddings[1:]]
        hidden = keras.layers.Flatten()(keras.layers.Concatenate()([*parts, parts[0]]))
        model = het_tf.keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=7)
    return model, embeddings


@pytest.mark.parametrize(
    "lookahead",
    [8, pytest.param(0, marks=pytest.mark.exhaustive)],  # beyond the end of a closure, and none
)
def test_every_batch_is_trained_once(strategy, lookahead):
    model, embeddings = make_model(strategy, lookahead=lookahead)
    losses, made = [], 2 * 3 * STEPS
    for fits, steps in enumerate((None, 3 * STEPS), start=1):
        losses += model.fit(dataset, steps_per_epoch=steps, epochs=2, verbose=0).history["loss"]
        stats = model.lookahead_stats()
        assert stats["steps"] == made
        assert stats["ahead_steps"] == (made if lookahead else 0)
        assert stats["waited_steps"] <= stats["ahead_steps"]
        assert lookahead or stats["waited_seconds"] == 0
        # With steps, what was prepared beyond the last pass is not computed.
        in_vain = 0 if steps is None else 3 * lookahead
        for embedding in embeddings:
            stats = embedding.cache_stats()
            assert stats["pending"] == 0
            assert fits * made <= stats["lookups"] <= fits * made + in_vain
            assert embedding.table.size() > KEYS / 2
    assert max(losses[1:]) < losses[0]


WORDS = ["ant", "bee", "cat"]
# Layer, what it is made of, and what it may be fed with.
PREPROCESSING = {
    "string_lookup": (lambda: keras.layers.StringLookup(vocabulary=WORDS), "words"),
    "integer_lookup": (lambda: keras.layers.IntegerLookup(vocabulary=[3, 1, 4]), "ids"),
    "hashing": (lambda: keras.layers.Hashing(30), "words"),
    "discretization": (lambda: keras.layers.Discretization([-0.5, 0.0, 0.5]), "floats"),
    "normalization": (
        lambda: keras.Sequential(
            [keras.layers.Normalization(mean=1.0, variance=4.0), keras.layers.Discretization([0.0])]
        ),
        "floats",
    ),
    "text_vectorization": (
        lambda: keras.layers.TextVectorization(vocabulary=WORDS, output_sequence_length=2),
        "text",
    ),
}


@pytest.mark.parametrize(
    ("lookahead", "kinds"),
    [
        (5, ["string_lookup", "normalization", "text_vectorization"]),
        pytest.param(5, list(PREPROCESSING), marks=pytest.mark.exhaustive),
        pytest.param(0, list(PREPROCESSING), marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all", "without look-ahead"],
)
def test_ids_that_keras_makes_of_the_inputs(strategy, lookahead, kinds):
    """Their tables are made in the scope, and so on every worker."""
    rng = np.random.default_rng(1)
    words = np.array([*WORDS, "dog"])[rng.integers(0, 4, [64, 2])]
    data = {
        "words": words,
        "ids": rng.integers(0, 6, [64, 2]),
        "floats": rng.normal(size=[64, 2]).astype(np.float32),
        "text": np.array([[" ".join(row)] for row in words]),
    }
    used = {PREPROCESSING[name][1] for name in kinds}
    data = {kind: each for kind, each in data.items() if kind in used}
    labels = np.ones([64, 1], np.float32)
    cache = het_tf.CacheConfig(100, staleness=10, lookahead=lookahead)
    with strategy.scope():
        inputs = {
            kind: keras.Input(
                each.shape[1:], dtype=each.dtype if each.dtype.kind in "if" else str, name=kind
            )
            for kind, each in data.items()
        }
        layers = {name: PREPROCESSING[name][0]() for name in kinds}
        embeddings = {name: HetEmbedding(4, seed=1, cache=cache) for name in layers}
        rows = [
            embedding(layers[name](inputs[PREPROCESSING[name][1]]))
            for name, embedding in embeddings.items()
        ]
        hidden = keras.layers.Flatten()(keras.layers.Concatenate()(rows))
        model = het_tf.keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=3)
    of_all = tf.data.Dataset.from_tensor_slices((data, labels)).batch(8)
    model.fit(lambda context: of_all.repeat(), steps_per_epoch=8, verbose=0)
    assert model.lookahead_stats()["ahead_steps"] == (8 if lookahead else 0)
    for name, embedding in embeddings.items():
        expected = np.unique(layers[name](tf.constant(data[PREPROCESSING[name][1]])))
        assert sorted(embedding.table.export().keys) == expected.tolist(), name


class Count(keras.metrics.Metric):
    """Of examples."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

    def result(self):
        return self.total + 0.0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind",
    [
        "batches of this kind",
        pytest.param("a look", marks=pytest.mark.exhaustive),
        pytest.param("other batches", marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_in_a_callback_leaves_those_that_were_prepared(strategy, kind):
    batch = 4
    with strategy.scope():
        inputs = keras.Input((), dtype="int64")
        cache = het_tf.CacheConfig(KEYS, staleness=10, lookahead=5)
        embedding = HetEmbedding(
            1,
            embeddings_initializer="zeros",
            optimizer=het_tf.optimizers.SGD(1.0),
            cache=cache,
        )
        model = het_tf.keras.Model(inputs, embedding(inputs))
        model.compile(loss=lambda _, p: -keras.ops.sum(p), metrics=[Count(name="count")])

    def share(context):
        ids = tf.data.Dataset.range(KEYS).batch(batch)
        ids = ids.shard(strategy.num_workers, context.input_pipeline_id)
        return ids.map(lambda ids: (ids, tf.zeros([tf.shape(ids)[0], 1])))

    extra = np.arange(KEYS, KEYS + (batch if kind == "batches of this kind" else 3))
    made = []

    def on_batch_end(step, logs):
        if not made:
            made.append(step)
            run = model.test_on_batch if kind == "a look" else model.train_on_batch
            run(extra, np.zeros((len(extra), 1), np.int64 if kind == "other batches" else float))

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=on_batch_end)
    history = model.fit(share, epochs=2, verbose=0, callbacks=[callback]).history
    assert history["count"] == [KEYS, KEYS], "a step in between is none of fit's"
    trained = embedding.table.lookup(np.arange(KEYS + len(extra)))[:, 0]
    np.testing.assert_array_equal(trained[:KEYS], 2)
    np.testing.assert_array_equal(trained[KEYS:], kind != "a look")


@pytest.mark.exhaustive
def test_what_keys_do_not_depend_on_is_not_read(strategy, monkeypatch):
    """A server keeps it, so every step would wait for it."""
    with strategy.scope():
        inputs = keras.Input((3,), dtype="int64")
        embedding = HetEmbedding(4, seed=1, cache=het_tf.CacheConfig(KEYS))
        hidden = keras.layers.Dense(4)(keras.layers.Flatten()(embedding(inputs)))
        hidden = keras.layers.Dropout(0.1)(keras.layers.BatchNormalization()(hidden))
        model = het_tf.keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.Adam(0.01), "mse")
    closures = record_closures(monkeypatch)
    model.fit(np.ones([64, 3], np.int64), np.ones([64, 1]), batch_size=8, verbose=0)
    (closure,) = closures
    functions = graph_def(closure).library.function
    keys_of = [f for f in functions if "keys_of" in f.signature.name]
    assert keys_of
    for function in keys_of:
        assert not [node for node in function.node_def if node.op == "ReadVariableOp"]


@pytest.mark.exhaustive
def test_a_closure_asks_workers_for_no_handles(strategy, monkeypatch):
    model, _ = make_model(strategy, layers=3)
    endless = lambda context: dataset(context).repeat()  # noqa: E731
    model.fit(endless, steps_per_epoch=7, verbose=0)
    asked = []
    make = het_tf.ops.cache_handle

    def count(**attributes):
        asked.append(attributes["shared_name"])
        return make(**attributes)

    monkeypatch.setattr(het_tf.ops, "cache_handle", count)
    numbers = []
    for closures in (1, 10):
        asked.clear()
        model.fit(endless, steps_per_epoch=7 * closures, verbose=0)
        numbers.append(len(asked))  # of flushes and the like
    assert numbers[0] == numbers[1] > 0


@pytest.mark.exhaustive
def test_many_layers_share_the_messages_of_one(strategy, monkeypatch):
    """Lookups, and with a staleness of 0 updates; with any look-ahead."""
    monkeypatch.setattr(strategy, "dense_staleness", 8)
    calls = []
    for layers, lookahead in ((1, 1), (3, 4)):
        model, embeddings = make_model(strategy, layers, lookahead, staleness=0)
        closures = record_closures(monkeypatch)
        model.fit(np.ones((64, 3), np.int64), np.ones((64, 1)), batch_size=32, verbose=0)
        assert all(embedding.table.size() > 0 for embedding in embeddings)
        calls += map(count_server_calls, closures)
    assert len(calls) == 2
    assert calls[0] == calls[1]


class OwnStep(het_tf.keras.Model):
    """Calls itself with what nobody knows before."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x + 1, y))


def many_embeddings(strategy, layers, cls, staleness=10):
    with strategy.scope():
        inputs = keras.Input((3,), dtype="int64")
        cache = het_tf.CacheConfig(KEYS, staleness=staleness)
        embeddings = [HetEmbedding(4, seed=i, cache=cache) for i in range(layers)]
        hidden = keras.layers.Flatten()(
            keras.layers.Concatenate()([embedding(inputs) for embedding in embeddings * 2])
        )
        model = cls(inputs, keras.layers.Dense(1, kernel_initializer="ones")(hidden))
        model.compile(keras.optimizers.SGD(0.001), "mse", steps_per_execution=2)
    return model, embeddings


@pytest.mark.exhaustive
def test_a_train_step_of_ones_own_shares_messages_too(strategy, monkeypatch):
    """And so do evaluate and predict."""
    ids, labels = np.arange(96).reshape(32, 3), np.ones((32, 1))
    model, embeddings = many_embeddings(strategy, 3, OwnStep, staleness=0)
    closures = record_closures(monkeypatch)
    model.fit(ids, labels, batch_size=8, verbose=0)
    for embedding in embeddings:
        assert sorted(embedding.table.export().keys) == list(range(1, 97))
    predicted = model.predict(ids + 1, batch_size=8, verbose=0)
    rows = [embedding.table.lookup(ids + 1) for embedding in embeddings]
    dense = model.layers[-1].get_weights()
    expected = np.concatenate(rows * 2, -1).reshape(32, -1) @ dense[0] + dense[1]
    np.testing.assert_allclose(predicted, expected, rtol=1e-5)
    loss = model.evaluate(ids + 1, labels, batch_size=8, verbose=0)
    np.testing.assert_allclose(loss, np.mean((predicted - 1) ** 2), rtol=1e-5)
    # Lookups and updates in training, then lookups.
    assert [count_server_calls(closure) for closure in closures] == [2, 1, 1]


class Subclassed(het_tf.keras.Model):
    """Looks ids up after it has changed them."""

    def __init__(self):
        super().__init__()
        self.embedding = HetEmbedding(4, seed=1, cache=het_tf.CacheConfig(KEYS))
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(tf.reduce_sum(self.embedding(inputs * 2), 1))


class LooksAhead(Subclassed):
    """Says which ids it looks up."""

    def lookahead_ids(self, batch):
        return {self.embedding: batch[0] * 2}


class LooksAside(Subclassed):
    """Says other ids than it looks up."""

    def lookahead_ids(self, batch):
        return {self.embedding: batch[0] * 2 + tf.cast(batch[0] == 7, tf.int64)}


def fit_subclassed(strategy, kind):
    with strategy.scope():
        model = kind()
        model.compile("sgd", "mse")
    model.fit(dataset, epochs=1, verbose=0)
    return model


def test_a_subclassed_model_says_which_ids(strategy, caplog):
    with caplog.at_level(logging.INFO, logger="absl"):
        model = fit_subclassed(strategy, LooksAhead)
    assert "lookahead_ids" not in caplog.text
    stats = model.lookahead_stats()
    assert stats["ahead_steps"] == stats["steps"] > 0
    assert model.embedding.table.size() > KEYS / 2


@pytest.mark.exhaustive
def test_one_that_does_not_say_is_told_once_in_the_log(strategy, caplog):
    with caplog.at_level(logging.INFO, logger="absl"):
        model = fit_subclassed(strategy, Subclassed)
    assert caplog.text.count("write a method lookahead_ids(batch)") == 1
    assert model.lookahead_stats()["ahead_steps"] == 0
    assert model.embedding.table.size() > KEYS / 2


class Around(keras.layers.Layer):
    """Calls a layer, or has a function of its own do so."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.call_inner = inner

    def call(self, ids):
        return self.call_inner(ids)


@pytest.mark.exhaustive
def test_a_layer_that_another_one_calls(strategy):
    with strategy.scope():
        embedding = HetEmbedding(2, cache=het_tf.CacheConfig(100, lookahead=4))
        embedding.build()
        ids = keras.Input((3,), dtype="int64")
        rows = keras.layers.Flatten()(Around(embedding)(ids))
        model = het_tf.keras.Model(ids, keras.layers.Dense(1)(rows))
        model.compile("sgd", "mse")
    model.fit(dataset, epochs=1, verbose=0)
    stats = model.lookahead_stats()
    assert stats["ahead_steps"] == stats["steps"]
    assert embedding.table.size() > KEYS / 2


def test_wrong_ids_are_an_error_that_says_which(strategy):
    with pytest.raises(tf.errors.InvalidArgumentError, match="= 14, looked ahead for was 15"):
        fit_subclassed(strategy, LooksAside)


def test_lookahead_ids_of_the_wrong_kind(strategy):
    class Lists(Subclassed):
        def lookahead_ids(self, batch):
            return [batch[0]]

    with pytest.raises(ValueError, match="must return a dict from HetEmbedding layers"):
        fit_subclassed(strategy, Lists)


@pytest.mark.exhaustive
def test_a_layer_without_a_cache_beside_one_with(strategy):
    with strategy.scope():
        inputs = keras.Input((3,), dtype="int64")
        cached = HetEmbedding(4, seed=1, cache=het_tf.CacheConfig(KEYS))
        plain = HetEmbedding(4, seed=2)
        hidden = keras.layers.Concatenate()([cached(inputs), plain(inputs)])
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(hidden))
        model = het_tf.keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.05), "mse")
    losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]
    assert cached.table.size() == plain.table.size() == KEYS


def test_rows_are_as_without_look_ahead_where_one_worker_alone_has_them(strategy):
    # Every worker has keys of its own, so what it reads is what it wrote.
    def own_keys(context):
        return dataset(context).map(
            lambda ids, labels: (ids + KEYS * context.input_pipeline_id, labels)
        )

    results = collections.defaultdict(list)
    for lookahead in (0, 4):
        with strategy.scope():
            inputs = keras.Input((3,), dtype="int64")
            cache = het_tf.CacheConfig(KEYS // 2, staleness=20, lookahead=lookahead)
            layer = HetEmbedding(4, seed=1, cache=cache, optimizer=het_tf.optimizers.SGD(0.5))
            outputs = keras.layers.Dense(1, trainable=False, kernel_initializer="ones")(
                keras.layers.Flatten()(layer(inputs))
            )
            model = het_tf.keras.Model(inputs, outputs)
            model.compile("sgd", "mse", steps_per_execution=5)
        model.fit(own_keys, epochs=2, verbose=0)
        results[lookahead] = layer.table.lookup(np.arange(3 * KEYS))
    np.testing.assert_allclose(results[0], results[4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lookahead", [-1, 1.5, 10**6])
def test_bad_lookahead(lookahead):
    with pytest.raises(ValueError, match="lookahead"):
        het_tf.CacheConfig(10, lookahead=lookahead)


@pytest.fixture
def count_messages(strategy, monkeypatch):
    """How many messages functions that are traced from now on have sent to servers, by worker."""
    call_servers = het_tf.ops.call_servers
    name = f"messages/{uuid.uuid4().hex}"

    def queue():
        with tf.device("/device:CPU:0"):
            return tf.raw_ops.FIFOQueueV2(component_types=[tf.bool], shapes=[[]], shared_name=name)

    def count(messages, **attributes):
        sent = [tf.size(message) > 0 for message in messages]
        sent = tf.boolean_mask(tf.stack(sent), tf.stack(sent))
        tf.raw_ops.QueueEnqueueManyV2(handle=queue(), components=[sent])
        return call_servers(messages, **attributes)

    monkeypatch.setattr(het_tf.ops, "call_servers", count)

    def counts():
        found = visit(
            cluster_devices("worker"),
            lambda: tf.raw_ops.QueueSizeV2(handle=queue()),
            lambda device, error: False,
        )
        return [int(count) for count in found.values()]

    return counts


@pytest.mark.exhaustive
def test_rows_come_with_dense_variables_that_every_step_reads(strategy, count_messages):
    layers, strategy.dense_staleness = 3, 0
    try:
        model, embeddings = make_model(strategy, layers, lookahead=None)
        losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]
    finally:
        strategy.dense_staleness = None
    assert losses[1] < losses[0]
    assert all(embedding.table.size() > KEYS / 2 for embedding in embeddings)
    steps, closures = 2 * STEPS, 2 * -(-STEPS // 7)
    servers = len(cluster_devices("ps"))
    for count in count_messages():
        # One a step, one that brings what the last step of a closure made, and those of flushes.
        most = steps + closures + 2 * (layers + 1) + 1
        assert steps * servers <= count <= most * servers


class Negatives(keras.layers.Layer):
    """Draws ids, of Keras's random numbers or of TensorFlow's, in a function or not."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.generator = keras.random.SeedGenerator(1)

    def draw(self, shape):
        if self.kind == "keras":
            return keras.random.randint(shape, 0, KEYS, "int64", seed=self.generator)
        return tf.random.uniform(shape, 0, KEYS, tf.int64)

    def call(self, ids):
        draw = tf.function(self.draw) if self.kind == "function" else self.draw
        return draw(tf.shape(ids))


class Shifted(keras.layers.Layer):
    """Adds a weight to ids."""

    def __init__(self):
        super().__init__()
        self.shift = self.add_weight(shape=(), initializer=keras.initializers.Constant(2.0))

    def call(self, ids):
        return ids + tf.cast(self.shift, tf.int64)


CHOICES = ("keras", "tensorflow", "function", "weight", "rows")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "cache",
    [
        het_tf.CacheConfig(100, staleness=4, lookahead=3),
        pytest.param(None, marks=pytest.mark.exhaustive),
    ],
)
def test_ids_that_are_known_when_they_are_looked_up(strategy, caplog, cache):
    """Ids that are drawn, or of a weight or of rows; beside them ids that are known before."""
    with strategy.scope():
        ids = keras.Input((3,), dtype="int64")
        known = HetEmbedding(4, seed=1, cache=cache, name="known")
        rows = known(ids)
        late = {kind: HetEmbedding(4, seed=2, cache=cache, name=f"of_{kind}") for kind in CHOICES}
        chosen = {kind: Negatives(kind)(ids) for kind in CHOICES[:3]}
        chosen |= {"weight": Shifted()(ids), "rows": keras.ops.argmax(rows, -1)}
        joined = [rows, *(late[kind](chosen[kind]) for kind in CHOICES)]
        hidden = keras.layers.Flatten()(keras.layers.Concatenate()(joined))
        model = het_tf.keras.Model(ids, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=5)
    with caplog.at_level(logging.INFO, logger="absl"):
        model.fit(dataset, epochs=2, verbose=0)
    for kind in CHOICES:
        assert f"ids of layer of_{kind} are drawn by chance, or depend on" in caplog.text
    assert "ids of layer known" not in caplog.text
    steps = 2 * 3 * STEPS
    assert model.lookahead_stats()["ahead_steps"] == (0 if cache is None else steps)
    assert model.evaluate(dataset(FirstWorker), verbose=0) < 1
    assert model.predict(dataset(FirstWorker).take(2), verbose=0).shape == (2 * BATCH, 1)
    trained = {kind: layer.table.export() for kind, layer in late.items()}
    assert all(sum(export.clocks) >= steps for export in trained.values())
    assert set(trained["rows"].keys) <= set(range(4))
    assert set(trained["weight"].keys) == {key + 2 for key in known.table.export().keys}


class FirstWorker:
    """In the place of its `tf.distribute.InputContext`."""

    input_pipeline_id = 0


@pytest.mark.exhaustive
def test_ids_of_the_shape_of_rows_are_looked_up_ahead(strategy, caplog):
    with strategy.scope():
        ids = keras.Input((3,), dtype="int64")
        embeddings = [HetEmbedding(4, cache=het_tf.CacheConfig(KEYS)) for _ in range(3)]
        rows = embeddings[0](ids)
        shifted = keras.ops.reshape(ids, (-1, 3)) + keras.ops.shape(rows)[2]
        again = ids + keras.ops.cast(keras.ops.zeros_like(rows[:, :, 0]), "int64")
        hidden = keras.layers.Concatenate()([rows, embeddings[1](shifted), embeddings[2](again)])
        model = het_tf.keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(hidden)))
        model.compile("sgd", "mse")
    with caplog.at_level(logging.INFO, logger="absl"):
        model.fit(dataset, epochs=1, verbose=0)
    assert "are drawn by chance" not in caplog.text


def test_what_waits_for_a_queue_ends_with_it(strategy):
    """As a step may when `fit` ends by an error. TensorFlow crashes if the queue only goes."""
    window = Window(1)
    device = strategy.worker_device(0)

    @tf.function
    def reserve():
        with tf.control_dependencies([window.reserve_op(), window.reserve_op()]):
            return tf.constant(True)

    errors = []

    def wait():
        try:
            with tf.device(device):
                reserve()
        except tf.errors.OpError as error:
            errors.append(error)

    with window.of("waits", goes_on=True):
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        # It may not have begun to wait, and then finds another queue.
        for _ in range(100):
            if waiting.is_alive():
                with window.of("waits", goes_on=True):
                    window.clear()
                waiting.join(0.1)
        assert errors
