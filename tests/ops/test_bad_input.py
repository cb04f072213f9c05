"""Bad input to the ops: refused with a message that helps, and nothing changed.

Bad messages between cache and shard are in test_bad_messages.py, bad gradients in
test_bad_gradients.py, bad arguments of Python classes in test_bad_arguments.py.
"""

import numpy as np
import pytest
import tensorflow as tf
from small_tables import (
    INVALID,
    flush,
    installed_ticket,
    name,
    new_cache,
    new_table,
    rows,
    unique,
    zeros,
)

from het_tf import ops

# Attributes of handles.

BAD_ATTRIBUTES = [
    ({"dim": 0}, "'dim' of 0 must be at least minimum 1"),
    ({"num_shards": 0}, "'num_shards' of 0 must be at least minimum 1"),
    ({"clock": "vector"}, "'clock' of \"vector\" is not in the list of allowed values"),
    ({"optimizer": "adamax"}, "optimizer = 'adamax': known are sgd, momentum, adagrad, row_wise_"),
    ({"optimizer": ""}, "optimizer is empty"),
    ({"optimizer": "sgd lr=1"}, "optimizer = 'sgd lr=1': there is no parameter 'lr'"),
    ({"optimizer": "sgd clipnorm"}, "'clipnorm' is not of the form parameter=number"),
    ({"optimizer": "sgd clipnorm=x"}, "'clipnorm=x' does not give a finite number"),
    ({"optimizer": "sgd clipnorm=1 clipnorm=2"}, "'clipnorm' is given twice"),
    ({"optimizer": "sgd clipnorm=-1"}, "clipnorm is out of range"),
    ({"optimizer": "momentum momentum=2"}, "momentum is out of range"),
    ({"optimizer": "adam beta_2=1"}, "beta_2 is out of range"),
    ({"optimizer": "ftrl weight_decay=1"}, "ftrl takes l2 instead of weight_decay"),
    ({"initializer": "he_normal"}, "initializer = 'he_normal': known are zeros, constant, uniform"),
    ({"initializer": "uniform minval=1 maxval=0"}, "minval is greater than maxval"),
    ({"initializer": "normal stddev=-1"}, "stddev is negative"),
    ({"initializer": "normal stddev=nan"}, "'stddev=nan' does not give a finite number"),
]
BAD_TABLES = [({"shard": 2, "num_shards": 2}, r"shard = 2 must be in \[0, num_shards = 2\)")]
BAD_CACHES = [
    ({"capacity": -2}, r"capacity = -2 rows must be in \[0, 2147483647\]"),
    ({"capacity": 2**31}, "capacity = 2147483648 rows must be"),
    ({"read_bound": -2}, r"read_bound = -2 must be in \[0, 2147483647\] \(-1: unbounded\)"),
    ({"write_bound": -2}, r"write_bound = -2 must be in \[0, 2147483647\] \(-1: unbounded\)"),
    ({"read_bound": 2**31}, "read_bound = 2147483648 must be in"),
    ({"write_bound": 2**40}, "write_bound = 1099511627776 must be in"),
    ({"num_shards": 65536}, "num_shards = 65536 must be at most 65535"),
    ({"policy": "fifo"}, "'policy' of \"fifo\" is not in the list of allowed values"),
    ({"nonfinite": "ignore"}, "'nonfinite' of \"ignore\" is not in the list of allowed values"),
]


@pytest.mark.parametrize(
    ("new", "attributes", "message"),
    [(new_table, *case) for case in BAD_ATTRIBUTES + BAD_TABLES]
    + [(new_cache, *case) for case in BAD_CACHES + BAD_ATTRIBUTES[:4] + BAD_ATTRIBUTES[-1:]],
)
def test_attributes_out_of_range(new, attributes, message):
    with pytest.raises(INVALID, match=message):
        new(**attributes)


OTHER_ROWS = [
    ({"dim": 2}, {"dim": 3}, "dim = 2; this handle has dim = 3"),
    ({"optimizer": "sgd"}, {"optimizer": "ftrl"}, "optimizer = sgd; .* optimizer = ftrl"),
    ({"initializer": "zeros"}, {"initializer": "normal"}, "initializer = zeros; .* = normal"),
    ({"seed": 5}, {"seed": 6}, "seed = 5; this handle has seed = 6"),
    ({"num_shards": 2}, {"num_shards": 3}, "num_shards = 2; this handle has num_shards = 3"),
    ({"clock": "count"}, {"clock": "lamport"}, "clock = count; this handle has clock = lamport"),
    ({"clock": "drift"}, {"clock": "count"}, "clock = drift; this handle has clock = count"),
]
OTHER_TABLES = [
    ({"num_shards": 2}, {"num_shards": 2, "shard": 1}, "shard = 0; this handle has shard = 1"),
]
OTHER_CACHES = [
    ({"capacity": 9}, {"capacity": 8}, "capacity = 9; this handle has capacity = 8"),
    ({"policy": "lfu"}, {"policy": "lru"}, "policy = lfu; this handle has policy = lru"),
    ({"read_bound": 5}, {"read_bound": -1}, "read_bound = 5; this handle has read_bound = -1"),
    ({"write_bound": 5}, {"write_bound": 0}, "write_bound = 5; this handle has write_bound = 0"),
    ({"nonfinite": "error"}, {"nonfinite": "skip"}, "nonfinite = error; .* nonfinite = skip"),
]


