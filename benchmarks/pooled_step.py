"""Time of a pooled training step beside the same with TensorFlow's pooling of the same rows.

A step is lookup, pooling, its gradient and the row-wise Adagrad update, of bags of 0 to 26 ids
drawn Zipf(1.05) from 1,000,000 keys, dim 64. Three ways to pool:

  het_tf       the pooled ops: Het>TablePool and Het>CachePool, and their updates
  TensorFlow   tf.nn.embedding_lookup_sparse on the row of every id
  unique       the same on the rows of unique ids, which tf.unique finds first

on a table in this process and on a worker's cache over a shard here (all rows cached, staleness
100). The ways take turns, step by step, so that a noisy machine hits them alike; figures are
medians of the steps, and of the ratios of neighbouring steps.
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import app, flags
from zipf import zipf_ids

from het_tf import ops, optimizers
from het_tf.cache_config import CacheConfig
from het_tf.tables.table import EmbeddingTable
from het_tf.tables.worker_cache import WorkerCache

_BAGS = flags.DEFINE_integer("bags", 1_024, "bags in a batch")
_LONGEST = flags.DEFINE_integer("longest", 26, "ids in the longest bag")
_ROWS = flags.DEFINE_integer("rows", 1_000_000, "keys that ids are drawn from")
_DIM = flags.DEFINE_integer("dim", 64, "columns of a row")
_THREADS = flags.DEFINE_integer("threads", 1, "of TensorFlow's pools")
_STEPS = flags.DEFINE_integer("steps", 60, "timed steps of each way")
_JSON = flags.DEFINE_string("json", None, "where to write the figures")

_BATCHES = 10  # different ones, used in turn
_RATE = 0.05

Step = Callable[..., tf.Tensor]


class Table:
    """A table in this process."""

    def __init__(self) -> None:
        self.table = EmbeddingTable(_DIM.value, optimizers.RowWiseAdagrad())

    def read(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.table.lookup_op(ids)

    def update(self, found: tf.Tensor, gradients: tf.Tensor) -> None:
        self.table.apply_op(found, gradients, tf.constant(_RATE), "error")

    def pool(self, ids: tf.Tensor, *arguments, **layout) -> tuple:
        return self.table.pool_op(ids, *arguments, **layout)

    def update_pooled(self, found: tf.Tensor, pooling: tf.Tensor, gradients: list) -> None:
        self.table.apply_pooled_op(found, pooling, gradients, tf.constant(_RATE), "error")


class Cache:
    """A cache that holds all rows, and its shard."""

    def __init__(self) -> None:
        table = EmbeddingTable(_DIM.value, optimizers.RowWiseAdagrad())
        self.cache = WorkerCache(table, CacheConfig(_ROWS.value, staleness=100))

    def read(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.cache.lookup_op(ops.unique_ids(ids))

    def update(self, ticket: tf.Tensor, gradients: tf.Tensor) -> None:
        self.cache.update_op(ticket, gradients, tf.constant(_RATE))

    def pool(self, ids: tf.Tensor, *arguments, **layout) -> tuple:
        ticket = self.cache.installed_op(ops.unique_ids(ids))
        outputs, pooling = self.cache.pool_op(ticket, *arguments, **layout)
        return outputs, ticket, pooling

    def update_pooled(self, ticket: tf.Tensor, pooling: tf.Tensor, gradients: list) -> None:
        self.cache.update_pooled_op(ticket, pooling, gradients, tf.constant(_RATE))


def fused_step(store: Table | Cache, combiner: str) -> Step:
    """By the pooled ops. A step takes ids, splits, weights ([0]: none) and output gradients."""

    def step(ids, splits, weights, gradients):
        layout = {"combiners": [combiner], "bag_sizes": [1]}
        (pooled,), found, pooling = store.pool(ids, [splits], [weights], **layout)
        total = tf.reduce_sum(pooled[0])
        if weights.shape != [0]:
            total += ops.pooling_gradient(pooling, [gradients])[0][0]
        store.update_pooled(found, pooling, [gradients])
        return total

    return step


def tensorflow_step(store: Table | Cache, combiner: str, unique: bool) -> Step:
    """By TensorFlow's op, on the rows of all ids or of unique ones."""

    def step(ids, splits, weights, gradients):
        n, bags = tf.size(ids, tf.int64), tf.size(splits, tf.int64) - 1
        keys, places = tf.unique(ids, tf.int64) if unique else (ids, tf.range(n))
        rows, found = store.read(keys)
        bag_of = tf.repeat(tf.range(bags), splits[1:] - splits[:-1])
        where = tf.stack([bag_of, tf.range(n) - tf.gather(splits, bag_of)], 1)
        shape = [bags, _LONGEST.value]
        weighted = weights.shape != [0]
        with tf.GradientTape() as tape:
            tape.watch([rows, weights])
            pooled = tf.nn.embedding_lookup_sparse(
                rows,
                tf.SparseTensor(where, places, shape),
                tf.SparseTensor(where, weights, shape) if weighted else None,
                combiner=combiner,
                allow_fast_lookup=True,
            )
        sources = [rows, weights] if weighted else [rows]
        of_rows, *of_weights = tape.gradient(pooled, sources, gradients[: tf.shape(pooled)[0]])
        store.update(found, tf.convert_to_tensor(of_rows))
        return tf.reduce_sum(pooled[0]) + (of_weights[0][0] if weighted else 0.0)

    return step


