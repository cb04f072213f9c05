"""Models, metrics and data for the tests in this folder."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

FEATURES = 6


def make_data(examples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """x float32[examples, FEATURES] and labels float32[examples, 1] that can be learned."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, FEATURES)).astype(np.float32)
    y = (x[:, :1] + 0.5 * x[:, 1:2] > 0).astype(np.float32)
    return x, y


def make_classifier(model_class: type[keras.Model], seed: int = 1) -> keras.Model:
    """An uncompiled functional model, with the same weights for the same seed."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2")(inputs)
    return model_class(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))


class IdCounts(keras.metrics.Metric):
    """Counts how often each id was seen, the label being the id."""

    def __init__(self, size: int, name: str = "ids"):
        super().__init__(name=name)
        self.counts = self.add_weight(shape=(size,), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ids = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        size = self.counts.shape[0]
        self.counts.assign(self.counts + tf.math.bincount(ids, minlength=size, dtype=tf.float32))

    def result(self):
        return keras.ops.sum(self.counts)


def make_id_counter(
    model_class: type[keras.Model],
    size: int,
    embedding: keras.layers.Layer | None = None,
    **compile_args,
) -> keras.Model:
    """A model of one weight that counts the ids it is shown; `model.counter` is the metric."""
    inputs = hidden = keras.Input((1,))
    if embedding is not None:
        hidden = keras.layers.Flatten()(embedding(keras.ops.cast(inputs, "int64")))
    model = model_class(inputs, keras.layers.Dense(1, use_bias=False)(hidden))
    counter = IdCounts(size)
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[counter], **compile_args)
    model.counter = counter
    return model


def id_dataset(ids: np.ndarray | range, batch_size: int) -> tf.data.Dataset:
    """Batches of (id, id)."""
    ids = np.asarray(ids, np.float32).reshape(-1, 1)
    return tf.data.Dataset.from_tensor_slices((ids, ids)).batch(batch_size)


class Recorder(keras.callbacks.Callback):
    """Writes down which of its methods were called, and with which logs."""

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []
        self.logs: dict[str, list[dict]] = {}

    def _note(self, name, logs):
        self.calls.append(name)
        self.logs.setdefault(name, []).append(dict(logs or {}))

    def on_train_begin(self, logs=None):
        self._note("train_begin", logs)

    def on_train_end(self, logs=None):
        self._note("train_end", logs)

    def on_epoch_begin(self, epoch, logs=None):
        self._note(f"epoch_begin {epoch}", logs)

    def on_epoch_end(self, epoch, logs=None):
        self._note(f"epoch_end {epoch}", logs)

    def on_train_batch_begin(self, batch, logs=None):
        self._note(f"batch_begin {batch}", logs)

    def on_train_batch_end(self, batch, logs=None):
        self._note(f"batch_end {batch}", logs)

    def on_test_begin(self, logs=None):
        self._note("test_begin", logs)

    def on_test_batch_end(self, batch, logs=None):
        self._note(f"test_batch_end {batch}", logs)

    def on_test_end(self, logs=None):
        self._note("test_end", logs)

    def on_predict_begin(self, logs=None):
        self._note("predict_begin", logs)

    def on_predict_batch_end(self, batch, logs=None):
        self._note(f"predict_batch_end {batch}", logs)

    def on_predict_end(self, logs=None):
        self._note("predict_end", logs)
