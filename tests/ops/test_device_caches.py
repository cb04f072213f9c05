"""What the ops say of caches with their rows on a device, and what they refuse."""

import numpy as np
import pytest
import tensorflow as tf
from small_tables import INVALID, ROWS, flush, name, new_cache, new_table, rows, stats, unique

from het_tf import ops


def device_cache(kind: str, **attributes) -> tf.Tensor:
    with tf.device(f"/device:{kind}:0"):
        return new_cache(**{"capacity": 0, "device_capacity": 9, **attributes})


def as_they_are(*ids: int) -> tf.Tensor:
    return ops.unique_ids(tf.constant(ids, tf.int64), on_device=True)


def lookup(cache: tf.Tensor, table: tf.Tensor, unique_ids: tf.Tensor) -> tf.Tensor:
    ticket, (request,) = ops.cache_lookup(cache, unique_ids, num_shards=1)
    if request.shape[0]:
        ops.cache_install(cache, ticket, [ops.table_sync(table, request)])
    else:
        ops.cache_install(cache, ticket, [tf.zeros([0], tf.uint8)])
    return ticket


def test_a_step(rows_kind):
    cache, table = device_cache(rows_kind), new_table()
    ticket = lookup(cache, table, as_they_are(7, 8, 7))
    assert ops.cache_gather(cache, ticket).numpy().tolist() == [[0, 0]] * 3
    ops.cache_update(cache, ticket, tf.constant([[1.0, 2], [3, 4], [5, 6]]), 0.5)
    hits = lookup(cache, table, as_they_are(8, 7))
    assert ops.cache_gather(cache, hits).numpy().tolist() == [[-1.5, -2], [-3, -4]]
    counters = stats(ops.cache_stats(cache))
    assert counters["pending"] == 2
    assert (counters["hits"], counters["misses"], counters["messages"]) == (2, 2, 1)
    assert ops.cache_report(cache).numpy()[2:].tolist() == list(counters.values())
    flush(cache, table)
    assert rows(table) == {7: ([-3, -4], 1), 8: ([-1.5, -2], 1)}


def pool(cache: tf.Tensor, ticket: tf.Tensor, *splits, weights=(), combiner="sum"):
    n = len(splits)
    splits = [tf.constant(each, tf.int64) for each in splits]
    weights = weights or [tf.zeros([0])] * n
    return ops.cache_pool(cache, ticket, splits, weights, [combiner] * n, [1] * n)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
def test_pooling_with_weights_is_the_hosts(rows_kind, combiner):
    seen = []
    for on_device in (False, True):
        cache = device_cache(rows_kind) if on_device else new_cache()
        table = new_table()
        ids = as_they_are if on_device else unique
        first = lookup(cache, table, ids(7, 8, 9))
        ops.cache_update(cache, first, tf.constant([[1.0, 2], [3, -4], [1, 2]]), 1.0)
        ticket = lookup(cache, table, ids(8, 7, 7, 9, 9, 8))
        weights = [tf.constant([0.5, -1, 2]), tf.zeros([0])]
        pooled, pooling = pool(
            cache, ticket, [0, 1, 3], [0, 2, 2, 3], weights=weights, combiner=combiner
        )
        # Another step changes the rows before the gradient comes.
        other = lookup(cache, table, ids(7, 8, 9))
        ops.cache_update(cache, other, tf.ones([3, 2]), 1.0)
        gradients = [tf.constant([[9.0, 9], [3, 6]]), tf.constant([[1.0, 2], [5, 5], [-3, 1]])]
        of_weights = ops.pooling_gradient(pooling, gradients)
        keys, sums = ops.pooled_sums(pooling, gradients)
        ops.cache_update_pooled(cache, ticket, 1.0, pooling, gradients)
        flush(cache, table)
        seen.append([*pooled, *of_weights, keys, sums, *(rows(table)[key][0] for key in (7, 8, 9))])
    for host, there in zip(*seen, strict=True):
        np.testing.assert_array_equal(there, host)


