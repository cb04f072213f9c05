"""The model of the comparison, its data and its AUC: the same code for Keras 3 and tf_keras.

Wide & deep (Cheng et al., arXiv 1606.07792) over one embedding: an id's row is both, its first
column the weight of the wide part, all of its columns the vector of the deep part.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from factorization_machine import area_under_curve
from netns.criteo_shape import FIELDS
from netns.job import Job, Session

Weights = list[tuple[np.ndarray, np.ndarray]]  # (kernel, bias) of every dense layer


def build(keras: Any, embedding: Any, total: Callable[[Any], Any], job: Job) -> tuple[Any, list]:
    """Makes the model.

    Args:
      keras: the module, Keras 3 or tf_keras.
      embedding: the layer.
      total: sums [batch, fields] over fields, to [batch, 1], in that Keras.
      job: shapes.

    Returns:
      The model, int64 [batch, FIELDS] -> probability [batch, 1]; and its dense layers, in order.
    """
    layers = [keras.layers.Dense(units, activation="relu") for units in job.hidden]
    layers.append(keras.layers.Dense(1))
    ids = keras.Input((FIELDS,), dtype="int64")
    rows = embedding(ids)
    x = keras.layers.Flatten()(rows)
    for layer in layers:
        x = layer(x)
    logit = keras.layers.Add()([x, total(rows[:, :, 0])])
    return keras.Model(ids, keras.layers.Activation("sigmoid")(logit)), layers


def all_data(job: Job) -> tf.data.Dataset:
    """Endless batches of all workers, (ids, labels), in the order of the file."""
    return worker_data(job, None)


def worker_data(job: Job, index: int | None) -> tf.data.Dataset:
    """Endless batches of a worker, (ids, labels): every `workers`-th of the file."""
    record = job.batch * (FIELDS + 1)

    def parse(text: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.io.decode_raw(text, tf.int32)
        ids = tf.reshape(values[: job.batch * FIELDS], [job.batch, FIELDS])
        labels = tf.reshape(values[job.batch * FIELDS :], [job.batch, 1])
        return tf.cast(ids, tf.int64), tf.cast(labels, tf.float32)

    # Files are read where the worker is, so no batch crosses the network.
    data = tf.data.FixedLengthRecordDataset(job.train, 4 * record)
    if index is not None:
        data = data.shard(job.workers, index)
    return data.repeat().map(parse).prefetch(2)


class HeldOut:
    """Measures the AUC on held-out samples, in numpy, the same way for every library."""

    def __init__(self, job: Job):
        """Reads the samples."""
        values = np.fromfile(pathlib.Path(job.held_out), np.int32)
        values = values.reshape(-1, job.batch * (FIELDS + 1))
        ids = values[:, : job.batch * FIELDS].reshape(-1, FIELDS)
        self._labels = values[:, job.batch * FIELDS :].reshape(-1)
        self.keys, places = np.unique(ids, return_inverse=True)
        self._places = places.reshape(ids.shape)

    def auc(self, rows: np.ndarray, weights: Weights) -> float:
        """Area under the ROC curve.

        Args:
          rows: float32 [keys, dim], those of `keys`.
          weights: of the dense layers.
        """
        x = rows[self._places]
        wide = x[:, :, 0].sum(axis=1)
        x = x.reshape(len(x), -1)
        for kernel, bias in weights[:-1]:
            x = np.maximum(x @ kernel + bias, 0)
        kernel, bias = weights[-1]
        return area_under_curve((x @ kernel + bias)[:, 0] + wide, self._labels)


def epochs_callback(
    keras: Any,
    session: Session,
    job: Job,
    layers: list,
    read_rows: Callable[[np.ndarray], np.ndarray],
    read_counters: Callable[[], dict[str, float]],
) -> Any:
    """A callback that tells the benchmark of every epoch.

    Args:
      keras: the module, Keras 3 or tf_keras.
      session: with the benchmark.
      job: names the held-out samples.
      layers: the dense layers.
      read_rows: int64 keys -> their rows.
      read_counters: what the library counts; nothing: {}.
    """
    held_out = HeldOut(job)

    class Epochs(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._before = read_counters()
            session.begin_epoch()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            session.end_epoch()
            counters = {n: v - self._before.get(n, 0) for n, v in read_counters().items()}
            weights = [tuple(np.asarray(w) for w in layer.get_weights()) for layer in layers]
            dense_bytes = sum(part.nbytes for layer in weights for part in layer)
            auc = held_out.auc(read_rows(held_out.keys.astype(np.int64)), weights)
            session.report(counters=counters, dense_bytes=dense_bytes, auc=auc)

    return Epochs()
