"""Choosing the feed for what a user passes to `fit`, `evaluate` or `predict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from het_tf.distribute import HetParameterServerStrategy
from het_tf.keras import inputs
from het_tf.keras.feeds import Feed, StreamFeed, WorkerFeed


def train_feed(
    strategy: HetParameterServerStrategy,
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    batch_size: int | None,
    shuffle: bool,
    steps: int | None,
    class_weight: Mapping[int, float] | None,
) -> Feed:
    """The feed for `fit`; the arguments are those of `het_tf.keras.Model.fit`."""
    if class_weight is not None and sample_weight is not None:
        raise ValueError("class_weight and sample_weight cannot be given together.")

    def weighed(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset if class_weight is None else inputs.weigh_classes(dataset, class_weight)

    if inputs.is_dataset_function(x):
        inputs.check_alone(y, sample_weight, batch_size, "a function")
        x = inputs.shares_or_dataset(x)
    if strategy.exactly_once and inputs.is_dataset_function(x):
        raise ValueError(
            "With exactly_once the batches of a closure must be the same whoever runs it, but a"
            " function of a tf.distribute.InputContext has every worker read its own: pass a"
            " dataset, or a function without arguments that returns one."
        )
    if inputs.is_dataset_function(x):
        return WorkerFeed(strategy, inputs.then(x, weighed), steps, endless=steps is not None)
    dataset = weighed(inputs.as_dataset(x, y, sample_weight, batch_size, shuffle))
    if steps is None or not isinstance(x, tf.data.Dataset) or strategy.exactly_once:
        return StreamFeed(dataset, steps, endless=steps is not None)
    copy = inputs.as_copies(dataset)
    if copy is None:
        logging.info("the dataset needs this process, so its batches are sent from here")
        return StreamFeed(dataset, steps, endless=True)

    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return copy().repeat().shard(context.num_input_pipelines, context.input_pipeline_id)

    return WorkerFeed(strategy, share, steps, endless=True)


def eval_feed(
    strategy: HetParameterServerStrategy,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
) -> Feed:
    """The feed for `evaluate`; the arguments are those of `het_tf.keras.Model.evaluate`."""
    if inputs.is_dataset_function(x):
        inputs.check_alone(y, sample_weight, batch_size, "a function")
        x = inputs.shares_or_dataset(x)
    if inputs.is_dataset_function(x):
        return WorkerFeed(strategy, x, steps)
    return StreamFeed(inputs.as_dataset(x, y, sample_weight, batch_size), steps)


def validation_feed(
    strategy: HetParameterServerStrategy, data: Any, batch_size: int | None, steps: int | None
) -> Feed:
    """The feed for `validation_data` of `fit`.

    Args:
      strategy: names the workers.
      data: a function, a dataset, or arrays `(x, y)` or `(x, y, sample_weight)`.
      batch_size: examples per batch, for arrays only.
      steps: batches; all when None.
    """
    if not isinstance(data, (tuple, list)):
        return eval_feed(strategy, data, steps=steps)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(data))
    return eval_feed(strategy, x, y, sample_weight, batch_size=batch_size, steps=steps)


def predict_feed(x: Any, batch_size: int | None, steps: int | None) -> StreamFeed:
    """The feed for `predict`; the arguments are those of `het_tf.keras.Model.predict`."""
    if inputs.is_dataset_function(x):
        inputs.check_alone(None, None, batch_size, "a function")
        return StreamFeed(inputs.call_once(x), steps)
    return StreamFeed(inputs.as_dataset(x, batch_size=batch_size), steps)
