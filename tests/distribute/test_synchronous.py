"""Synchronous steps: those of all workers count as one."""

from __future__ import annotations

import concurrent.futures
import functools

import keras
import numpy as np
import program_runner
import pytest
import tensorflow as tf

import het_tf
from het_tf import ops
from het_tf.distribute.step_rounds import StepRounds
from het_tf.keras.data.feeds import StreamFeed
from het_tf.runtime.broadcast import cluster_devices
from het_tf.runtime.threads import call_in_daemon

BATCH = 8


@pytest.fixture
def together(strategy):
    """The strategy, synchronous for one test."""
    strategy.synchronous = True
    yield strategy
    strategy.synchronous = False


def examples(num_batches, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 60, (num_batches * BATCH, 3)).astype(np.int64)
    return ids, ((ids < 30).sum(1, keepdims=True) > 1).astype(np.float32)


def make(optimizer, rows, cache="auto"):
    keras.utils.set_random_seed(1)
    ids = keras.Input((3,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(4, optimizer=rows, seed=3, cache=cache, name="rows")
    hidden = keras.layers.Dense(8, activation="relu")(keras.layers.Flatten()(embedding(ids)))
    model = het_tf.keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(optimizer, "binary_crossentropy", steps_per_execution=6)
    return model


def state_of(model):
    rows = model.get_layer("rows").table.export()
    order = np.argsort(rows.keys)
    dense = [w.numpy() for layer in model.layers[2:] for w in layer.weights]
    return [rows.keys[order], rows.values[order], rows.slots[order], *dense]


@pytest.mark.parametrize(
    ("optimizer", "rows", "cache"),
    [
        (lambda: keras.optimizers.Adam(0.01), "adam", "auto"),
        (lambda: keras.optimizers.SGD(0.3, momentum=0.9), "adagrad", het_tf.CacheConfig(10)),
        (lambda: keras.optimizers.Adagrad(0.1), "row_wise_adagrad", None),
    ],
)
def test_training_equals_keras_on_batches_of_all_workers(together, optimizer, rows, cache):
    workers = together.num_workers
    x, y = examples(2 * workers * 13)
    alone = make(optimizer(), rows)
    losses = alone.fit(x, y, batch_size=BATCH * workers, shuffle=False, epochs=2, verbose=0)
    with together.scope():
        model = make(optimizer(), rows, cache)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    seen = model.fit(data, epochs=2, verbose=0)
    np.testing.assert_allclose(seen.history["loss"], losses.history["loss"], rtol=1e-5)
    for actual, expected in zip(state_of(model), state_of(alone), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert int(model.optimizer.iterations.numpy()) == 2 * 2 * 13
    stats = model.get_layer("rows").cache_stats()
    assert stats["pending"] == stats["updates_lost"] == 0


class OwnCall(het_tf.keras.Model):
    """A model whose ids only its call shows."""

    def __init__(self):
        super().__init__()
        self.rows = het_tf.layers.HetEmbedding(4, optimizer="same", seed=3, name="rows")
        self.dense = keras.layers.Dense(1, activation="sigmoid")

    def call(self, ids):
        return self.dense(keras.ops.sum(self.rows(ids), axis=1))


def test_rests_of_batches_and_rows_that_are_looked_up_late(together):
    """The last step has fewer batches than there are workers."""
    workers = together.num_workers
    x, y = examples(3 * workers + workers - 1)

    def compiled():
        keras.utils.set_random_seed(1)
        model = OwnCall()
        model.compile(keras.optimizers.SGD(0.3, weight_decay=0.1), "binary_crossentropy")
        return model

    alone = compiled()
    losses = alone.fit(x, y, batch_size=BATCH * workers, shuffle=False, epochs=2, verbose=0)
    with together.scope():
        model = compiled()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    seen = model.fit(data, epochs=2, verbose=0)
    np.testing.assert_allclose(seen.history["loss"], losses.history["loss"], rtol=1e-5)
    rows, expected = (m.rows.table.lookup(np.arange(60)) for m in (model, alone))
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-6)
    assert int(model.optimizer.iterations.numpy()) == 2 * 4


def test_callbacks_may_evaluate_flush_and_raise_while_members_end_unevenly(together):
    def share(context):
        x, y = examples(2 + 3 * context.input_pipeline_id)
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    class Interrupt(keras.callbacks.Callback):
        def __init__(self, stops):
            super().__init__()
            self.stops = stops

        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(*examples(1), verbose=0)
            together.flush()
            if self.stops:
                raise RuntimeError("stopped by the test")

    with together.scope():
        model = make(keras.optimizers.Adam(0.01), "adagrad")
    model.fit(share, verbose=0, callbacks=[Interrupt(False)])
    with pytest.raises(RuntimeError, match="stopped by the test"):
        model.fit(share, verbose=0, callbacks=[Interrupt(True)])
    model.fit(share, verbose=0)


def test_members_of_a_round_make_as_many_steps(together):
    """Batches of another shape, and those that are too few for all members, are of other rounds."""
    sizes = [4, 4, 4, 4, 4, 4, 4, 4, 2, 4, 4, 4, 4]
    starts = np.cumsum([0, *sizes[:-1]])
    dataset = tf.data.Dataset.from_generator(
        lambda: (np.arange(first, first + n) for first, n in zip(starts, sizes, strict=True)),
        output_signature=tf.TensorSpec([None], tf.int64),
    )
    rounds, data = [], StreamFeed(dataset).start(steps_per_closure=2)
    for members in (3, 3, 2, 2, 2, 2, 2, 2):
        if work := data.next_round(members):
            rounds.append([each.args[0].numpy()[:, 0].tolist() for each in work])
    assert rounds == [
        [[0, 12], [4, 16], [8, 20]],
        [[24], [28], [32]],  # batches of 4, 4 and 2
        [[34, 42], [38, 46]],
    ]


def test_ends_of_data_differ(together):
    """Workers without data are not waited for, and train as the others from the next round on."""

    def share(context):
        x, y = examples(5 + 9 * context.input_pipeline_id)
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    with together.scope():
        model = make(keras.optimizers.Adam(0.01), "adagrad")
    batches = sum(5 + 9 * i for i in range(together.num_workers))
    longest = 5 + 9 * (together.num_workers - 1)
    seen = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda i, logs: seen.append(i))
    history = model.fit(
        share, epochs=2, verbose=0, callbacks=[count], validation_data=examples(2, seed=1)
    )
    assert seen.count(batches - 1) == 2
    assert longest <= int(model.optimizer.iterations.numpy()) / 2 <= batches
    assert history.history["loss"][1] < history.history["loss"][0]


def test_callbacks_stop_and_change_the_rate(together):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch >= 20

    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.0 if epoch else 0.1)
    x, y = examples(30 * together.num_workers)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    with together.scope():
        model = make(keras.optimizers.SGD(0.1), "adagrad")
    model.fit(data, verbose=0, callbacks=[Stop()])
    steps = int(model.optimizer.iterations.numpy())
    assert steps % 6 == 0
    assert steps < 30
    model.fit(data, epochs=1, verbose=0, callbacks=[rates])
    before = state_of(model)
    model.fit(data, epochs=2, initial_epoch=1, verbose=0, callbacks=[rates])
    for now, then in zip(state_of(model)[1:2], before[1:2], strict=True):
        np.testing.assert_array_equal(now, then)
    assert int(model.optimizer.iterations.numpy()) == steps + 60


