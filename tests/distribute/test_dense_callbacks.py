"""What callbacks see and change while workers train on replicas of the dense variables."""

from __future__ import annotations

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from faults import Warnings

import het_tf
import het_tf.keras

BATCHES, BATCH = 12, 8
X = np.ones((BATCHES * BATCH, 4), np.float32)
Y = np.zeros((len(X), 1), np.float32)


@pytest.fixture
def dense(strategy):
    strategy.dense_staleness = 50
    yield strategy
    strategy.dense_staleness = None


def make(strategy, optimizer, embedding=None, **arguments):
    """A model whose weights grow by the learning rate in every step; optimizer: makes one."""
    with strategy.scope():
        inputs = hidden = keras.Input((4,))
        if embedding is not None:
            ids = keras.ops.cast(inputs[:, :1], "int64")
            rows = keras.layers.Flatten()(embedding(ids))
            hidden = keras.layers.Concatenate()([inputs, rows])
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="grows")
        model = het_tf.keras.Model(inputs, layer(hidden))
        model.compile(optimizer(), minus_the_sum, **arguments)
        model.optimizer.build(model.trainable_variables)
    return model


def minus_the_sum(_, predicted):
    return -keras.ops.sum(predicted, axis=-1)


def weight(model):
    """Of the parameter server, as it is there."""
    return float(model.trainable_variables[0].numpy()[0, 0])


def made(model):
    """What the steps of all workers come to: some of it is not in the weight yet."""
    return weight(model) + float(model.dense_owed.numpy()[0])


def slots(model):
    known = ("iteration", "learning_rate")
    return [v for v in model.optimizer.variables if v.name not in known]


def fit(model, epochs=1, **hooks):
    callbacks = hooks.pop("callbacks", [])
    callbacks = [*callbacks, keras.callbacks.LambdaCallback(**hooks)]
    model.fit(X, Y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=callbacks)


@pytest.mark.exhaustive
def test_averages_of_weights_change_places_with_them_for_validation(dense):
    model = make(dense, lambda: keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5))
    seen = []
    model.fit(
        *(X, Y),
        batch_size=BATCH,
        epochs=2,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[
            keras.callbacks.SwapEMAWeights(),
            keras.callbacks.LambdaCallback(
                on_test_begin=lambda logs: seen.append(weight(model)),
                on_epoch_end=lambda epoch, logs: seen.extend([weight(model), made(model)]),
            ),
        ],
    )
    # How many of the steps a worker makes is its own affair, so is its average: behind its weights.
    averages, weights, steps = seen[::3], seen[1::3], seen[2::3]
    np.testing.assert_allclose(steps, [BATCHES, 2 * BATCHES], rtol=1e-5)
    for average, reached in zip(averages, weights, strict=True):
        assert 0 < average < reached
    assert averages[1] > weights[0] - 1
    # As Keras has it, training ends with them.
    assert weight(model) == pytest.approx(averages[1], rel=1e-5)


@pytest.mark.exhaustive
def test_averages_of_weights_are_saved_in_their_place(dense, tmp_path):
    model = make(dense, lambda: keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5))
    saved, begun, ended = [], [], []

    def on_epoch_end(epoch, logs):
        ended.append(weight(model))
        with h5py.File(tmp_path / f"{epoch + 1}.weights.h5") as file:
            saved.append(float(file["layers/dense/vars/0"][0, 0]))

    fit(
        model,
        epochs=3,
        callbacks=[
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.ModelCheckpoint(
                str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True
            ),
        ],
        # Before the first, nothing is owed and there are no replicas.
        on_epoch_begin=lambda epoch, logs: begun.append(made(model) if epoch else 0),
        on_epoch_end=on_epoch_end,
    )
    np.testing.assert_allclose(begun, [0, BATCHES, 2 * BATCHES], rtol=1e-5)
    assert saved == ended == sorted(saved)
    assert 0 < saved[0] < saved[-1] < 3 * BATCHES


