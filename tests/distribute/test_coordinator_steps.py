"""Steps and reads outside of `coordinator.schedule`, in the process of the training program."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf.layers import HetEmbedding

STEPS = 30
IDS = np.array([1, 2])
CACHES = {
    "no cache": None,
    "staleness 100": het_tf.CacheConfig(100, staleness=100),
    "unbounded": het_tf.CacheConfig(100, staleness=None),
    "lamport": het_tf.CacheConfig(100, staleness=5, clock="lamport"),
}


def new_embedding(strategy, cache) -> HetEmbedding:
    with strategy.scope():
        embedding = HetEmbedding(
            2, optimizer=het_tf.optimizers.SGD(1.0), embeddings_initializer="zeros", cache=cache
        )
        embedding.build()
    return embedding


def step_of(embedding: HetEmbedding):
    """A function that subtracts 1 from the rows of IDS."""

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(embedding(IDS))
        train_rows(tape, loss, embedding)

    return step


def rows(embedding: HetEmbedding) -> list[list[float]]:
    return embedding.table.lookup(IDS).tolist()


WAYS = {
    "eager": lambda strategy, step: step,
    "tf.function": lambda strategy, step: tf.function(step),
    "strategy.run": lambda strategy, step: functools.partial(strategy.run, tf.function(step)),
}


@pytest.mark.parametrize(
    ("way", "cache"),
    [
        ("eager", "no cache"),
        ("tf.function", "unbounded"),
        ("strategy.run", "staleness 100"),
    ],
)
def test_updates_made_on_the_coordinator_are_in_the_table_after_flush(strategy, way, cache):
    embedding = new_embedding(strategy, CACHES[cache])
    step = WAYS[way](strategy, step_of(embedding))
    for _ in range(STEPS):
        step()
    embedding.flush()
    assert rows(embedding) == 2 * [2 * [-STEPS]]
    stats = embedding.cache_stats()
    assert (stats["updates"], stats["pending"]) == (2 * STEPS, 0)


def test_updates_of_the_coordinator_and_of_workers_add_up(strategy, caplog):
    embedding = new_embedding(strategy, CACHES["unbounded"])
    step = step_of(embedding)
    on_a_worker = tf.function(step)
    for _ in range(30):
        strategy.coordinator.schedule(on_a_worker)
        step()
    strategy.flush()
    assert rows(embedding) == 2 * [2 * [-60]]
    reports = strategy.held.last_cache_reports(embedding.worker_cache)
    assert sum(report.updates for report in reports.values()) == 60  # of the workers
    # The cache of worker 0 would be lost, were this the same worker.
    assert not [text for text in caplog.messages if "lost its cache" in text]


@pytest.mark.parametrize("cache", ["unbounded", "lamport"])
def test_reads_on_the_coordinator_see_what_was_flushed(strategy, cache):
    embedding = new_embedding(strategy, CACHES[cache])
    on_a_worker = tf.function(step_of(embedding))
    read = tf.function(lambda: embedding(IDS))
    for steps in (1, 2):
        strategy.coordinator.schedule(on_a_worker)
        strategy.flush()
        for values in embedding(IDS), read():
            assert values.numpy().tolist() == 2 * [2 * [-steps]]
    assert embedding.table.size() == 2


def test_saving_and_clearing_reach_the_coordinator(strategy, tmp_path):
    embedding = new_embedding(strategy, CACHES["unbounded"])
    step = step_of(embedding)
    step()
    path = tf.train.Checkpoint(embedding=embedding).save(str(tmp_path / "one"))
    assert rows(embedding) == 2 * [[-1, -1]]
    step()
    tf.train.Checkpoint(embedding=embedding).restore(path)
    assert embedding(IDS).numpy().tolist() == 2 * [[-1, -1]]
    step()
    embedding.flush()
    assert rows(embedding) == 2 * [[-2, -2]]
    embedding.table.clear()
    assert embedding(IDS).numpy().tolist() == 2 * [[0, 0]]
    assert embedding.cache_stats()["pending"] == 0