def test_a_pooled_step(rows_kind):
    cache, table = device_cache(rows_kind), new_table()
    first = lookup(cache, table, as_they_are(7, 8))
    ops.cache_update(cache, first, tf.constant([[1.0, 2], [3, 4]]), 1.0)
    ticket = lookup(cache, table, as_they_are(8, 7, 7, 8))
    (bags, rows_of_ids), pooling = pool(cache, ticket, [0, 0, 3], 1, combiner="mean")
    np.testing.assert_allclose(bags, [[0, 0], [-5 / 3, -8 / 3]], rtol=1e-6)
    assert rows_of_ids.numpy().tolist() == [[-3, -4]]
    gradients = [tf.constant([[9.0, 9], [3, 6]]), tf.ones([1, 2])]
    keys, sums = ops.pooled_sums(pooling, gradients)
    assert keys.numpy().tolist() == [8, 7]
    np.testing.assert_allclose(sums, [[2, 3], [2, 4]], rtol=1e-6)
    ops.cache_update_pooled(cache, ticket, 1.0, pooling, gradients)
    flush(cache, table)
    np.testing.assert_allclose([rows(table)[key][0] for key in (7, 8)], [[-3, -6], [-5, -7]])
    assert [rows(table)[key][1] for key in (7, 8)] == [2, 2]


def test_clear(rows_kind):
    cache, table = device_cache(rows_kind), new_table()
    ticket = lookup(cache, table, as_they_are(7))
    ops.cache_update(cache, ticket, tf.ones([1, 2]), 1.0)
    ops.cache_clear(cache)
    assert stats(ops.cache_stats(cache))["updates_lost"] == 1
    flush(cache, table)
    assert rows(table) == {}


def test_ids_for_a_device_serve_a_cache_on_the_host():
    cache, table = new_cache(), new_table()
    ticket = lookup(cache, table, as_they_are(7, 7))
    ops.cache_update(cache, ticket, tf.ones([2, 2]), 1.0)
    flush(cache, table)
    assert rows(table) == {7: ([-2, -2], 1)}


def test_ids_looked_ahead_for():
    ids = as_they_are(7, 8)
    ops.check_ids(ids, tf.constant([7, 8], tf.int64))
    with pytest.raises(INVALID, match=r"ids\[1\] = 9, looked ahead for was 8"):
        ops.check_ids(ids, tf.constant([7, 9], tf.int64))
    with pytest.raises(INVALID, match="ids holds 1 ids, looked ahead for were 2"):
        ops.check_ids(ids, tf.constant([7], tf.int64))


def test_a_finished_process_flushes_it(rows_kind):
    cache, table = device_cache(rows_kind), new_table()
    ops.cache_update(cache, lookup(cache, table, as_they_are(7)), tf.ones([1, 2]), 1.0)
    number = ops.cache_report(cache).numpy()[1]
    assert number in ops.process_caches().numpy()[:, 0]
    flush(ops.process_cache(number), table)
    assert rows(table) == {7: ([-1, -1], 1)}


# What is refused.


def test_unique_ids_of_the_host(rows_kind):
    cache = device_cache(rows_kind)
    with pytest.raises(INVALID, match="unique_ids does not hold a Het>DeviceIds of this process"):
        ops.cache_lookup(cache, unique(7), num_shards=1)


def test_another_device_capacity(rows_kind):
    shared = name()
    device_cache(rows_kind, shared_name=shared)
    with pytest.raises(INVALID, match="device_capacity = 9; this handle has device_capacity = 8"):
        device_cache(rows_kind, shared_name=shared, device_capacity=8)


@pytest.mark.parametrize("capacity", [2**30 + 1, -2])
def test_capacities_that_cannot_be(rows_kind, capacity):
    with pytest.raises((INVALID, ValueError), match=str(capacity)):
        device_cache(rows_kind, device_capacity=capacity)


def test_gradients_of_another_shape_or_not_finite(rows_kind):
    cache, table = device_cache(rows_kind), new_table()
    ticket = lookup(cache, table, as_they_are(7))
    with pytest.raises(INVALID, match=r"gradients has shape \[2,2\], expected \[1,2\]"):
        ops.cache_update(cache, ticket, tf.ones([2, 2]), 1.0)
    with pytest.raises(INVALID, match="hold NaN or infinity for 1 of 1 keys"):
        ops.cache_update(cache, ticket, tf.constant([[np.nan, 1]]), 1.0)
    with pytest.raises(INVALID, match="learning_rate"):
        ops.cache_update(cache, ticket, tf.ones([1, 2]), np.nan)
    assert stats(ops.cache_stats(cache))["updates"] == 0


