"""Time of a training step of many features beside that of one lookup of all their ids.

  concatenated  one HetEmbedding, called with ids [batch, features]
  stacked       the same, with ids [batch] of each feature, which the model stacks
  joined        the same, with rows of each feature, which the model joins again
  collection    HetEmbeddingCollection(concatenate=True), with ids [batch] of each feature, and as
                many tables
  apart         the same without concatenate: the model joins the rows

All hand [batch, features * dim] to a loss. Steps take turns, so that a noisy machine hits them
alike; figures are medians of the steps, and of the ratios of neighbouring steps. What `stacked`
takes more than `concatenated` is TensorFlow's, for as many inputs as features, and `joined` more,
to copy the rows and their gradients once more. --run=fit times epochs of fit instead, which take
turns, too; --run=cluster those with one worker and one parameter server.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from zipf import zipf_ids

import het_tf
from het_tf import optimizers
from het_tf.layers import FeatureConfig, HetEmbedding, HetEmbeddingCollection, TableConfig

_FEATURES = flags.DEFINE_integer("features", 26, "features, each with a table of its own")
_BATCH = flags.DEFINE_integer("batch", 512, "examples in a batch")
_ROWS = flags.DEFINE_integer("rows", 40_000, "keys of a table")
_DIM = flags.DEFINE_integer("dim", 64, "columns of a row")
_THREADS = flags.DEFINE_integer("threads", 1, "of TensorFlow's pools")
_STEPS = flags.DEFINE_integer("steps", 100, "timed steps; of fit in an epoch, of 7")
_RUN = flags.DEFINE_enum(
    "run",
    "steps",
    ["steps", "fit", "cluster"],
    "steps that a loop calls one by one; fit in one process; fit on a cluster",
)
_JSON = flags.DEFINE_string("json", None, "file of the figures; it keeps those of other --run")

_BATCHES = 20  # different ones, used in turn
_SEED = 1


def names() -> list[str]:
    return [f"f{i}" for i in range(_FEATURES.value)]


def concatenated(cache: het_tf.CacheConfig | None) -> keras.Model:
    inputs = keras.Input((_FEATURES.value,), dtype="int64")
    layer = HetEmbedding(_DIM.value, optimizer=optimizers.RowWiseAdagrad(), cache=cache)
    return het_tf.keras.Model(inputs, keras.layers.Flatten()(layer(inputs)))


def inputs_of_features() -> dict[str, keras.KerasTensor]:
    return {name: keras.Input((), dtype="int64", name=name) for name in names()}


def stacked(cache: het_tf.CacheConfig | None) -> keras.Model:
    inputs = inputs_of_features()
    keys = keras.ops.stack([inputs[name] for name in names()], 1) + first_keys()
    layer = HetEmbedding(_DIM.value, optimizer=optimizers.RowWiseAdagrad(), cache=cache)
    return het_tf.keras.Model(inputs, keras.layers.Flatten()(layer(keys)))


def joined(cache: het_tf.CacheConfig | None) -> keras.Model:
    inputs = inputs_of_features()
    keys = keras.ops.stack([inputs[name] for name in names()], 0) + first_keys()[:, np.newaxis]
    layer = HetEmbedding(_DIM.value, optimizer=optimizers.RowWiseAdagrad(), cache=cache)
    rows = keras.ops.unstack(layer(keys), axis=0)
    return het_tf.keras.Model(inputs, keras.layers.Concatenate()(rows))


def features() -> dict[str, FeatureConfig]:
    return {
        name: FeatureConfig(
            name,
            TableConfig(
                name,
                _ROWS.value,
                _DIM.value,
                initializer="uniform",
                optimizer=optimizers.RowWiseAdagrad(),
            ),
        )
        for name in names()
    }


def collection(cache: het_tf.CacheConfig | None) -> keras.Model:
    inputs = inputs_of_features()
    layer = HetEmbeddingCollection(features(), cache=cache, concatenate=True)
    return het_tf.keras.Model(inputs, layer(inputs))


def apart(cache: het_tf.CacheConfig | None) -> keras.Model:
    inputs = inputs_of_features()
    outputs = HetEmbeddingCollection(features(), cache=cache)(inputs)
    rows = keras.layers.Concatenate()([outputs[name] for name in names()])
    return het_tf.keras.Model(inputs, rows)


MODELS: dict[str, Callable[[het_tf.CacheConfig | None], keras.Model]] = {
    "concatenated": concatenated,
    "stacked": stacked,
    "joined": joined,
    "collection": collection,
    "apart": apart,
}


def first_keys() -> np.ndarray:
    """Of the features: each has keys of its own."""
    return np.arange(_FEATURES.value) * _ROWS.value


def given(way: str, ids: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
    """ids [..., features] as a model of that way takes them."""
    if way == "concatenated":
        return ids + first_keys()
    return {name: ids[..., i] for i, name in enumerate(names())}


def step_of(model: keras.Model) -> Callable[..., tf.Tensor]:
    @tf.function(autograph=False)
    def step(inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(inputs, training=True)) * 1e-3
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign(gradient)  # as an optimizer does
        return loss

    return step


def times_of_steps(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Milliseconds of steps in this process."""
    steps = {way: step_of(make(None)) for way, make in MODELS.items()}
    batches = {
        way: [tf.nest.map_structure(tf.constant, given(way, each)) for each in ids] for way in steps
    }
    times: dict[str, list[float]] = {way: [] for way in steps}
    for i in range(2 * _BATCHES + _STEPS.value):
        for way, step in steps.items():
            start = time.perf_counter()
            step(batches[way][i % _BATCHES]).numpy()
            if i >= 2 * _BATCHES:  # warm
                times[way].append(1000 * (time.perf_counter() - start))
    return {way: np.array(each) for way, each in times.items()}