def test_a_step_on_one_worker_counts_for_all(together):
    x, y = examples(4)
    with together.scope():
        model = make(keras.optimizers.Adam(0.01), "adam")
    alone = make(keras.optimizers.Adam(0.01), "adam")
    for first in range(0, len(x), BATCH):
        part = slice(first, first + BATCH)
        model.train_on_batch(x[part], y[part])
        alone.train_on_batch(x[part], y[part])
    for actual, expected in zip(state_of(model), state_of(alone), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (het_tf.CacheConfig(staleness=4), "read_bound = 4"),
        (het_tf.CacheConfig(clock="drift"), "clock = 'drift'"),
        (het_tf.CacheConfig(total_staleness=8), "total_staleness = 8"),
    ],
)
def test_caches_with_staleness_are_refused(together, cache, said):
    refused = pytest.raises(ValueError, match=f"layer rows has a cache with {said}")
    with together.scope(), refused:
        make(keras.optimizers.SGD(), "sgd", cache)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda: keras.optimizers.SGD(global_clipnorm=1.0), "global_clipnorm=1.0"),
        (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), "accumulation_steps=2"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "LossScale"),
    ],
)
def test_optimizers_of_whole_steps_are_refused(together, optimizer, said):
    with together.scope():
        model = make(optimizer(), "sgd")
    with pytest.raises(ValueError, match=f"{said}.*synchronous=True"):
        model.fit(*examples(2), verbose=0)


