"""Time of one training step on one table in one process, against TensorFlow's own ops.

A step is lookup, backward pass and row-wise Adagrad update of 13,312 ids drawn Zipf(1.05) from
1,000,000, dim 64, in a tf.function (DESIGN section 5). The programs take turns, so that a noisy
machine hits them alike; figures are medians.

  TensorFlow      tf.gather, and the sparse Adagrad op on the same ids with duplicates summed
  table           Het>TableLookup and Het>TableApply: what a layer does without a strategy
  cache           a worker's cache over a shard in this process: all rows cached, staleness 100
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import app, flags
from zipf import zipf_ids

from het_tf import ops, optimizers
from het_tf.cache import CacheConfig, WorkerCache
from het_tf.table import EmbeddingTable

_IDS = flags.DEFINE_integer("ids", 13_312, "ids in a batch")
_ROWS = flags.DEFINE_integer("rows", 1_000_000, "keys that ids are drawn from")
_DIM = flags.DEFINE_integer("dim", 64, "columns of a row")
_EXPONENT = flags.DEFINE_float("exponent", 1.05, "of the Zipf distribution")
_STEPS = flags.DEFINE_integer("steps", 200, "timed steps of each program")
_BATCHES = flags.DEFINE_integer("batches", 20, "different batches, used in turn")

Step = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def tensorflow_step() -> tuple[Step, Step]:
    """tf.gather and the sparse Adagrad op on a variable of all rows."""
    values = tf.Variable(tf.random.uniform([_ROWS.value, _DIM.value], -0.05, 0.05))
    accumulator = tf.Variable(tf.fill([_ROWS.value, _DIM.value], 0.1))

    @tf.function
    def forward(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        del gradients
        return tf.reduce_sum(tf.gather(values, ids)[0])

    @tf.function
    def step(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        rows = tf.gather(values, ids)
        unique, places = tf.unique(ids)
        summed = tf.math.unsorted_segment_sum(gradients, places, tf.size(unique))
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=values.handle,
            accum=accumulator.handle,
            lr=0.05,
            epsilon=1e-7,
            grad=summed,
            indices=unique,
        )
        return tf.reduce_sum(rows[0])

    return forward, step


def table_step() -> tuple[Step, Step]:
    """The ops of a layer without a strategy."""
    table = EmbeddingTable(_DIM.value, optimizers.RowWiseAdagrad())
    rate = tf.constant(0.05)

    @tf.function
    def forward(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        del gradients
        return tf.reduce_sum(table.lookup_op(ops.unique_ids(ids))[0])

    @tf.function
    def step(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        batch = ops.unique_ids(ids)
        rows = table.lookup_op(batch)
        table.apply_op(batch, gradients, rate, "error")
        return tf.reduce_sum(rows[0])

    _touch_all_rows(step)
    return forward, step


def cache_step() -> tuple[Step, Step]:
    """A cache that holds all rows, and its shard."""
    table = EmbeddingTable(_DIM.value, optimizers.RowWiseAdagrad())
    cache = WorkerCache(table, CacheConfig(_ROWS.value, staleness=100))
    rate = tf.constant(0.05)

    @tf.function
    def forward(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        del gradients
        rows, _ = cache.lookup_op(ops.unique_ids(ids))
        return tf.reduce_sum(rows[0])

    @tf.function
    def step(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        rows, ticket = cache.lookup_op(ops.unique_ids(ids))
        cache.update_op(ticket, gradients, rate)
        return tf.reduce_sum(rows[0])

    _touch_all_rows(step)
    return forward, step


def _touch_all_rows(step: Step) -> None:
    for first in range(0, _ROWS.value, _IDS.value):
        ids = tf.range(first, min(first + _IDS.value, _ROWS.value), dtype=tf.int64)
        step(ids, tf.zeros([ids.shape[0], _DIM.value]))


def main(argv: list[str]) -> None:
    del argv
    rng = np.random.default_rng(1)
    batches = [
        tf.constant(zipf_ids(rng, _ROWS.value, _EXPONENT.value, _IDS.value))
        for _ in range(_BATCHES.value)
    ]
    gradients = tf.random.normal([_IDS.value, _DIM.value], stddev=0.01)
    unique = np.mean([np.unique(ids).size for ids in batches])
    programs = {"TensorFlow": tensorflow_step(), "table": table_step(), "cache": cache_step()}

    times: dict[tuple[str, str], list[float]] = {}
    for i in range(-_BATCHES.value, _STEPS.value):
        ids = batches[i % _BATCHES.value]
        for name, parts in programs.items():
            for part, run in zip(("forward", "step"), parts, strict=True):
                start = time.perf_counter()
                run(ids, gradients).numpy()
                if i >= 0:  # the first round warms up
                    times.setdefault((name, part), []).append(time.perf_counter() - start)

    print(f"{_IDS.value} ids, {unique:.0f} unique, of {_ROWS.value} rows, dim {_DIM.value}")
    print(f"{'':12}{'forward ms':>12}{'step ms':>12}{'step / TensorFlow':>20}")
    medians = {key: 1000 * float(np.median(values)) for key, values in times.items()}
    for name in programs:
        ratio = medians[name, "step"] / medians["TensorFlow", "step"]
        print(
            f"{name:12}{medians[name, 'forward']:12.3f}{medians[name, 'step']:12.3f}{ratio:20.2f}"
        )


if __name__ == "__main__":
    app.run(main)
