"""Many threads at once on shards and caches: nothing lost, nothing doubled."""

import contextlib
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf
from ops_system import OpsSystem, flush, step
from schedules import Setup
from small_tables import name

import het_tf
from het_tf import ops, optimizers
from het_tf.tables.worker_cache import WorkerCache

THREADS, STEPS, KEYS = 4, 60, 20


def batches(thread: int) -> list[np.ndarray]:
    random = np.random.default_rng(thread)
    return [random.choice(KEYS, 6, replace=False) for _ in range(STEPS)]


def in_threads(run) -> None:
    with futures.ThreadPoolExecutor(THREADS) as pool:
        for each in [pool.submit(run, thread) for thread in range(THREADS)]:
            each.result()


@pytest.mark.parametrize(
    ("clock", "staleness"), [("count", 0), ("count", 3), ("lamport", 3), ("count", None)]
)
def test_b_workers_that_sync_with_the_same_shards_at_once(clock, staleness):
    bounds = {"read_bound": staleness, "write_bound": staleness}
    setup = Setup(THREADS, 2, capacity=7, clock=clock, **bounds)
    with contextlib.closing(OpsSystem(setup)) as system:

        def work(worker: int) -> None:
            seen = np.zeros(KEYS)
            for number, keys in enumerate(batches(worker)):
                grads = np.zeros((len(keys), setup.dim))
                grads[:, worker] = -1
                rows = step(system, worker, keys, grads)
                np.testing.assert_array_equal(rows[:, worker], seen[keys])  # its own, always
                seen[keys] += 1
                if number % 20 == 19:
                    flush(system, worker)

        in_threads(work)
        for worker in range(THREADS):
            flush(system, worker)
        table = system.table()
        made = [
            np.bincount(np.concatenate(batches(each)), minlength=KEYS) for each in range(THREADS)
        ]
        for key in range(KEYS):
            value, _, merged = table[key]
            assert value[:THREADS].tolist() == [each[key] for each in made]
            if clock == "count":
                assert merged == sum(each[key] for each in made)


@pytest.mark.parametrize("config", [het_tf.CacheConfig(5, staleness=2), None])
def test_b_steps_that_share_a_cache_at_once(config):
    """As closures do that a coordinator schedules on one worker."""
    table = het_tf.EmbeddingTable(1, optimizers.SGD(1.0), initializer="zeros", name=name())
    cache = WorkerCache(table, config)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(keys):
        _, ticket = cache.lookup_op(ops.unique_ids(keys))
        cache.update_op(ticket, -tf.ones([tf.size(keys), 1]), tf.constant(1.0))

    in_threads(lambda thread: [step(keys) for keys in batches(thread)])
    tf.function(cache.flush_op)()
    every = np.concatenate([keys for thread in range(THREADS) for keys in batches(thread)])
    made = np.bincount(every.ravel(), minlength=KEYS)
    np.testing.assert_array_equal(table.lookup(np.arange(KEYS))[:, 0], made)
    rows = table.export()
    assert dict(zip(rows.keys, rows.clocks, strict=True)) == dict(enumerate(made))


def test_b_updates_of_a_local_table_at_once():
    table = het_tf.EmbeddingTable(1, optimizers.SGD(1.0), initializer="zeros")

    def work(thread: int) -> None:
        for keys in batches(thread):
            gradients = -tf.ones([len(keys), 1])
            table.apply_op(ops.unique_ids(tf.constant(keys)), gradients, tf.constant(1.0), "error")
            assert table.lookup(keys).min() >= 1

    in_threads(work)
    assert table.export().clocks.sum() == table.lookup(np.arange(KEYS)).sum() == THREADS * STEPS * 6
