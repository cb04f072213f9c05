"""Steps of `fit` in one process run in a graph loop where nobody can tell."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf

BATCHES = 21


def make(steps="auto"):
    keras.utils.set_random_seed(1)
    ids = keras.Input((3,), dtype="int64")
    x = het_tf.layers.HetEmbedding(4, optimizer="same", seed=3)(ids)
    x = keras.layers.Dropout(0.3, seed=5)(keras.layers.Flatten()(x))
    model = het_tf.keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(x))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model.compile(
        keras.optimizers.SGD(schedule, momentum=0.9),
        "binary_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=steps,
    )
    return model


def data():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 50, (BATCHES * 4 - 1, 3))
    return x, (x.sum(1, keepdims=True) % 2).astype("float32")


class Watches(keras.callbacks.Callback):
    """A callback that is called in every step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((batch, self.model.steps_per_execution))


class Epochs(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.steps = self.model.steps_per_execution


@pytest.mark.parametrize("callbacks", [[], [keras.callbacks.ModelCheckpoint]])
def test_training_is_that_of_single_steps(tmp_path, callbacks):
    x, y = data()
    validation = {"validation_data": (x[:30], y[:30]), "validation_batch_size": 4}
    histories, states = [], []
    for steps in (1, "auto"):
        model, epochs = make(steps), Epochs()
        made = [c(str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True) for c in callbacks]
        fit = {"batch_size": 4, "epochs": 2, "verbose": 0, "callbacks": [epochs, *made]}
        histories.append(model.fit(x, y, **fit, **validation).history)
        assert epochs.steps == (1 if steps == 1 else 8)
        assert model.steps_per_execution == 1
        assert int(model.optimizer.iterations.numpy()) == 2 * BATCHES
        rows = model.layers[1].table.export()
        order = np.argsort(rows.keys)
        states.append([rows.values[order], *(w.numpy() for w in model.layers[-1].weights)])
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-6)
    for actual, expected in zip(states[1], states[0], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


def test_a_callback_of_steps_is_called_in_every_step():
    x, y = data()
    model, watches = make(), Watches()
    model.fit(x, y, batch_size=4, verbose=0)  # in a loop
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[watches])
    assert watches.seen == [(i, 1) for i in range(BATCHES)]
    model.fit(x, y, batch_size=4, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 3 * BATCHES


@pytest.mark.parametrize(("steps", "validation", "loop"), [(6, 4, 2), (7, None, 7), (24, 16, 8)])
def test_epochs_have_the_steps_that_they_were_given(steps, validation, loop):
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(4).repeat()
    model, epochs = make(), Epochs()
    given = {}
    if validation:
        given = {"validation_data": dataset, "validation_steps": validation}
    model.fit(dataset, steps_per_epoch=steps, epochs=3, verbose=0, callbacks=[epochs], **given)
    assert epochs.steps == loop
    assert int(model.optimizer.iterations.numpy()) == 3 * steps
    assert len(model.predict(dataset, steps=3, verbose=0)) == 12  # not rounded up to a loop


def test_a_loaded_model_decides_again(tmp_path):
    x, y = data()
    model = make()
    model.fit(x, y, batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded, epochs = keras.saving.load_model(tmp_path / "model.keras"), Epochs()
    loaded.fit(x, y, batch_size=4, verbose=0, callbacks=[epochs])
    assert epochs.steps == 8
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", steps_per_execution=3)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[epochs])
    assert epochs.steps == 3