@pytest.mark.parametrize(
    ("writer", "moment"),
    [("save_weights", "batch"), ("checkpoint", "epoch"), ("manager", "batch")],
)
def test_who_saves_gets_slots_and_counts_too(dense, tmp_path, moment, writer):
    model = make(dense, lambda: keras.optimizers.Adam(0.01), steps_per_execution=2)
    checkpoint = tf.train.Checkpoint(model=model)
    manager = het_tf.checkpoint.Manager(checkpoint, tmp_path / "managed")
    read = {}

    def save(at, logs):
        if read:
            return
        if writer == "save_weights":
            model.save_weights(tmp_path / "some.weights.h5")
        elif writer == "checkpoint":
            checkpoint.write(str(tmp_path / "some"))
        else:
            manager.save()
            manager.wait()
        # Nothing brings them up to date but what saves.
        read["weight"] = weight(model)
        read["count"] = int(model.optimizer.iterations.numpy())
        read["slots"] = [v.numpy() for v in slots(model)]

    fit(model, **{f"on_{'train_batch' if moment == 'batch' else 'epoch'}_end": save})
    other = make(dense, lambda: keras.optimizers.Adam(0.01))
    if writer == "save_weights":
        other.load_weights(tmp_path / "some.weights.h5")
    else:
        path = tmp_path / "some" if writer == "checkpoint" else manager.latest_checkpoint
        tf.train.Checkpoint(model=other).read(str(path)).expect_partial()
    assert weight(other) == read["weight"] > 0
    assert int(other.optimizer.iterations.numpy()) == read["count"] > 0
    assert len(slots(other)) == len(read["slots"]) == 2
    for restored, written in zip(slots(other), read["slots"], strict=True):
        np.testing.assert_array_equal(restored.numpy(), written)
        assert np.all(written != 0)


@pytest.mark.exhaustive
def test_checkpoints_come_from_and_go_to_models_without_a_cluster(dense, tmp_path):
    def alone():
        inputs = keras.Input((4,))
        layer = keras.layers.Dense(1, use_bias=False, name="grows")
        made = keras.Model(inputs, layer(inputs))
        made.compile(keras.optimizers.Adam(0.01), minus_the_sum)
        made.optimizer.build(made.trainable_variables)
        return made

    model, before, after = make(dense, lambda: keras.optimizers.Adam(0.01)), alone(), alone()
    path = tf.train.Checkpoint(model=before).write(str(tmp_path / "before"))
    tf.train.Checkpoint(model=model).read(path).assert_consumed()
    assert weight(model) == weight(before)
    fit(model)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "after"))
    tf.train.Checkpoint(model=after).read(path).assert_existing_objects_matched()
    assert weight(after) == weight(model) != weight(before)


@pytest.mark.exhaustive
def test_an_export_in_a_callback_has_what_was_made(dense, tmp_path):
    layer = het_tf.layers.HetEmbedding(2, seed=1, cache=het_tf.CacheConfig(10))
    model = make(dense, lambda: keras.optimizers.SGD(1.0), layer, steps_per_execution=2)
    seen = []

    def export(batch, logs):
        if not seen:
            model.export(str(tmp_path / "exported"), verbose=False)
            seen.append(model.get_layer("grows").get_weights()[0])
            seen.append(layer.table.lookup([1])[0])

    fit(model, on_train_batch_end=export)
    served = tf.saved_model.load(str(tmp_path / "exported"))
    kernel, row = seen
    assert np.all(kernel[:4] > 0)
    expected = (np.concatenate([X[0], row]) @ kernel)[0]
    np.testing.assert_allclose(served.serve(X[:1])[0, 0], expected, rtol=1e-4)


def test_what_is_set_in_the_middle_of_an_epoch_stays(dense):
    model = make(dense, lambda: keras.optimizers.SGD(1.0), steps_per_execution=2)
    seen, ends, logged = [], [], Warnings()

    def set_once(batch, logs):
        seen.append(batch)
        if len(seen) == 2:
            model.set_weights([np.full((4, 1), 1000.0)])

    fit(
        model,
        epochs=3,
        on_train_batch_end=set_once,
        on_epoch_end=lambda epoch, logs: ends.append(made(model) if epoch else weight(model)),
    )
    np.testing.assert_allclose(ends, [1000, 1000 + BATCHES, 1000 + 2 * BATCHES], rtol=1e-6)
    assert int(model.optimizer.iterations.numpy()) == 3 * BATCHES
    (warning,) = [text for text in logged.take() if "changed while steps were made" in text]
    assert "'grows/kernel" in warning
    assert "iteration" not in warning


