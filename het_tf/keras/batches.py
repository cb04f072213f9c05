"""Batches that Python makes, as datasets."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_LOOKED_AT = 2  # batches, for their shapes; so does Keras


def is_python_source(x: Any) -> bool:
    """Whether `x` is a generator or a `keras.utils.PyDataset`."""
    return inspect.isgenerator(x) or isinstance(x, keras.utils.PyDataset)


def python_dataset(x: Any, shuffle: bool, as_arrays: Callable[[Any], Any]) -> tf.data.Dataset:
    """A dataset of what a generator or a `keras.utils.PyDataset` yields, read by this process.

    Args:
      x: yields batches: `x`, `(x, y)` or `(x, y, sample_weight)`. A generator is read on where the
        dataset was read before.
      shuffle: whether the batches of a `PyDataset` that has an end come in another order each time.
      as_arrays: from a batch to the same of arrays.

    Raises:
      ValueError: a generator has no batches.
    """
    if inspect.isgenerator(x):
        seen = list(itertools.islice(x, _LOOKED_AT))
        if not seen:
            raise ValueError("The generator has no batches.")
        batches = itertools.chain(seen, x)
        count = None
    else:
        count = x.num_batches
        seen = [x[i] for i in range(min(_LOOKED_AT, count or _LOOKED_AT))]

    def read() -> Iterator[Any]:
        found = batches if inspect.isgenerator(x) else _batches_of(x, count, shuffle)
        return map(as_arrays, found)

    dataset = tf.data.Dataset.from_generator(
        read, output_signature=tf.nest.map_structure(_spec, *map(as_arrays, seen))
    )
    return (
        dataset if count is None else dataset.apply(tf.data.experimental.assert_cardinality(count))
    )


def _batches_of(x: keras.utils.PyDataset, count: int | None, shuffle: bool) -> Iterator[Any]:
    x.on_epoch_begin()
    order = itertools.count() if count is None else range(count)
    if shuffle and count is not None:
        order = np.random.default_rng().permutation(count).tolist()
    for i in order:
        yield x[i]
    x.on_epoch_end()


def _spec(array: np.ndarray, *others: np.ndarray) -> tf.TensorSpec:
    """Of a part of the batches that were looked at; where they differ an axis is of any size."""
    if not array.ndim:
        raise TypeError(
            "Under HetParameterServerStrategy the data must be a function that returns a"
            " tf.data.Dataset, a tf.data.Dataset, arrays, or a generator or keras.utils.PyDataset"
            f" of batches; got one of {array.dtype} scalars."
        )
    sizes = zip(*(each.shape[1:] for each in (array, *others)), strict=True)
    shape = [of_axis[0] if len({*of_axis}) == 1 else None for of_axis in sizes]
    return tf.TensorSpec([None, *shape], array.dtype)
