"""One program of local_step.py in a process of its own: het_tf's table or cache, or TensorFlow.

local_step_program.py PROGRAM IDS.npy ROWS DIM THREADS STEPS; the last line is JSON: milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

Part = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Program:
    """Forward pass, and step, of ids and gradients [ids, dim]; what they return is looked at."""

    forward: Part
    step: Part
    touches_rows: bool = True  # its rows come into being by steps


def tensorflow_program(rows: int, dim: int) -> Program:
    """tf.gather and the sparse Adagrad op on a variable of all rows."""
    values = tf.Variable(tf.random.uniform([rows, dim], -0.05, 0.05))
    accumulator = tf.Variable(tf.fill([rows, dim], 0.1))

    def forward(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        del gradients
        return tf.reduce_sum(tf.gather(values, ids)[0])

    def step(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        looked_up = tf.gather(values, ids)
        unique, places = tf.unique(ids)
        summed = tf.math.unsorted_segment_sum(gradients, places, tf.size(unique))
        with tf.control_dependencies([looked_up]):
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=values.handle,
                accum=accumulator.handle,
                lr=0.05,
                epsilon=1e-7,
                grad=summed,
                indices=unique,
            )
        return tf.reduce_sum(looked_up[0])

    return Program(forward, step, touches_rows=False)


def table_program(rows: int, dim: int) -> Program:
    """The ops of a layer without a strategy."""
    from het_tf import optimizers
    from het_tf.tables.table import EmbeddingTable

    del rows
    table = EmbeddingTable(dim, optimizers.RowWiseAdagrad())
    rate = tf.constant(0.05)

    def forward(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        del gradients
        return tf.reduce_sum(table.lookup_op(ids)[0][0])

    def step(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        looked_up, found = table.lookup_op(ids)
        table.apply_op(found, gradients, rate, "error")
        return tf.reduce_sum(looked_up[0])

    return Program(forward, step)


def cache_program(rows: int, dim: int) -> Program:
    """A cache that holds all rows, and its shard."""
    from het_tf import ops, optimizers
    from het_tf.cache_config import CacheConfig
    from het_tf.tables.table import EmbeddingTable
    from het_tf.tables.worker_cache import WorkerCache

    table = EmbeddingTable(dim, optimizers.RowWiseAdagrad())
    cache = WorkerCache(table, CacheConfig(rows, staleness=100))
    rate = tf.constant(0.05)

    def forward(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        del gradients
        looked_up, _ = cache.lookup_op(ops.unique_ids(ids))
        return tf.reduce_sum(looked_up[0])

    def step(ids: tf.Tensor, gradients: tf.Tensor) -> tf.Tensor:
        looked_up, ticket = cache.lookup_op(ops.unique_ids(ids))
        cache.update_op(ticket, gradients, rate)
        return tf.reduce_sum(looked_up[0])

    return Program(forward, step)


PROGRAMS = {"table": table_program, "cache": cache_program, "TensorFlow": tensorflow_program}


def looped(step: Part, batches: tf.Tensor, gradients: tf.Tensor) -> Callable[[int], tf.Tensor]:
    """That many steps in one graph, batches [batches, ids] in turn."""

    @tf.function(autograph=False)
    def run(steps: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, total + step(batches[i % batches.shape[0]], gradients)

        return tf.while_loop(
            lambda i, _: i < steps, body, [tf.constant(0), tf.constant(0.0)], parallel_iterations=1
        )[1]

    return lambda steps: run(tf.constant(steps))


def median_ms(run: Callable[[int], object], repeats: int) -> float:
    """Of calls run(i)."""
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        run(i)
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))


def main() -> None:
    name, path, *numbers = sys.argv[1:]
    rows, dim, threads, steps = map(int, numbers)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    batches = tf.constant(np.load(path))
    n = batches.shape[1]
    gradients = tf.random.stateless_normal([n, dim], (1, 2), stddev=0.01)
    program = PROGRAMS[name](rows, dim)
    each = [tf.constant(ids) for ids in batches.numpy()]
    forward, step = (tf.function(part, autograph=False) for part in (program.forward, program.step))
    if program.touches_rows:
        size = max(n, 10_000)
        zeros = tf.zeros([size, dim])
        for first in range(0, rows, size):
            ids = tf.range(first, first + size, dtype=tf.int64) % rows
            step(ids, zeros)
    loop = looped(program.step, batches, gradients)
    for ids in each:  # warms up
        forward(ids, gradients).numpy()
        step(ids, gradients).numpy()
    loop(len(each)).numpy()
    said = {
        "forward": median_ms(lambda i: forward(each[i % len(each)], gradients).numpy(), steps),
        "step": median_ms(lambda i: step(each[i % len(each)], gradients).numpy(), steps),
        "loop": median_ms(lambda i: loop(len(each)).numpy(), -(-steps // len(each))) / len(each),
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