def test_pooling_that_is_refused(rows_kind):
    cache, table = device_cache(rows_kind), new_table()
    early, _ = ops.cache_lookup(cache, as_they_are(7, 8), num_shards=1)
    with pytest.raises(tf.errors.FailedPreconditionError, match="not installed before its rows"):
        pool(cache, early, 2)
    ticket = lookup(cache, table, as_they_are(7, 8))
    with pytest.raises(INVALID, match=r"weights\[1\] has shape \[2\], expected \[1\]"):
        pool(cache, ticket, 1, 1, weights=[tf.zeros([0]), tf.ones([2])])
    with pytest.raises(INVALID, match="splits hold 1 ids, looked up were 2"):
        pool(cache, ticket, 1)


def test_pooled_gradients_that_are_refused(rows_kind):
    cache, table = device_cache(rows_kind), new_table()
    ticket = lookup(cache, table, as_they_are(7, 8))
    _, pooling = pool(cache, ticket, [0, 2])
    _, of_another = pool(cache, lookup(cache, table, as_they_are(7, 8)), [0, 2])
    on_host = new_cache()
    of_the_host = lookup(on_host, table, unique(7, 8))
    _, pooling_of_the_host = pool(on_host, of_the_host, [0, 2])
    ones = [tf.ones([1, 2])]
    for other in (of_another, pooling_of_the_host):
        with pytest.raises(INVALID, match="pooling is of another lookup"):
            ops.cache_update_pooled(cache, ticket, 1.0, other, ones)
    with pytest.raises(INVALID, match="pooling is of another lookup"):
        ops.cache_update_pooled(on_host, of_the_host, 1.0, pooling, ones)
    with pytest.raises(INVALID, match=r"gradients\[0\] has shape \[2,2\], expected \[1,2\]"):
        ops.cache_update_pooled(cache, ticket, 1.0, pooling, [tf.ones([2, 2])])
    with pytest.raises(INVALID, match="hold NaN or infinity for 2 of 2 keys"):
        ops.cache_update_pooled(cache, ticket, 1.0, pooling, [tf.fill([1, 2], np.nan)])
    with pytest.raises(INVALID, match="learning_rate = nan"):
        ops.cache_update_pooled(cache, ticket, np.nan, pooling, ones)
    with pytest.raises(INVALID, match="gradients holds 2 tensors for 1 features"):
        ops.pooling_gradient(pooling, ones * 2)
    assert stats(ops.cache_stats(cache))["updates"] == 0


def test_a_ticket_of_another_cache(rows_kind):
    table = new_table()
    ticket = lookup(device_cache(rows_kind), table, as_they_are(7))
    with pytest.raises(INVALID, match="ticket was given out by another cache"):
        ops.cache_gather(device_cache(rows_kind), ticket)


def test_the_host_of_a_build_with_cuda_keeps_no_rows_of_a_device():
    if ops.build()["cuda"] is None:
        pytest.skip("the ops are built without CUDA")
    with pytest.raises(INVALID, match="built with CUDA, and keep rows in a GPU's memory alone"):
        device_cache("CPU")


def test_as_many_rows_as_memory_allows():
    """The host does not say how much that is; a GPU does."""
    if tf.config.list_logical_devices("GPU") and ops.build()["cuda"]:
        assert stats(ops.cache_stats(device_cache("GPU", device_capacity=-1)))["memory_bytes"] > 1e8
    elif ops.build()["cuda"] is None:
        with pytest.raises(INVALID, match="does not say how much memory it has; give a number"):
            device_cache("CPU", device_capacity=-1)
    else:
        pytest.skip("TensorFlow sees no GPU")


def test_rows_have_the_attributes_of_others(rows_kind):
    with pytest.raises(INVALID, match="num_shards = 2, but the cache has 1 shards"):
        ops.cache_lookup(device_cache(rows_kind), as_they_are(7), num_shards=2)
    assert ROWS["dim"] == 2
