"""Batches of `het_tf.data.location_aware(on_demand=True)`, as `fit` reads them."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class PlannedBatch(NamedTuple):
    """A batch, and what its plan says.

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


def unplanned(batch: Any) -> PlannedBatch:
    """Returns a batch without a plan."""
    none = tf.zeros([0], tf.int64)
    return PlannedBatch(batch, none, none, tf.constant(-1, tf.int64))


def fingerprint(keys: tf.Tensor) -> tf.Tensor:
    """Returns a number that depends on the keys and not on their order, int64 scalar."""
    mixed = tf.reshape(keys, [-1]) * tf.constant(-0x61C8864680B583EB, tf.int64)
    mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, tf.constant(31, tf.int64)))
    return tf.reduce_sum(mixed * tf.constant(-0x40A7B892E31B1A47, tf.int64))