def step_of(rounds, member, server):
    """Sends a member's message of the round's first and last step. Returns when all have."""
    place = tf.constant([rounds.number, member, 0, 1], tf.int64)
    header = tf.reshape(tf.bitcast(place, tf.uint8), [-1])
    with tf.device(server):
        message = ops.pack_frames([header, tf.zeros([0], tf.uint8)])
        return ops.serve_step(rounds.handle_op(), [], message)


def round_of_two(down, is_connected=lambda worker, timeout: True):
    """A round whose members are workers 0 and 1. `down`: set of workers, which may change."""
    rounds = StepRounds(lambda: set(down), is_connected, 2)
    rounds.begin(2)
    for member in (0, 1):
        joined = (tf.constant(x, tf.int64) for x in (rounds.number, member, member))
        assert rounds.join_op(*joined)
    return rounds


def test_a_worker_that_died_between_the_messages_to_two_servers_leaves(strategy):
    down = set()
    rounds = round_of_two(down)
    first, second = cluster_devices("ps")
    calls = [call_in_daemon(step_of, rounds, 0, server) for server in (first, second)]
    call_in_daemon(step_of, rounds, 1, first).result(timeout=60)
    calls[0].result(timeout=60)
    down.add(1)  # Before it sends its message to the second server.
    for _ in range(5):
        rounds.drop_lost()
    calls[1].result(timeout=60)


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "between two polls"])
def test_a_worker_that_died_and_came_back_leaves(strategy, is_seen):
    """Its new process does not know of the round, and the process of training has no connection."""
    down = set()
    rounds = round_of_two(down, lambda worker, timeout: worker != 1)
    calls = [call_in_daemon(step_of, rounds, 0, server) for server in cluster_devices("ps")]
    if is_seen:
        down.add(1)
        rounds.drop_lost()
        down.clear()
    for _ in range(600):
        rounds.drop_lost()
        if not concurrent.futures.wait(calls, timeout=0.1).not_done:
            break
    for call in calls:
        call.result(timeout=0)


def test_workers_that_die_hang_and_come_back():
    seen = program_runner.result_of("synchronous_program.py")
    assert seen["live"] == [3, 2, 3, 2, 3]
    assert seen["replicas"] == 3
    assert seen["replicas_are_same"]
    assert seen["reads_are_rows"]
    assert seen["losses"][-1] < 0.8 * seen["losses"][0]


def test_location_aware_input_trains_the_same_with_fewer_rows(together):
    """The union of a step's batches is the same, so that the training is, too."""
    workers = together.num_workers
    rng = np.random.default_rng(0)
    user = rng.integers(0, 30 * workers, workers * BATCH * 40)
    x = np.stack([user, 1000 + user, 2000 + rng.integers(0, 500, len(user))], 1).astype(np.int64)
    y = (user % 2).astype(np.float32)[:, None]
    alone = make(keras.optimizers.Adam(0.01), "adagrad")
    alone.fit(x, y, batch_size=BATCH * workers, shuffle=False, verbose=0)

    def share(context, is_aware, on_demand=False):
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
        if not is_aware:
            return data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return het_tf.data.location_aware(data, lambda x, y: x, context, on_demand=on_demand)

    before = het_tf.data.plan_stats(together)
    sent, pushed = [], []
    for how in ({"is_aware": False}, {"is_aware": True}, {"is_aware": True, "on_demand": True}):
        with together.scope():
            model = make(keras.optimizers.Adam(0.01), "adagrad")
        model.fit(functools.partial(share, **how), verbose=0)
        for actual, expected in zip(state_of(model), state_of(alone), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
        stats = model.get_layer("rows").table.stats()
        sent.append(stats["rows_sent"])
        pushed.append(stats["rows_merged"])
    assert sent[1] < 0.8 * sent[0]
    assert sent[2] < 1.05 * sent[1]
    assert pushed[2] < 0.8 * pushed[1]
    planned = {k: v - before[k] for k, v in het_tf.data.plan_stats(together).items()}
    assert planned["ids"] == 2 * x.size
    assert 0.3 < planned["planned_hits"] / planned["ids"] < 1


def test_a_plan_must_have_the_ids_of_the_layers(together):
    x, y = examples(6 * together.num_workers)

    def share(context):
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
        return het_tf.data.location_aware(data, lambda x, y: x[:, :2], context, on_demand=True)

    with together.scope():
        model = make(keras.optimizers.SGD(0.1), "sgd")
    with pytest.raises(tf.errors.InvalidArgumentError, match="returns other ids than the model"):
        model.fit(share, verbose=0)
    with pytest.raises(ValueError, match="steps_per_epoch cannot be given with location_aware"):
        model.fit(share, steps_per_epoch=2, verbose=0)
