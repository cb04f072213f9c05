"""What programs do with `keras.layers.Embedding` beside calling it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from het_tf.cache_config import CacheConfig
from het_tf.lifetimes import KeyRange
from het_tf.runtime.validation import INT64_MAX, MAX_DIM, check_integer

# What keras.layers.Embedding takes, and this layer does not do.
WHY_NOT = {
    "lora_rank": "there is no LoRA, which adds a matrix of all rows to one that is frozen, and this"
    " table grows and is trained itself",
    "lora_alpha": "there is no LoRA to scale",
    "quantization_config": "rows are not quantized where they are trained; row_dtype='bfloat16'"
    " halves them there, and export(rows='int8') quantizes what is served",
}


def refuse_what_only_keras_does(given: dict[str, Any]) -> None:
    """Takes those arguments of Keras's layer out of `given` that have no use here.

    Raises:
      ValueError: one has a value, which would do something there.
    """
    for name, why in WHY_NOT.items():
        value = given.pop(name, None)
        if value is not None:
            raise ValueError(f"{name} must be None, not {value!r}: {why}")
    if given.pop("input_length", None) is not None:
        warnings.warn("input_length has no use and can be left out, as in Keras", stacklevel=3)


def check_dtype(policy: keras.DTypePolicy) -> None:
    """Takes dtype policies of floating outputs that do not quantize weights.

    Raises:
      ValueError: this is another.
    """
    if policy.quantization_mode is not None:
        raise ValueError(f"dtype must not be {policy.name!r}: {WHY_NOT['quantization_config']}")
    if not keras.backend.is_float_dtype(policy.compute_dtype):
        raise ValueError(
            f"dtype must be a floating type, that of the outputs, not {policy.compute_dtype!r}: ids"
            " may be integers of any type, and keras.Input(..., dtype=) has theirs"
        )


def regularizer(identifier: Any) -> keras.regularizers.Regularizer | None:
    """A Keras regularizer, or that of a name.

    Raises:
      ValueError: it is none, or one of how many rows there are.
    """
    found = keras.regularizers.get(identifier)
    if isinstance(found, keras.regularizers.OrthogonalRegularizer):
        raise ValueError(
            "embeddings_regularizer must be of rows one by one, not OrthogonalRegularizer, which"
            " compares all rows of a matrix: a step has those that it looks up"
        )
    return found


def matrix_of(initializer: keras.initializers.Initializer) -> np.ndarray | None:
    """The matrix of a Keras `Constant` that has one: pretrained rows; None for all else."""
    if not isinstance(initializer, keras.initializers.Constant):
        return None
    value = np.asarray(initializer.value)
    return value if value.ndim else None


def dimensions(
    first: int | None, second: int | None, input_dim: int | None, output_dim: int | None
) -> tuple[int | None, int]:
    """Input and output dimension, of `(output_dim)` or `(input_dim, output_dim)` or their names.

    Raises:
      ValueError: one is given twice, is out of its range or, of the second, is missing.
    """
    given = [dim for dim in (first, second) if dim is not None]
    if len(given) == 2 or (given and output_dim is not None):
        if input_dim is not None:
            raise ValueError(f"input_dim is given twice, as {given[0]!r} and {input_dim!r}")
        input_dim = given.pop(0)
    if given:
        if output_dim is not None:
            raise ValueError(f"output_dim is given twice, as {given[0]!r} and {output_dim!r}")
        output_dim = given[0]
    output_dim = check_integer("output_dim", output_dim, 1, MAX_DIM)
    if input_dim is not None:
        input_dim = check_integer("input_dim", input_dim, 1, INT64_MAX)
    return input_dim, output_dim


def first_values(weights: Any, input_dim: int | None, output_dim: int) -> np.ndarray | None:
    """The argument `weights`: values of the ids from 0 on, or a list of them.

    Returns:
      float32 [input_dim, output_dim], or [n, output_dim] without an input_dim; None for None.

    Raises:
      ValueError: it has another shape, or holds NaN or infinity.
    """
    if weights is None:
        return None
    if isinstance(weights, (list, tuple)) and len(weights) == 1:
        weights = weights[0]
    values = np.asarray(weights, np.float32)
    rows = "n" if input_dim is None else input_dim
    shape = (values.shape[:1] if input_dim is None else (rows,)) + (output_dim,)
    if values.shape != shape or not values.ndim:
        raise ValueError(f"weights must have the shape ({rows}, {output_dim}), not {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("weights must be finite; they hold NaN or infinity")
    return values


def check_cache_hears(
    name: str, cache: CacheConfig | None, expiry: Any, key_ranges: Sequence[KeyRange]
) -> None:
    """Warns where rows expire, and workers never ask whether those that they have did.

    Args:
      name: of the layer.
      cache: of it, or None.
      expiry: of it, or nothing.
      key_ranges: of it.
    """
    expires = expiry or any(each.expiry for each in key_ranges)
    if cache is None or not cache.is_unbounded or not expires:
        return
    warnings.warn(
        f"layer {name}: rows expire, but its cache has no read bound (staleness=None), and so never"
        " asks for a row that it has: a worker goes on with a row that has expired until it evicts"
        " it. Give its CacheConfig a read_bound.",
        stacklevel=2,
    )
