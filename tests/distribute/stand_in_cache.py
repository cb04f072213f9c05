"""Stands in for a cache: what it reports is kept in a hash table of the worker."""

from __future__ import annotations

import tensorflow as tf

_WORKER, _ID, _PENDING, _UPDATES = range(4)
UNKNOWN = -1


class StandInCache:
    """A `het_tf.distribute.WorkerCache` without rows."""

    name = "stand-in"

    def __init__(self, shared_name: str):
        self._shared_name = shared_name

    def update_op(self, updates: int) -> tf.Operation:
        """Counts updates that are not sent. Within a closure."""
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        before = tf.maximum(self.report_op(), 0)
        return self._write(
            [_WORKER, _ID, _PENDING, _UPDATES],
            [worker, 1000 + worker, before[_PENDING] + updates, before[_UPDATES] + updates],
        )

    def flush_op(self) -> tf.Tensor:
        with tf.control_dependencies([self._write([_PENDING], [0])]):
            return tf.constant(0)

    def report_op(self) -> tf.Tensor:
        return tf.raw_ops.LookupTableFindV2(
            table_handle=self._table(),
            keys=tf.range(4, dtype=tf.int64),
            default_value=tf.constant(UNKNOWN, tf.int64),
        )

    def _table(self) -> tf.Tensor:
        return tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.int64, value_dtype=tf.int64, shared_name=self._shared_name
        )

    def _write(self, fields: list[int], values: list) -> tf.Operation:
        return tf.raw_ops.LookupTableInsertV2(
            table_handle=self._table(),
            keys=tf.constant(fields, tf.int64),
            values=tf.stack([tf.cast(value, tf.int64) for value in values]),
        )