@pytest.mark.parametrize(
    ("new", "existing", "asked", "message"),
    [(new_table, *case) for case in OTHER_ROWS + OTHER_TABLES]
    + [(new_cache, *case) for case in OTHER_ROWS + OTHER_CACHES],
)
def test_handles_that_differ_from_what_exists(new, existing, asked, message):
    shared_name = name()
    kind = "table" if new is new_table else "cache"
    handle = new(shared_name=shared_name, **existing)
    with pytest.raises(INVALID, match=f"{kind} '{shared_name}' exists with {message}"):
        new(shared_name=shared_name, **asked)
    tf.raw_ops.DestroyResourceOp(resource=handle)


# Inputs of ops.


def tensor_list() -> tf.Tensor:
    """A variant, but none of ours."""
    return tf.raw_ops.TensorListReserve(
        element_shape=tf.constant([], tf.int32), num_elements=1, element_dtype=tf.float32
    )


def key_of_other_shard() -> int:
    return next(k for k in range(99) if ops.shard_of([k], num_shards=2).numpy()[0] == 1)


def import_(table, keys, values, slots, clocks):
    ops.table_import(
        table, tf.constant(keys, tf.int64), values, slots, tf.constant(clocks, tf.int64)
    )


BAD_TABLE_CALLS = {
    "apply: no batch": (
        lambda t: ops.table_apply(t, tensor_list(), zeros(1, 2), 1.0),
        "found does not hold a Het>UniqueIds of this process, but ",
    ),
    "apply: a ticket": (
        lambda t: ops.table_apply(t, installed_ticket(new_cache(), 1), zeros(1, 2), 1.0),
        "found does not hold a Het>UniqueIds of this process",
    ),
    "apply: rows of what was found": (
        lambda t: ops.table_apply(t, ops.table_lookup(t, [1, 2]).found, zeros(1, 2), 1.0),
        r"gradients has shape \[1,2\], expected \[2,2\]",
    ),
    "apply: rows": (
        lambda t: ops.table_apply(t, unique(1, 2), zeros(1, 2), 1.0),
        r"gradients has shape \[1,2\], expected \[2,2\]",
    ),
    "apply: columns": (
        lambda t: ops.table_apply(t, unique(1, 1), zeros(2, 3), 1.0),
        r"gradients has shape \[2,3\], expected \[2,2\]",
    ),
    "apply: rank": (
        lambda t: ops.table_apply(t, unique(1), zeros(2), 1.0),
        r"gradients has shape \[2\], expected \[1,2\]",
    ),
    "apply: rate": (
        lambda t: ops.table_apply(t, unique(1), zeros(1, 2), [1.0]),
        r"learning_rate must be a scalar, not of shape \[1\]",
    ),
    "apply: negative": (
        lambda t: ops.table_apply(t, unique(1), zeros(1, 2), -0.5),
        "learning_rate = -0.5 must be finite and not negative",
    ),
    "apply: NaN rate": (
        lambda t: ops.table_apply(t, unique(1), zeros(1, 2), np.nan),
        "learning_rate = nan must be finite",
    ),
    "export: part": (
        lambda t: ops.table_export(t, 2, 2),
        r"part = 2 must be in \[0, num_parts = 2\)",
    ),
    "export: parts": (
        lambda t: ops.table_export(t, 0, 0),
        r"part = 0 must be in \[0, num_parts = 0\)",
    ),
    "export: rank": (lambda t: ops.table_export(t, [0], 1), "part and num_parts must be scalars"),
    "import: rank": (
        lambda t: import_(t, [[1]], zeros(1, 2), zeros(1, 0), [1]),
        r"keys must be a vector, not of shape \[1,1\]",
    ),
    "import: values": (
        lambda t: import_(t, [1], zeros(1, 3), zeros(1, 0), [1]),
        r"values has shape \[1,3\], expected \[1,2\]",
    ),
    "import: slots": (
        lambda t: import_(t, [1], zeros(1, 2), zeros(1, 1), [1]),
        r"slots has shape \[1,1\], expected \[1,0\]",
    ),
    "import: clocks": (
        lambda t: import_(t, [1], zeros(1, 2), zeros(1, 0), [1, 2]),
        r"clocks has shape \[2\], expected \[1\]",
    ),
    "import: clock": (
        lambda t: import_(t, [1, 2], zeros(2, 2), zeros(2, 0), [1, -2]),
        "clocks holds -2 for key 2",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD_TABLE_CALLS.values(), ids=BAD_TABLE_CALLS)
def test_calls_on_a_table_that_change_nothing(call, message):
    table = new_table()
    ops.table_apply(table, unique(1), tf.ones([1, 2]), 1.0)
    before = rows(table)
    with pytest.raises(INVALID, match=message):
        call(table)
    assert rows(table) == before == {1: ([-1, -1], 1)}


def test_rows_of_another_shard_are_not_imported():
    table, other = new_table(num_shards=2), key_of_other_shard()
    mine = next(k for k in range(99) if k != other and ops.shard_of([k], num_shards=2) == [0])
    with pytest.raises(INVALID, match=f"keys holds key {other} of shard 1, this is shard 0 of 2"):
        import_(table, [mine, other], zeros(2, 2), zeros(2, 0), [1, 1])
    assert rows(table) == {}


@pytest.mark.parametrize(
    "call",
    [
        lambda table: ops.table_lookup(table, [1]),
        lambda table: ops.table_apply(table, unique(1), zeros(1, 2), 1.0),
    ],
)
def test_one_shard_of_several_takes_no_keys_without_a_cache(call):
    """It would take keys of the others."""
    table = new_table(num_shards=3, shard=1)
    with pytest.raises(INVALID, match="table must have one shard, not 3: ask the shards of this"):
        call(table)
    assert rows(table) == {}


BAD_CACHE_CALLS = {
    "lookup: shards": (
        lambda c, t: ops.cache_lookup(c, unique(1), num_shards=2),
        "num_shards = 2, but the cache has 1 shards",
    ),
    "flush: shards": (
        lambda c, t: ops.cache_flush(c, num_shards=3),
        "num_shards = 3, but the cache has 1 shards",
    ),
    "lookup: a ticket": (
        lambda c, t: ops.cache_lookup(c, t, num_shards=1),
        "unique_ids does not hold a Het>UniqueIds of this process",
    ),
    "install: unique ids": (
        lambda c, t: ops.cache_install(c, unique(1), [zeros(0)]),
        "was expected to be a uint8 tensor but is a float",
    ),
    "install: too many": (
        lambda c, t: ops.cache_install(c, t, [zeros(0, dtype=tf.uint8)] * 2),
        "replies holds 2 messages for 1 shards",
    ),
    "update: unique ids": (
        lambda c, t: ops.cache_update(c, unique(1), zeros(1, 2), 1.0),
        "ticket does not hold a Het>Ticket of this process",
    ),
    "update: foreign": (
        lambda c, t: ops.cache_update(c, installed_ticket(new_cache(), 1), zeros(1, 2), 1.0),
        "ticket was given out by another cache",
    ),
    "update: rows": (
        lambda c, t: ops.cache_update(c, t, zeros(1, 2), 1.0),
        r"gradients has shape \[1,2\], expected \[2,2\]",
    ),
    "update: rank": (
        lambda c, t: ops.cache_update(c, t, zeros(4), 1.0),
        r"gradients has shape \[4\], expected \[2,2\]",
    ),
    "update: rate": (
        lambda c, t: ops.cache_update(c, t, zeros(2, 2), [0.1]),
        r"learning_rate must be a scalar, not of shape \[1\]",
    ),
    "update: negative": (
        lambda c, t: ops.cache_update(c, t, zeros(2, 2), -1.0),
        "learning_rate = -1 must be finite and not negative",
    ),
    "update: infinite": (
        lambda c, t: ops.cache_update(c, t, zeros(2, 2), np.inf),
        "learning_rate = inf must be finite",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD_CACHE_CALLS.values(), ids=BAD_CACHE_CALLS)
def test_calls_on_a_cache_that_change_nothing(call, message):
    table, cache = new_table(), new_cache()
    ticket = installed_ticket(cache, 1, 2, table=table)
    with pytest.raises(INVALID, match=message):
        call(cache, ticket)
    ops.cache_update(cache, ticket, tf.ones([2, 2]), 1.0)
    flush(cache, table)
    assert rows(table) == {1: ([-1, -1], 1), 2: ([-1, -1], 1)}


def test_an_update_before_the_replies():
    cache = new_cache()
    ticket, _ = ops.cache_lookup(cache, unique(1), num_shards=1)
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="ticket was not installed before its"
    ):
        ops.cache_update(cache, ticket, zeros(1, 2), 1.0)


def test_rows_before_the_replies():
    cache = new_cache()
    ticket, _ = ops.cache_lookup(cache, unique(1), num_shards=1)
    with pytest.raises(tf.errors.FailedPreconditionError, match="ticket was not installed before"):
        ops.cache_gather(cache, ticket)
    with pytest.raises(tf.errors.FailedPreconditionError, match="ticket was not installed before"):
        ops.cache_ask_again(cache, ticket, num_shards=1)


def test_replies_taken_twice():
    table, cache = new_table(), new_cache()
    ticket, (request,) = ops.cache_lookup(cache, unique(1), num_shards=1)
    reply = ops.table_sync(table, request)
    assert int(ops.cache_install(cache, ticket, [reply]).rows) == 0
    with pytest.raises(tf.errors.FailedPreconditionError, match="ticket was installed before"):
        ops.cache_install(cache, ticket, [reply])


def test_ftrl_needs_a_positive_rate():
    with pytest.raises(INVALID, match="learning_rate = 0 must be positive for ftrl"):
        ops.table_apply(new_table(optimizer="ftrl"), unique(1), zeros(1, 2), 0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.table_size(new_cache()),
            "Trying to access a handle's resource using the wrong",
        ),
        (
            lambda: ops.cache_stats(new_table()),
            "Trying to access a handle's resource using the wrong",
        ),
        (
            lambda: ops.table_size(zeros(1)),
            "expected to be a resource tensor but is a float tensor",
        ),
        (lambda: ops.unique_ids(zeros(1)), "expected to be a int64 tensor but is a float tensor"),
        (
            lambda: ops.shard_of(zeros(1), num_shards=1),
            "expected to be a int64 tensor but is a float",
        ),
        (lambda: ops.shard_of([1], num_shards=0), "must be at least minimum 1"),
        (
            lambda: ops.table_sync(new_table(), zeros(1)),
            "expected to be a uint8 tensor but is a float",
        ),
        (
            lambda: ops.table_apply(new_table(), unique(1), zeros(1, 2, dtype=tf.float64), 1.0),
            "expected to be a float tensor but is a double tensor",
        ),
    ],
)
def test_inputs_of_another_type(call, message):
    with pytest.raises(INVALID, match=message):
        call()