def batches(rng: np.random.Generator, weighted: bool) -> list[tuple[tf.Tensor, ...]]:
    made = []
    for _ in range(_BATCHES):
        lengths = rng.integers(0, _LONGEST.value + 1, _BAGS.value)
        lengths[-1] = 1  # TensorFlow's op leaves out the last bags that are empty
        splits = np.concatenate([[0], np.cumsum(lengths)])
        weights = rng.uniform(0.5, 2.0, splits[-1] if weighted else 0)
        gradients = rng.normal(scale=0.01, size=(_BAGS.value, _DIM.value))
        ids = zipf_ids(rng, _ROWS.value, 1.05, int(splits[-1]))
        floats = (tf.constant(x, tf.float32) for x in (weights, gradients))
        made.append((tf.constant(ids), tf.constant(splits, tf.int64), *floats))
    return made


def times_ms(steps: dict[str, Step], given: list[tuple[tf.Tensor, ...]]) -> dict[str, np.ndarray]:
    """Of every step, the ways in turn."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    for i in range(len(given) + _STEPS.value):
        for way, step in steps.items():
            start = time.perf_counter()
            step(*given[i % len(given)]).numpy()
            if i >= len(given):  # warm
                times[way].append(1000 * (time.perf_counter() - start))
    return {way: np.array(each) for way, each in times.items()}


def traced(step: Step, weighted: bool) -> Step:
    ids = tf.TensorSpec([None], tf.int64)
    floats = tf.TensorSpec([None] if weighted else [0]), tf.TensorSpec([None, _DIM.value])
    return tf.function(step, input_signature=[ids, ids, *floats], autograph=False)


def main(argv: list[str]) -> None:
    del argv
    tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
    tf.config.threading.set_inter_op_parallelism_threads(_THREADS.value)
    print(
        f"{_BAGS.value:,} bags of up to {_LONGEST.value} ids of {_ROWS.value:,}, dim {_DIM.value},"
        f" {_THREADS.value} threads; ms a step, and het_tf's over TensorFlow's"
    )
    figures = []
    for kind in (Table, Cache):
        for combiner, weighted in (("sum", False), ("mean", False), ("mean", True)):
            given = batches(np.random.default_rng(1), weighted)
            steps = {
                "het_tf": fused_step(kind(), combiner),
                "TensorFlow": tensorflow_step(kind(), combiner, unique=False),
                "unique": tensorflow_step(kind(), combiner, unique=True),
            }
            times = times_ms({way: traced(x, weighted) for way, x in steps.items()}, given)
            medians = {way: float(np.median(each)) for way, each in times.items()}
            ratios = {
                way: float(np.median(times["het_tf"] / each))
                for way, each in times.items()
                if way != "het_tf"
            }
            what = f"{kind.__name__.lower()}, {combiner}{', weights' if weighted else ''}"
            said = "".join(f"{way + f' {ms:.3f}':>20}" for way, ms in medians.items())
            print(
                f"{what:22}{said}   " + "  ".join(f"{r:.2f}" for r in ratios.values()), flush=True
            )
            figures.append({"case": what, "ms": medians, "ratio": ratios})
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    app.run(main)
