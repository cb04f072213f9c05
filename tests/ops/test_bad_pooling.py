"""Bad input to the ops that pool: refused with a message that helps, and nothing changed."""

import pytest
import tensorflow as tf
from small_tables import INVALID, new_cache, new_table, unique

from het_tf import ops

IDS = tf.constant([1, 2, 2], tf.int64)
NONE = tf.zeros([0])


def pool(table, splits, weights=(NONE,), **layout):
    layout = {"combiners": ["sum"], "bag_sizes": [1], **layout}
    splits = [tf.constant(each, tf.int64) for each in splits]
    return ops.table_pool(table, IDS, splits, weights, **layout)


@pytest.mark.parametrize(
    ("splits", "weights", "layout", "message"),
    [
        ([[0, 2]], [NONE], {}, "splits hold 2 ids, looked up were 3"),
        ([[0, 4]], [NONE], {}, r"splits\[0\] says that there are 4 ids; there are 3"),
        ([[1, 3]], [NONE], {}, "splits of feature 0 begin with 1"),
        ([[0, 2, 1, 3]], [NONE], {}, "fall from 2 to 1 at 2"),
        ([[]], [NONE], {}, r"splits\[0\] must be a vector of at least one or a scalar"),
        ([3], [NONE], {"bag_sizes": [2]}, r"splits\[0\] = 3 ids do not fill bags of 2"),
        ([3], [NONE], {"bag_sizes": [0]}, r"bag_sizes\[0\] = 0 must be positive"),
        ([3], [NONE], {"combiners": ["sum", "sum"]}, "combiners holds 2 names"),
        ([3], [NONE], {"combiners": ["average"]}, "average"),
        ([3], [tf.ones([2])], {}, r"weights\[0\] has shape \[2\], expected \[3\]"),
    ],
)
def test_layouts_that_are_none(splits, weights, layout, message):
    with pytest.raises(INVALID, match=message):
        pool(new_table(), splits, weights, **layout)


def test_gradients_of_another_shape_or_lookup_change_nothing():
    table = new_table()
    (_,), found, pooling = pool(table, [[0, 1, 3]])
    (_,), _, other = pool(table, [3])
    rate = tf.constant(1.0)
    with pytest.raises(INVALID, match=r"gradients\[0\] has shape \[3,2\], expected \[2,2\]"):
        ops.table_apply_pooled(table, found, rate, pooling, [tf.ones([3, 2])])
    with pytest.raises(INVALID, match="gradients holds 2 tensors for 1 features"):
        ops.table_apply_pooled(table, found, rate, pooling, [tf.ones([2, 2])] * 2)
    with pytest.raises(INVALID, match="pooling is of another lookup"):
        ops.table_apply_pooled(table, found, rate, other, [tf.ones([3, 2])])
    with pytest.raises(INVALID, match="pooling does not hold a Het>Pooling of this process"):
        ops.table_apply_pooled(table, found, rate, found, [tf.ones([2, 2])])
    with pytest.raises(INVALID, match="hold NaN or infinity for 2 of 2 keys"):
        ops.table_apply_pooled(table, found, rate, pooling, [tf.fill([2, 2], float("nan"))])
    assert ops.table_size(table).numpy() == 0
    ops.table_apply_pooled(table, found, rate, pooling, [tf.ones([2, 2])])
    assert ops.table_size(table).numpy() == 2


def test_a_ticket_that_is_not_installed():
    cache = new_cache()
    ticket, _ = ops.cache_lookup(cache, unique(1, 2), num_shards=1)
    with pytest.raises(tf.errors.FailedPreconditionError, match="not installed before its rows"):
        ops.cache_pool(cache, ticket, [tf.constant(2, tf.int64)], [NONE], ["sum"], [1])
