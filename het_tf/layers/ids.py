"""Ids as they reach a layer, and the keys that they are: no id becomes another one on the way.

Keras casts what is fed to the dtype of the `keras.Input`, which is float32 where nobody named one
and for the first layer of a `keras.Sequential`; pandas makes floats of integers with a gap. So ids
are taken as they were fed, before such a cast, where a graph shows it: ops that only move values
between the cast and the layer are built again on what was fed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from het_tf import ops

# Ops that put out what was fed to a graph; the last two in closures (keras/worker_step/closure.py).
_FED = (
    "Placeholder",
    "IteratorGetNext",
    "IteratorGetNextSync",
    "OptionalGetValue",
    "EnsureShape",
)


# Ops that put out values of one input: its place, and the op on other values. The next ones put out
# those of several inputs.
_MOVES: dict[str, tuple[int, Callable[[tf.Operation, tf.Tensor], Any]]] = {
    "Identity": (0, lambda op, x: x),
    "Reshape": (0, lambda op, x: tf.reshape(x, op.inputs[1])),
    "ExpandDims": (0, lambda op, x: tf.expand_dims(x, op.inputs[1])),
    "Squeeze": (0, lambda op, x: tf.squeeze(x, op.get_attr("squeeze_dims"))),
    "Transpose": (0, lambda op, x: tf.transpose(x, op.inputs[1])),
    "StridedSlice": (
        0,
        lambda op, x: tf.strided_slice(
            x, *op.inputs[1:], **{name: op.get_attr(name) for name in _SLICE_MASKS}
        ),
    ),
    "Slice": (0, lambda op, x: tf.slice(x, *op.inputs[1:])),
    "Split": (1, lambda op, x: tf.split(x, op.get_attr("num_split"), op.inputs[0])),
    "SplitV": (
        0,
        lambda op, x: tf.split(x, op.inputs[1], op.inputs[2], num=op.get_attr("num_split")),
    ),
    "Unpack": (0, lambda op, x: tf.unstack(x, op.get_attr("num"), op.get_attr("axis"))),
    "GatherV2": (
        0,
        lambda op, x: tf.gather(
            x, op.inputs[1], axis=op.inputs[2], batch_dims=op.get_attr("batch_dims")
        ),
    ),
}
# Those of them that leave some out.
_SELECT = ("StridedSlice", "Slice", "Split", "SplitV", "Unpack", "GatherV2")
_SLICE_MASKS = (
    "begin_mask",
    "end_mask",
    "ellipsis_mask",
    "new_axis_mask",
    "shrink_axis_mask",
)
_JOINS: dict[str, tuple[slice, Callable[[tf.Operation, list[tf.Tensor]], tf.Tensor]]] = {
    "ConcatV2": (slice(-1), lambda op, parts: tf.concat(parts, op.inputs[-1])),
    "Pack": (slice(None), lambda op, parts: tf.stack(parts, op.get_attr("axis"))),
}


def map_values(inputs: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """`function` of a dense tensor, or of the values of a ragged or sparse one."""
    if isinstance(inputs, tf.RaggedTensor):
        return inputs.with_flat_values(function(inputs.flat_values))
    if isinstance(inputs, tf.SparseTensor):
        return tf.SparseTensor(inputs.indices, function(inputs.values), inputs.dense_shape)
    return function(tf.convert_to_tensor(inputs))


def keys_of(ids: tf.Tensor, name: str, input_dim: int | None = None) -> tf.Tensor:
    """Ids as the keys of a table.

    Args:
      ids: numbers of any shape.
      name: what errors call them.
      input_dim: the ids must be in [0, input_dim); None: any int64.

    Returns:
      int64 of the shape of ids.

    Raises:
      ValueError: ids are no numbers.
      tf.errors.InvalidArgumentError: one is no whole number, is a float so large that its type does
        not tell it from its neighbours (float32: `2**24`), is no int64, was cast to an integer type
        that does not hold it, or is out of bounds. The message has its value.
    """
    if not (ids.dtype.is_integer or ids.dtype.is_floating):
        raise ValueError(f"{name} must be integers, not {ids.dtype.name}")
    cast_to = ids.dtype if ids.dtype.is_integer else tf.int64

    def check(values: tf.Tensor, bound: int = 0) -> tf.Tensor:
        return ops.keys(values, cast_to=cast_to, input_dim=bound, name_of_ids=name)

    source, _ = _as_fed(ids, check)
    if source.dtype == tf.int64 == ids.dtype and input_dim is None:
        return ids
    return check(source, input_dim or 0)


def keys_of_stock_ops(ids: tf.Tensor, name: str, input_dim: int | None = None) -> tf.Tensor:
    """`keys_of` for an exported model, which has no ops of het_tf."""
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


def _as_fed(
    ids: tf.Tensor, check: Callable[[tf.Tensor], tf.Tensor], selects: bool = False
) -> tuple[tf.Tensor, bool]:
    """Ids as they were fed, before casts.

    A cast of what was computed stays: it may be there to round.

    Args:
      ids: of any shape and dtype.
      check: makes int64 keys of ids, or fails.
      selects: whether there may be more in `ids` than ids.

    Returns:
      before: of the shape of ids; `ids` itself where nothing that was fed was cast.
      is_fed: whether all of it was fed.
    """
    if not tf.is_symbolic_tensor(ids):
        return ids, False
    op = ids.op
    if op.type in _FED:
        return ids, True
    if op.type == "Cast":
        before, is_fed = _as_fed(op.inputs[0], check, selects)
        is_number = before.dtype.is_integer or before.dtype.is_floating
        return (before, True) if is_fed and is_number else (ids, False)
    if op.type in _JOINS:
        which, join = _JOINS[op.type]
        parts = op.inputs[which]
        before, are_fed = zip(*(_as_fed(part, check, selects) for part in parts), strict=True)
        is_same = all(one is other for one, other in zip(before, parts, strict=True))
        differ = len({part.dtype for part in before}) > 1
        if is_same or (differ and selects):
            return ids, is_same and all(are_fed)
        return join(op, [check(part) for part in before] if differ else before), all(are_fed)
    if op.type not in _MOVES:
        return ids, False
    place, again = _MOVES[op.type]
    before, is_fed = _as_fed(op.inputs[place], check, selects or op.type in _SELECT)
    if before is op.inputs[place]:
        return ids, is_fed
    after = again(op, before)
    return (after[ids.value_index] if isinstance(after, (list, tuple)) else after), is_fed
