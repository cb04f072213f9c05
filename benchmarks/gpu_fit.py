"""Examples per second of `fit` on a GPU, by where the rows are.

A process without a strategy trains embeddings of 26 ids an example, drawn Zipf(1.05), and a dense
network of 1024, 512 and 256 units, in batches of several sizes:

  host   HetEmbedding: rows on the host, row-wise Adagrad; they cross the bus
  gpu    the same with device_capacity: the rows of all ids have a place on the GPU
  keras  keras.layers.Embedding on the GPU, Adagrad

The first epoch is not counted; figures are medians of three. Needs ops built with CUDA and a GPU
that TensorFlow sees; --device=CPU takes the host build in the GPU's place, to see that it runs.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from zipf import zipf_ids

import het_tf
import het_tf.keras
from het_tf import optimizers
from het_tf.layers import HetEmbedding

_BATCHES = flags.DEFINE_list("batches", ["2048", "16384"], "examples in a batch")
_ROWS = flags.DEFINE_integer("rows", 5_000_000, "keys that ids are drawn from")
_DIM = flags.DEFINE_integer("dim", 64, "columns of a row")
_STEPS = flags.DEFINE_integer("steps", 40, "steps of an epoch", lower_bound=2)
_DEVICE = flags.DEFINE_enum("device", "GPU", ["GPU", "CPU"], "of CacheConfig")
_JSON = flags.DEFINE_string("json", None, "where to write the figures")

_FIELDS = 26
_EPOCHS = 3  # that are timed


def embedding(where: str) -> keras.layers.Layer:
    if where == "keras":
        return keras.layers.Embedding(_ROWS.value, _DIM.value)
    cache = het_tf.CacheConfig(device_capacity=_ROWS.value, device=_DEVICE.value)
    optimizer = optimizers.RowWiseAdagrad(0.01)
    return HetEmbedding(_DIM.value, optimizer=optimizer, cache=cache if where == "gpu" else None)


def model(where: str) -> keras.Model:
    inputs = keras.Input((_FIELDS,), dtype="int64")
    x = keras.layers.Flatten()(embedding(where)(inputs))
    for units in (1024, 512, 256):
        x = keras.layers.Dense(units, "relu")(x)
    made = (keras.Model if where == "keras" else het_tf.keras.Model)(
        inputs, keras.layers.Dense(1)(x)
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adagrad(0.01), loss, jit_compile=False)
    return made


def milliseconds(where: str, batch: int) -> float:
    """Returns the time of a step."""
    rng = np.random.default_rng(1)
    n = _STEPS.value * batch
    ids = zipf_ids(rng, _ROWS.value, 1.05, (n, _FIELDS))
    labels = rng.integers(0, 2, (n, 1)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(batch).cache().prefetch(4)
    trained = model(where)
    trained.fit(data, verbose=0)
    times = []
    for _ in range(_EPOCHS):
        begin = time.perf_counter()
        trained.fit(data, verbose=0)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / _STEPS.value * 1e3


def main(argv: list[str]) -> None:
    del argv
    figures = []
    print("batch   rows   ms/step    examples/s")
    for batch in map(int, _BATCHES.value):
        for where in ("host", "gpu", "keras"):
            ms = milliseconds(where, batch)
            figures.append({"batch": batch, "rows": where, "ms": ms})
            print(f"{batch:>6} {where:>5} {ms:>9.2f} {batch / ms * 1e3:>13,.0f}", flush=True)
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(figures))


if __name__ == "__main__":
    app.run(main)
