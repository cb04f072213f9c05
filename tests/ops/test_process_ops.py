"""The ops that find what a process has by its numbers, and so from any client."""

import gc
import threading

import pytest
import tensorflow as tf
from small_tables import INVALID, installed_ticket, new_cache, new_table, unique

from het_tf import ops, optimizers
from het_tf.cache_config import CacheConfig
from het_tf.tables.table import EmbeddingTable
from het_tf.tables.worker_cache import WorkerCache


def shards_to_push():
    return {tuple(row) for row in ops.process_caches().numpy().tolist()}


def test_a_cache_is_listed_while_it_holds_updates():
    before = shards_to_push()
    table, cache = new_table(), new_cache()
    ticket = installed_ticket(cache, 1, 2, table=table)
    assert shards_to_push() == before
    ops.cache_update(cache, ticket, tf.ones([2, 2]), 1.0)
    ((cache_id, incarnation),) = shards_to_push() - before
    assert incarnation in ops.process_tables().numpy()

    same_cache, same_table = ops.process_cache(cache_id), ops.process_table(incarnation)
    ticket, (request,) = ops.cache_flush(same_cache, num_shards=1, all=True)
    ops.cache_install(same_cache, ticket, [ops.table_sync(same_table, request)])
    assert shards_to_push() == before
    assert ops.table_lookup(table, [1]).rows.numpy().tolist() == [[-1, -1]]


def test_a_cleared_table_has_another_number():
    table = new_table()
    before = set(ops.process_tables().numpy())
    ops.table_clear(table)
    after = set(ops.process_tables().numpy())
    assert len(before - after) == len(after - before) == 1


def test_what_is_gone_is_not_found():
    table = new_table()
    before = set(ops.process_tables().numpy())
    tf.raw_ops.DestroyResourceOp(resource=table)
    (gone,) = before - set(ops.process_tables().numpy())
    with pytest.raises(tf.errors.NotFoundError, match=f"the number {gone} in this process"):
        ops.process_table(gone)
    with pytest.raises(tf.errors.NotFoundError, match="the number 0 in this process"):
        ops.process_cache(0)


def test_caches_that_ended_are_remembered():
    cache = new_cache()
    everything = {row[0] for row in ops.process_caches(all=True).numpy().tolist()}
    held = {cache_id for cache_id, _ in shards_to_push()}
    assert everything > held
    ops.process_note_ended([2**62, -1])
    assert {2**62, -1} <= set(ops.process_ended().numpy().tolist())
    with pytest.raises(INVALID, match=r"ids must be a vector, not of shape \[\]"):
        ops.process_note_ended(1)
    del cache


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (ops.process_table, "incarnation"),
        (ops.process_cache, "id"),
        (ops.process_dense_shard, "incarnation"),
        (ops.process_replica, "id"),
    ],
)
def test_a_number_is_a_scalar(op, name):
    with pytest.raises(INVALID, match=rf"{name} must be a scalar, not of shape \[1\]"):
        op([1])


def test_a_cache_that_nobody_holds_is_destroyed_when_the_next_table_is_made():
    before = shards_to_push()
    table = EmbeddingTable(2, optimizers.SGD())
    cache = WorkerCache(table, CacheConfig(9))
    _, ticket = cache.lookup_op(unique(1))
    cache.update_op(ticket, tf.ones([1, 2]), 1.0)
    ((_, incarnation),) = shards_to_push() - before
    del table, cache, ticket
    gc.collect()
    EmbeddingTable(2, optimizers.SGD())
    assert shards_to_push() == before
    assert incarnation not in ops.process_tables().numpy()


def test_the_release_of_an_iterator_does_not_wait_for_its_destruction():
    ended, may_end = threading.Event(), threading.Event()

    def numbers():
        try:
            yield from range(100)
        finally:
            assert may_end.wait(60)
            ended.set()

    data = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec([], tf.int64))
    iterator = iter(data)
    (handle,) = tf.nest.flatten(iterator, expand_composites=True)
    ops.destroy_later(handle)
    ops.destroy_later(handle)
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    del handle, iterator
    gc.collect()
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(60)


def test_a_resource_that_counts_no_references_stays():
    table = new_table()
    ops.destroy_later(table)
    assert ops.table_lookup(table, [1]).rows.shape == [1, 2]
    with pytest.raises(INVALID, match="resource"):
        ops.destroy_later(tf.stack([table, table]))