def dataset_of(way: str, ids: np.ndarray) -> tf.data.Dataset:
    examples = given(way, ids), np.zeros(len(ids), np.float32)
    return tf.data.Dataset.from_tensor_slices(examples).batch(_BATCH.value).cache()


def times_of_fit(ids: np.ndarray, scope: Callable[[], Any], **cached: Any) -> dict[str, np.ndarray]:
    """Milliseconds of a step, from epochs of fit.

    Args:
      ids: int64 [batches, batch, features].
      scope: makes the context that models are made in.
      **cached: arguments of a `CacheConfig`; without any there is no cache.
    """
    ids = ids.reshape(-1, _FEATURES.value)
    models, data = {}, {}
    for way, make in MODELS.items():
        with scope():
            models[way] = make(het_tf.CacheConfig(**cached) if cached else None)
            models[way].compile("sgd", lambda y, x: keras.ops.mean(x), steps_per_execution=20)
        # Bound, because what takes an argument is given the worker's context.
        make_data = functools.partial(dataset_of, way, ids)
        data[way] = make_data if cached else make_data().repeat()
    times: dict[str, list[float]] = {way: [] for way in models}
    for epoch in range(9):
        for way, model in models.items():
            start = time.perf_counter()
            model.fit(data[way], steps_per_epoch=_STEPS.value, verbose=0)
            if epoch >= 2:
                times[way].append(1000 * (time.perf_counter() - start) / _STEPS.value)
    return {way: np.array(each) for way, each in times.items()}


def times_on_a_cluster(ids: np.ndarray) -> dict[str, np.ndarray]:
    """`times_of_fit` with one worker and one parameter server."""
    with het_tf.distribute.LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        rows = _FEATURES.value * _ROWS.value
        return times_of_fit(ids, strategy.scope, capacity=rows, staleness=100)


def main(argv: list[str]) -> None:
    del argv
    tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
    tf.config.threading.set_inter_op_parallelism_threads(_THREADS.value)
    rng = np.random.default_rng(_SEED)
    shape = (_BATCHES, _BATCH.value, _FEATURES.value)
    ids = zipf_ids(rng, _ROWS.value, 1.05, shape)
    if _RUN.value == "steps":
        times = times_of_steps(ids)
    elif _RUN.value == "fit":
        times = times_of_fit(ids, contextlib.nullcontext)
    else:
        times = times_on_a_cluster(ids)
    medians = {way: float(np.median(each)) for way, each in times.items()}
    ratios = {
        f"{ours} / {way}": float(np.median(times[ours] / times[way]))
        for ours in ("collection", "apart")
        for way in ("concatenated", "stacked", "joined")
    }
    where = {"steps": "in one process", "fit": "fit", "cluster": "fit on a cluster"}[_RUN.value]
    print(f"{_FEATURES.value} features, batch {_BATCH.value}, dim {_DIM.value}, {where}")
    print("  ".join(f"{way} {ms:.3f} ms" for way, ms in medians.items()))
    print("  ".join(f"{which} {ratio:.2f}" for which, ratio in ratios.items()))
    if _JSON.value:
        file = pathlib.Path(_JSON.value)
        figures = json.loads(file.read_text()) if file.exists() else {}
        figures[_RUN.value] = {"ms": medians, "ratios": ratios}
        file.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    app.run(main)
