"""The ids of a batch, by table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from het_tf.runtime.validation import INT64_MAX, check_integer


def tables_of(ids: Callable[..., Any], element: Any) -> list[tf.Tensor]:
    """Returns the ids that each table looks up for a batch, int64 [batch, columns].

    Args:
      ids: as for `location_aware`.
      element: a batch.

    Raises:
      ValueError: a tensor of ids has another shape or dtype.
    """
    # As tf.data calls functions: a NamedTuple is one argument.
    found = ids(*element) if type(element) is tuple else ids(element)
    parts = []
    for part in tf.nest.flatten(found):
        keys = tf.convert_to_tensor(part)
        if not keys.dtype.is_integer:
            raise ValueError(f"ids must return integers, not {keys.dtype.name}")
        keys = tf.cast(keys, tf.int64)
        if keys.shape.rank == 1:
            keys = keys[:, tf.newaxis]
        if keys.shape.rank != 2 or keys.shape[1] is None:
            raise ValueError(
                f"ids must return tensors [batch] or [batch, columns] with a known number of"
                f" columns, not of shape {keys.shape}"
            )
        parts.append(keys)
    return parts


def batch_size_of(dataset: tf.data.Dataset, given: int | None, name: str) -> int:
    """Returns a batch size that was given, or the static one of the dataset.

    Raises:
      ValueError: both are unknown. The message names the function `name`.
    """
    if given is not None:
        given = check_integer("batch_size", given, 1, INT64_MAX)
    spec = tf.nest.flatten(dataset.element_spec)[0]
    size = given or (spec.shape[0] if spec.shape.rank else None)
    if not size:
        raise ValueError(
            f"The batch dimension of the dataset is unknown: give {name} the batch_size, or the"
            " dataset batches with drop_remainder=True"
        )
    return size
