"""Arguments of `keras.layers.Embedding`: checks and conversions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from het_tf.cache_config import CacheConfig
from het_tf.lifetimes import KeyRange
from het_tf.runtime.validation import INT64_MAX, MAX_DIM, check_integer

# Arguments of keras.layers.Embedding that HetEmbedding rejects, with the reasons.
WHY_NOT = {
    "lora_rank": "there is no LoRA, which adds a matrix of all rows to one that is frozen, and this"
    " table grows and is trained itself",
    "lora_alpha": "there is no LoRA to scale",
    "quantization_config": "rows are not quantized where they are trained; row_dtype='bfloat16'"
    " halves them there, and export(rows='int8') quantizes what is served",
}


def refuse_what_only_keras_does(given: dict[str, Any]) -> None:
    """Removes the arguments of Keras's layer that have no use here from `given`.

    Raises:
      ValueError: an argument of `WHY_NOT` is not None.
    """
    for name, why in WHY_NOT.items():
        value = given.pop(name, None)
        if value is not None:
            raise ValueError(f"{name} must be None, not {value!r}: {why}")
    if given.pop("input_length", None) is not None:
        warnings.warn("input_length has no use and can be left out, as in Keras", stacklevel=3)


def check_dtype(policy: keras.DTypePolicy) -> None:
    """Checks that a dtype policy has floating outputs and does not quantize weights.

    Raises:
      ValueError: the policy quantizes, or its compute dtype is not floating.
    """
    if policy.quantization_mode is not None:
        raise ValueError(f"dtype must not be {policy.name!r}: {WHY_NOT['quantization_config']}")
    if not keras.backend.is_float_dtype(policy.compute_dtype):
        raise ValueError(
            f"dtype must be a floating type, that of the outputs, not {policy.compute_dtype!r}: ids"
            " may be integers of any type, and keras.Input(..., dtype=) has theirs"
        )


def regularizer(identifier: Any) -> keras.regularizers.Regularizer | None:
    """Returns the Keras regularizer of an identifier, or None for None.

    Raises:
      ValueError: the identifier is invalid, or the regularizer compares all rows of a matrix.
    """
    found = keras.regularizers.get(identifier)
    if isinstance(found, keras.regularizers.OrthogonalRegularizer):
        raise ValueError(
            "embeddings_regularizer must be of rows one by one, not OrthogonalRegularizer, which"
            " compares all rows of a matrix: a step has those that it looks up"
        )
    return found


def matrix_of(initializer: keras.initializers.Initializer) -> np.ndarray | None:
    """Returns the matrix of a Keras `Constant` with pretrained rows, otherwise None."""
    if not isinstance(initializer, keras.initializers.Constant):
        return None
    value = np.asarray(initializer.value)
    return value if value.ndim else None


def dimensions(
    first: int | None, second: int | None, input_dim: int | None, output_dim: int | None
) -> tuple[int | None, int]:
    """Returns (input_dim, output_dim). Positional: `(output_dim)` or `(input_dim, output_dim)`.

    Raises:
      ValueError: a dimension is given twice or is out of range, or output_dim is missing.
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
    """Converts the argument `weights`: the values of the ids from 0 on, or a list of one array.

    Returns:
      float32 [input_dim, output_dim], or [n, output_dim] without an input_dim. None for None.

    Raises:
      ValueError: weights have another shape, or contain NaN or infinity.
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
    """Warns if rows expire and workers never ask the servers whether cached rows have expired.

    Args:
      name: name of the layer.
      cache: cache of the layer, or None.
      expiry: expiry of the layer's rows, or a false value.
      key_ranges: key ranges of the layer.
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
