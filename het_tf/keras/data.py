"""Choosing the feed for what a user passes to `fit`, `evaluate` or `predict`."""

from __future__ import annotations

import functools
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
    dataset = weighed(inputs.as_dataset(x, y, sample_weight, batch_size, shuffle, steps))
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
    return StreamFeed(inputs.as_dataset(x, y, sample_weight, batch_size, steps=steps), steps)


class Validation:
    """What `fit` validates on, and when.

    Attributes:
      had_batches: whether it has validated.
    """

    def __init__(
        self,
        strategy: HetParameterServerStrategy,
        data: Any,
        *,
        batch_size: int | None,
        steps: int | None,
        freq: int | list[int],
    ):
        """Takes arguments of `fit`; the data is not looked at before the first time.

        Args:
          strategy: names the workers.
          data: a function, a dataset, or arrays `(x, y)` or `(x, y, sample_weight)`; None: never.
          batch_size: examples per batch, for arrays only.
          steps: batches; all when None.
          freq: Keras's `validation_freq`.
        """
        self._strategy = strategy
        self._data = data
        self._batch_size = batch_size
        self._steps = steps
        self._freq = freq
        self.had_batches = False

    @functools.cached_property
    def feed(self) -> Feed:
        """Its batches."""
        data = self._data
        if not isinstance(data, (tuple, list)):
            return eval_feed(self._strategy, data, steps=self._steps)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(data))
        return eval_feed(
            self._strategy, x, y, sample_weight, batch_size=self._batch_size, steps=self._steps
        )

    def is_due(self, epoch: int) -> bool:
        """Whether `fit` validates after this epoch, the first of which is 0."""
        if self._data is None:
            return False
        if isinstance(self._freq, int):
            return (epoch + 1) % self._freq == 0
        return epoch + 1 in self._freq


def predict_feed(x: Any, batch_size: int | None, steps: int | None) -> StreamFeed:
    """The feed for `predict`; the arguments are those of `het_tf.keras.Model.predict`."""
    if inputs.is_dataset_function(x):
        inputs.check_alone(None, None, batch_size, "a function")
        return StreamFeed(inputs.call_once(x), steps)
    return StreamFeed(inputs.as_dataset(x, batch_size=batch_size, steps=steps), steps)
