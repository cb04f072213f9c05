"""Conversion of a layer's inputs into bags of ids. One bag becomes one output.

Dense, ragged and sparse inputs have the same form as bags: a vector of ids and the position where
every bag begins. Without pooling, a bag has one id, or none if the id is padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

COMBINERS = ("sum", "mean", "sqrtn", "max")


@dataclasses.dataclass(frozen=True)
class Bags:
    """The ids of one feature in one call.

    Attributes:
      ids: integers [ids], bag after bag.
      splits: int64 [bags + 1], the position in `ids` where every bag begins. Or, if all bags have
        the same size, int64 scalar: the number of ids.
      weights: float32 [ids], or None.
      combiner: one of `COMBINERS`.
      size: number of ids in a bag, if `splits` is a scalar.
      restore: function from outputs [bags, dim] to outputs in the shape of the inputs.
    """

    ids: tf.Tensor
    splits: tf.Tensor
    weights: tf.Tensor | None
    combiner: str
    restore: Callable[[tf.Tensor], Any]
    size: int = 1

    @property
    def pools(self) -> bool:
        """Whether the outputs differ from the rows of the ids."""
        return self.splits.shape.rank != 0 or self.size != 1 or self.weights is not None

    @property
    def count(self) -> tf.Tensor:
        """Number of bags, int64 scalar."""
        if self.splits.shape.rank == 0:
            return self.splits // self.size
        return tf.size(self.splits, tf.int64) - 1

    @property
    def bounds(self) -> tf.Tensor:
        """The position in `ids` where every bag begins, int64 [bags + 1]."""
        if self.splits.shape.rank == 0:
            return tf.range(0, self.splits + 1, self.size)
        return self.splits


def check_combiner(combiner: str | None) -> None:
    """Raises a ValueError if `combiner` is neither None nor the name of a combiner."""
    if combiner is not None and combiner not in COMBINERS:
        raise ValueError(
            f"combiner must be one of {', '.join(COMBINERS)} or None, not {combiner!r}"
        )


def bags_of(
    inputs: Any, weights: Any, combiner: str | None, padding: int | None, what: str
) -> Bags:
    """Converts inputs of any kind into bags.

    Args:
      inputs: integers: a dense tensor of any rank, a RaggedTensor or a SparseTensor. A combiner
        reduces the last axis, if there is more than one axis.
      weights: one weight per id, of the kind and shape of `inputs`. Dense weights may have fewer
        axes: a weight then applies to all ids with the same leading indices. None: all are 1.
      combiner: one of `COMBINERS`, or None: every id has an output.
      padding: id that is ignored. None: no id is ignored.
      what: name of the layer or feature, for errors.

    Raises:
      ValueError: weights do not fit the inputs.
      tf.errors.InvalidArgumentError: weights of a ragged or sparse input have other positions than
        the ids, or the indices of a sparse input are not in order.
    """
    if isinstance(inputs, tf.RaggedTensor):
        bags = _of_ragged(inputs, weights, combiner, what)
    elif isinstance(inputs, tf.SparseTensor):
        bags = _of_sparse(inputs, weights, combiner, what)
    else:
        bags = _of_dense(tf.convert_to_tensor(inputs), weights, combiner, what)
    return bags if padding is None else _without_padding(bags, padding)


def output_shape(
    shape: Sequence[int | None], combiner: str | None, dim: int
) -> tuple[int | None, ...]:
    """Returns the shape of the outputs for ids of a given shape."""
    shape = tuple(shape)
    return (*(shape[:-1] if combiner is not None and len(shape) > 1 else shape), dim)


def output_spec(
    inputs: keras.KerasTensor, combiner: str | None, dim: int, dtype: str
) -> keras.KerasTensor:
    """Returns the symbolic output for symbolic inputs."""
    shape = output_shape(inputs.shape, combiner, dim)
    return keras.KerasTensor(shape, dtype=dtype, ragged=inputs.ragged and len(shape) > 2)


def pool_with_stock_ops(rows: tf.Tensor, places: tf.Tensor, bags: Bags) -> tf.Tensor:
    """Pools rows with TensorFlow's own ops, for a SavedModel that is served without het_tf.

    Args:
      rows: float32 [keys, dim].
      places: int64 [ids], index of every id's row in `rows`.
      bags: the ids.

    Returns:
      float32 [bags, dim].
    """
    if not bags.pools:
        return tf.gather(rows, places)
    bounds = bags.bounds
    lengths = bounds[1:] - bounds[:-1]
    count = tf.size(lengths, tf.int64)
    weights = tf.ones(tf.shape(places)) if bags.weights is None else bags.weights
    if bags.combiner == "max":
        return _max_with_stock_ops(rows, places, weights, bounds[:-1], lengths)
    bag_of = tf.repeat(tf.range(count), lengths)
    matrix = tf.SparseTensor(
        tf.stack([bag_of, places], 1), weights, [count, tf.shape(rows, tf.int64)[0]]
    )
    sums = tf.sparse.sparse_dense_matmul(matrix, rows)
    if bags.combiner == "sum":
        return sums
    if bags.combiner == "mean":
        divisor = tf.math.unsorted_segment_sum(weights, bag_of, count)
    else:
        divisor = tf.sqrt(tf.math.unsorted_segment_sum(weights**2, bag_of, count))
    return tf.math.divide_no_nan(sums, divisor[:, tf.newaxis])


def _max_with_stock_ops(
    rows: tf.Tensor, places: tf.Tensor, weights: tf.Tensor, begin: tf.Tensor, lengths: tf.Tensor
) -> tf.Tensor:
    """Pools with "max": the first ids of all bags, then the second ids, and so on.

    The rows of all ids are never in memory at once.
    """

    def body(j: tf.Tensor, largest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        at = tf.minimum(begin + j, tf.size(places, tf.int64) - 1)
        values = tf.gather(rows, tf.gather(places, at)) * tf.gather(weights, at)[:, tf.newaxis]
        larger = tf.where(j == 0, values, tf.maximum(largest, values))
        return j + 1, tf.where((j < lengths)[:, tf.newaxis], larger, largest)

    most = tf.reduce_max(tf.concat([lengths, [0]], 0))
    nothing = tf.zeros([tf.size(lengths), rows.shape[1]])
    return tf.while_loop(lambda j, _: j < most, body, (tf.constant(0, tf.int64), nothing))[1]


def _of_dense(ids: tf.Tensor, weights: Any, combiner: str | None, what: str) -> Bags:
    if weights is not None:
        weights = _dense_weights(weights, ids, what)
    splits, size, static = tf.size(ids, tf.int64), 1, ids.shape
    pools = combiner is not None and static.rank not in (0, 1)
    if pools and static.rank is None:
        raise ValueError(f"inputs of {what} must have a known number of axes to be pooled")
    if pools:
        size, static = static[-1] or 0, static[:-1]
        if size == 0:  # or not known yet
            shape = tf.shape(ids, tf.int64)
            splits = tf.range(tf.reduce_prod(shape[:-1]) + 1) * shape[-1]

    def restore(outputs: tf.Tensor) -> tf.Tensor:
        if static.rank != 1:
            shape = tf.shape(ids)[:-1] if pools else tf.shape(ids)
            outputs = tf.reshape(outputs, tf.concat([shape, outputs.shape[-1:]], 0))
        outputs.set_shape(static.concatenate(outputs.shape[-1:]))
        return outputs

    # Skips the reshape of a vector. A collection would have one such op per feature.
    flat = ids if ids.shape.rank == 1 else tf.reshape(ids, [-1])
    return Bags(flat, splits, weights, combiner or "sum", restore, size)


def _dense_weights(weights: Any, ids: tf.Tensor, what: str) -> tf.Tensor:
    if isinstance(weights, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            f"weights of {what} must be a dense tensor, as its inputs are, not a"
            f" {type(weights).__name__}"
        )
    weights = tf.cast(tf.convert_to_tensor(weights), tf.float32)
    missing = (ids.shape.rank or 0) - (weights.shape.rank or 0)
    fits = missing >= 0 and ids.shape[: weights.shape.rank].is_compatible_with(weights.shape)
    if not fits:
        raise ValueError(
            f"weights of {what} have shape {weights.shape}, which does not fit inputs of shape"
            f" {ids.shape}"
        )
    if missing:
        weights = tf.reshape(weights, tf.concat([tf.shape(weights), [1] * missing], 0))
        weights = tf.broadcast_to(weights, tf.shape(ids))
    return tf.reshape(weights, [-1])


def _of_ragged(inputs: tf.RaggedTensor, weights: Any, combiner: str | None, what: str) -> Bags:
    if weights is not None:
        if not isinstance(weights, tf.RaggedTensor) or weights.ragged_rank != inputs.ragged_rank:
            raise ValueError(
                f"weights of {what} must be a RaggedTensor of the same row lengths as its inputs,"
                f" not {weights!r}"
            )
        same = [
            tf.debugging.assert_equal(
                a, b, f"weights of {what} must have the row lengths of its inputs"
            )
            for a, b in zip(weights.nested_row_splits, inputs.nested_row_splits, strict=True)
        ]
        with tf.control_dependencies([check for check in same if check is not None]):
            weights = tf.identity(weights.flat_values)
    flat = inputs.flat_values
    if combiner is None or flat.shape.rank != 1:
        # The last axis is uniform. It is pooled within the flat values, so the row splits stay.
        bags = _of_dense(flat, weights, combiner, what)
        return dataclasses.replace(
            bags, restore=lambda outputs: inputs.with_flat_values(bags.restore(outputs))
        )
    bags = _of_dense(flat, weights, None, what)
    *outer, splits = inputs.nested_row_splits

    def restore(outputs: tf.Tensor) -> Any:
        rows = inputs.shape[0] if not outer else None
        outputs = tf.ensure_shape(outputs, [rows, outputs.shape[-1]])
        if not outer:
            return outputs
        return tf.RaggedTensor.from_nested_row_splits(outputs, outer, validate=False)

    splits = tf.cast(splits, tf.int64)
    return dataclasses.replace(bags, splits=splits, combiner=combiner, restore=restore)


def _of_sparse(inputs: tf.SparseTensor, weights: Any, combiner: str | None, what: str) -> Bags:
    rank = inputs.shape.rank
    if rank is None:
        raise ValueError(f"inputs of {what} must have a known number of axes")
    shape, static, indices = inputs.dense_shape, inputs.shape, inputs.indices
    if combiner is not None and rank > 1:
        shape, static, indices = shape[:-1], static[:-1], indices[:, :-1]
    strides = tf.math.cumprod(shape, exclusive=True, reverse=True)
    bag_of = tf.reduce_sum(indices * strides, 1)
    checks = [
        tf.debugging.assert_non_negative(
            bag_of[1:] - bag_of[:-1],
            f"indices of inputs of {what} must be in order: use tf.sparse.reorder",
        )
    ]
    values = None
    if weights is not None:
        if not isinstance(weights, tf.SparseTensor):
            raise ValueError(
                f"weights of {what} must be a SparseTensor, as its inputs are, not {weights!r}"
            )
        checks.append(
            tf.debugging.assert_equal(
                weights.indices, inputs.indices, f"weights of {what} must lie where its inputs lie"
            )
        )
        values = tf.cast(weights.values, tf.float32)
    with tf.control_dependencies([check for check in checks if check is not None]):
        splits = tf.searchsorted(bag_of, tf.range(tf.reduce_prod(shape) + 1), out_type=tf.int64)

    def restore(outputs: tf.Tensor) -> tf.Tensor:
        dim = outputs.shape[-1]
        outputs = tf.reshape(outputs, tf.concat([shape, [dim]], 0))
        return tf.ensure_shape(outputs, static.concatenate([dim]))

    return Bags(inputs.values, splits, values, combiner or "sum", restore)


def _without_padding(bags: Bags, padding: int) -> Bags:
    """Returns the bags without padding ids."""
    keep = tf.cast(bags.ids, tf.int64) != padding
    before = tf.concat([[0], tf.cumsum(tf.cast(keep, tf.int64))], 0)
    return dataclasses.replace(
        bags,
        ids=tf.boolean_mask(bags.ids, keep),
        splits=tf.gather(before, bags.bounds),
        weights=None if bags.weights is None else tf.boolean_mask(bags.weights, keep),
    )