# Ranks, which a graph shows before anything runs.

FLOAT, INT, BYTES, VARIANT, HANDLE = tf.float32, tf.int64, tf.uint8, tf.variant, tf.resource
RANKS = [
    (ops.table_apply, [(VARIANT,), (FLOAT, 2), (FLOAT,)], "rank 2 but is rank 1"),
    (ops.table_apply, [(VARIANT,), (FLOAT, 1, 2), (FLOAT, 1)], "rank 0 but is rank 1"),
    (ops.table_sync, [(BYTES, 1, 64)], "rank 1 but is rank 2"),
    (ops.table_export, [(INT, 1), (INT,)], "rank 0 but is rank 1"),
    (ops.table_import, [(INT, 1, 1), (FLOAT, 1, 2), (FLOAT, 1, 0), (INT, 1)], "rank 1 but is"),
    (ops.table_import, [(INT, 1), (FLOAT, 2), (FLOAT, 1, 0), (INT, 1)], "rank 2 but is rank 1"),
    (ops.table_import, [(INT, 1), (FLOAT, 1, 2), (FLOAT, 0), (INT, 1)], "rank 2 but is rank 1"),
    (ops.table_import, [(INT, 1), (FLOAT, 1, 2), (FLOAT, 1, 0), (INT,)], "rank 1 but is rank 0"),
    (ops.cache_lookup, [(VARIANT, 1)], "rank 0 but is rank 1"),
    (ops.cache_update, [(VARIANT,), (FLOAT, 2), (FLOAT,)], "rank 2 but is rank 1"),
    (ops.cache_update, [(VARIANT,), (FLOAT, 1, 2), (FLOAT, 1)], "rank 0 but is rank 1"),
]


@pytest.mark.parametrize(("op", "inputs", "message"), RANKS)
def test_ranks_are_checked_when_a_graph_is_built(op, inputs, message):
    with tf.Graph().as_default():
        handle, *others = (
            tf.compat.v1.placeholder(dtype, shape) for dtype, *shape in [(HANDLE,), *inputs]
        )
        options = {"num_shards": 1} if op is ops.cache_lookup else {}
        with pytest.raises(ValueError, match=f"Shape must be {message}"):
            op(handle, *others, **options)
