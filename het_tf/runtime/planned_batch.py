"""Batches of `het_tf.data` with what `fit` must know about them."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class PlannedBatch(NamedTuple):
    """A batch of `location_aware(on_demand=True)`, and what its plan says.

    Attributes:
      batch: the batch.
      keys: int64 [ids], all keys that the plan expects the batch to look up.
      due: int64 [keys], the rows whose updates the worker pushes before it looks up the batch.
      step: int64 scalar, number of the planned step.
    """

    batch: Any
    keys: tf.Tensor
    due: tf.Tensor
    step: tf.Tensor


class PhasedBatch(NamedTuple):
    """A batch of `hot_batches`.

    Attributes:
      batch: the batch.
      phase: the examples of all batches of a hot phase, in its first batch. Otherwise no examples.
      hot: bool scalar, whether the batch is of a hot phase.
    """

    batch: Any
    phase: Any
    hot: tf.Tensor


def batch_spec(element_spec: Any) -> Any:
    """Returns the spec of the batch in an element of a dataset."""
    is_more = isinstance(element_spec, (PlannedBatch, PhasedBatch))
    return element_spec.batch if is_more else element_spec


def check_plain(x: Any) -> None:
    """Raises ValueError if `x` is a dataset of `PlannedBatch` or `PhasedBatch`."""
    if isinstance(x, tf.data.Dataset) and batch_spec(x.element_spec) is not x.element_spec:
        raise ValueError(
            "x is a dataset of hot_batches or location_aware(on_demand=True), which is the share of"
            " a worker: under HetParameterServerStrategy, pass a function of a"
            " tf.distribute.InputContext that returns it"
        )


def unplanned(batch: Any) -> PlannedBatch:
    """Returns a batch without a plan."""
    none = tf.zeros([0], tf.int64)
    return PlannedBatch(batch, none, none, tf.constant(-1, tf.int64))


def fingerprint(keys: tf.Tensor) -> tf.Tensor:
    """Returns a number that depends on the keys and not on their order, int64 scalar."""
    mixed = tf.reshape(keys, [-1]) * tf.constant(-0x61C8864680B583EB, tf.int64)
    mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, tf.constant(31, tf.int64)))
    return tf.reduce_sum(mixed * tf.constant(-0x40A7B892E31B1A47, tf.int64))
