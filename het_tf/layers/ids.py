"""Conversion of a layer's ids to keys of a table. An id that was changed by a cast is an error.

Keras casts inputs to the dtype of the `keras.Input`. The dtype is float32 by default, and for the
first layer of a `keras.Sequential`. pandas converts integers with missing values to floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from het_tf import ops

# Ops whose outputs are fed to a graph. Closures use the last two (keras/worker_step/closure.py).
_FED = (
    "Placeholder",
    "IteratorGetNext",
    "IteratorGetNextSync",
    "OptionalGetValue",
    "EnsureShape",
)


def map_values(inputs: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Applies `function` to a dense tensor, or to the values of a ragged or sparse tensor."""
    if isinstance(inputs, tf.RaggedTensor):
        return inputs.with_flat_values(function(inputs.flat_values))
    if isinstance(inputs, tf.SparseTensor):
        return tf.SparseTensor(inputs.indices, function(inputs.values), inputs.dense_shape)
    return function(tf.convert_to_tensor(inputs))


def keys_of(ids: tf.Tensor, name: str, input_dim: int | None = None) -> tf.Tensor:
    """Returns ids as keys of a table.

    Args:
      ids: numbers of any shape.
      name: name of the ids in error messages.
      input_dim: upper bound: ids must be in [0, input_dim). None: any int64.

    Returns:
      int64 of the shape of ids.

    Raises:
      ValueError: ids are not numbers.
      tf.errors.InvalidArgumentError: an id is not a whole number, is a float that may have been
        rounded (float32: `2**24` and beyond), does not fit int64, was cast to an integer dtype that
        is too small, or is out of bounds. The message contains the id.
    """
    if not (ids.dtype.is_integer or ids.dtype.is_floating):
        raise ValueError(f"{name} must be integers, not {ids.dtype.name}")
    cast_to = ids.dtype if ids.dtype.is_integer else tf.int64
    fed = _before_cast(ids)
    if fed.dtype == tf.int64 == ids.dtype and input_dim is None:
        return ids
    return ops.keys(fed, cast_to=cast_to, input_dim=input_dim or 0, name_of_ids=name)


def keys_of_stock_ops(ids: tf.Tensor, name: str, input_dim: int | None = None) -> tf.Tensor:
    """`keys_of` for an exported model, which cannot contain ops of het_tf."""
    keys = tf.cast(ids, tf.int64)
    bad = tf.zeros_like(keys, tf.bool)
    if ids.dtype.is_floating:
        gapless = 2.0 ** {tf.bfloat16: 8, tf.float16: 11, tf.float32: 24}.get(ids.dtype, 53)
        bad |= (ids != tf.floor(ids)) | ~(tf.abs(tf.cast(ids, tf.float64)) < gapless)
    elif ids.dtype == tf.uint64:
        bad |= keys < 0
    elif input_dim is None:
        return keys
    if input_dim is not None:
        bad |= (keys < 0) | (keys >= input_dim)
    bound = "2**63" if input_dim is None else f"input_dim = {input_dim}"
    message = f"{name} must be whole numbers below {bound}, not"
    good = tf.debugging.Assert(~tf.reduce_any(bad), [message, tf.boolean_mask(ids, bad)])
    with tf.control_dependencies([] if good is None else [good]):
        return tf.identity(keys)


def _before_cast(ids: tf.Tensor) -> tf.Tensor:
    """Returns the fed tensor if `ids` is only a cast of it, otherwise `ids`.

    A cast of a computed tensor is kept: it may round on purpose.
    """
    if not tf.is_symbolic_tensor(ids):
        return ids
    tensor = ids
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    is_number = tensor.dtype.is_integer or tensor.dtype.is_floating
    return tensor if tensor.op.type in _FED and is_number else ids
