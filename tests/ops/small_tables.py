"""Small tables and caches made and read by ops, for tests that look at one op at a time."""

import contextlib
import itertools

import tensorflow as tf

from het_tf import ops

INVALID = tf.errors.InvalidArgumentError
ROWS = {"dim": 2, "optimizer": "sgd", "initializer": "zeros"}
_unique = itertools.count()


def name() -> str:
    return f"small_tables/{next(_unique)}"


def new_table(**attributes) -> tf.Tensor:
    return ops.table_handle(**{"shared_name": name(), **ROWS, **attributes})


def new_cache(**attributes) -> tf.Tensor:
    """Of rows on the host, unless `device_capacity` is given and a device is chosen."""
    # Where TensorFlow sees a GPU, it places the op there: the op has a kernel for either.
    with contextlib.nullcontext() if "device_capacity" in attributes else tf.device("CPU:0"):
        return ops.cache_handle(**{"shared_name": name(), "capacity": 9, **ROWS, **attributes})


def unique(*ids: int) -> tf.Tensor:
    return ops.unique_ids(tf.constant(ids, tf.int64))


def zeros(*shape: int, dtype: tf.DType = tf.float32) -> tf.Tensor:
    return tf.zeros(shape, dtype)


def installed_ticket(cache: tf.Tensor, *ids: int, table: tf.Tensor | None = None) -> tf.Tensor:
    """Of a lookup on a cache of one shard."""
    ticket, (request,) = ops.cache_lookup(cache, unique(*ids), num_shards=1)
    reply = ops.table_sync(new_table() if table is None else table, request)
    ops.cache_install(cache, ticket, [reply])
    return ticket


def flush(cache: tf.Tensor, table: tf.Tensor) -> None:
    ticket, (request,) = ops.cache_flush(cache, num_shards=1)
    reply = ops.table_sync(table, request) if request.shape[0] else zeros(0, dtype=tf.uint8)
    ops.cache_install(cache, ticket, [reply])


def stats(names_and_values: tuple[tf.Tensor, tf.Tensor]) -> dict[str, int]:
    names, values = (each.numpy().tolist() for each in names_and_values)
    return dict(zip([each.decode() for each in names], values, strict=True))


def rows(table: tf.Tensor) -> dict[int, tuple[list[float], int]]:
    """Values and clocks by key."""
    keys, values, _, clocks = (each.numpy().tolist() for each in ops.table_export(table, 0, 1))
    return dict(zip(keys, zip(values, clocks, strict=True), strict=True))