def test_slots_that_were_saved_in_a_fit_come_back_in_it(dense, tmp_path):
    model = make(dense, lambda: keras.optimizers.SGD(1.0, momentum=1.0))
    path = str(tmp_path / "some.weights.h5")
    seen = []

    def on_epoch_end(epoch, logs):
        if epoch == 0:
            model.save_weights(path)
            seen.append(weight(model))
        # What the servers have of the slots now is what was saved: that is no change to them.
        if epoch == 1:
            model.load_weights(path)
            seen.append(weight(model))

    fit(model, epochs=3, on_epoch_end=on_epoch_end)
    assert seen[0] == seen[1] > 0
    assert int(model.optimizer.iterations.numpy()) == 2 * BATCHES
    # A velocity grows by 1 with every step of its worker.
    assert slots(model)[0].numpy()[0, 0] == pytest.approx(2 * BATCHES / dense.num_workers)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "how", ["checkpoint", pytest.param("set_weights", marks=pytest.mark.exhaustive)]
)
def test_what_an_epoch_began_with_can_be_set_in_the_middle_of_it(dense, tmp_path, how):
    model = make(dense, lambda: keras.optimizers.SGD(1.0), steps_per_execution=2)
    checkpoint = tf.train.Checkpoint(model=model)
    path = str(tmp_path / "some")
    begun, seen = model.get_weights(), []
    checkpoint.write(path)

    def set_once(batch, logs):
        seen.append(batch)
        if len(seen) == 2:
            if how == "set_weights":
                model.set_weights(begun)
            else:
                checkpoint.read(path)

    fit(model, on_train_batch_end=set_once)
    assert weight(model) == 0
    fit(model)
    assert made(model) == pytest.approx(BATCHES)


@pytest.mark.exhaustive
def test_a_slot_that_a_callback_changes_stays(dense, tmp_path):
    model = make(dense, lambda: keras.optimizers.SGD(1.0, momentum=0.5))
    saved = []

    def on_epoch_end(epoch, logs):
        slots(model)[0].assign(np.full((4, 1), 1000.0))
        model.save(tmp_path / "some.keras")
        saved.append(float(slots(model)[0].numpy()[0, 0]))

    fit(model, on_epoch_end=on_epoch_end)
    assert saved == [1000]
    assert slots(model)[0].numpy()[0, 0] == 1000


def test_one_step_counts_whole(dense):
    model = make(dense, lambda: keras.optimizers.SGD(1.0, momentum=0.5))
    for weight_then, slot in ((1, 1), (2.5, 1.5)):
        model.train_on_batch(X[:BATCH], Y[:BATCH])
        assert weight(model) == weight_then
        assert slots(model)[0].numpy()[0, 0] == slot
    assert int(model.optimizer.iterations.numpy()) == 2


@pytest.mark.exhaustive
def test_one_step_in_a_callback_of_fit(dense):
    model = make(dense, lambda: keras.optimizers.SGD(1.0), steps_per_execution=2)
    before_and_after, logged = [], Warnings()

    def step(batch, logs):
        if not before_and_after:
            dense.flush()
            before_and_after.append(made(model))
            model.train_on_batch(X[:BATCH], Y[:BATCH])
            before_and_after.append(made(model))

    fit(model, on_train_batch_end=step)
    before, after = before_and_after
    assert before > 0
    assert after == pytest.approx(before + 1)
    assert made(model) == pytest.approx(1 + BATCHES)
    assert int(model.optimizer.iterations.numpy()) == BATCHES + 1
    assert not [text for text in logged.take() if "lost" in text]


@pytest.mark.exhaustive
def test_a_look_at_a_batch_in_a_callback_of_fit_leaves_slots(dense):
    dense.dense_staleness = 0
    model = make(dense, lambda: keras.optimizers.SGD(1.0, momentum=1.0), steps_per_execution=1)
    seen = []

    def look(batch, logs):
        seen.append(model.test_on_batch(X[:BATCH], Y[:BATCH]))

    fit(model, on_train_batch_end=look)
    assert len(seen) == BATCHES
    # A velocity grows by 1 with every step of its worker.
    assert slots(model)[0].numpy()[0, 0] == pytest.approx(BATCHES / dense.num_workers)
