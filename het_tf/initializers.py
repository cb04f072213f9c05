"""Conversion of Keras initializers into text specs for the ops.

A row without an update is not stored. Its value is a function of (seed, key, column), which the ops
compute (ops/core/row/initializer.h). A table therefore uses only the distribution and the
parameters of a Keras initializer, and draws the values itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from het_tf.runtime.validation import INT64_MAX

# Standard deviation of a normal distribution that is truncated at two standard deviations.
TRUNCATED_STDDEV = 0.87962566103423978
# With more rows, products of rows and frequencies would exceed int64
# (storage/served/frozen_table.py).
_MAX_ORTHOGONAL_ROWS = 2**30


def spec(
    identifier: str | keras.initializers.Initializer,
    input_dim: int | None = None,
    output_dim: int | None = None,
    ranges: Sequence[tuple[int, int, Any]] = (),
) -> str:
    """Returns the spec of a table: names and parameters of initializers, by ranges of keys.

    Args:
      identifier: initializer of the keys in no range, as in `spec_of_all`.
      input_dim: as in `spec_of_all`.
      output_dim: as in `spec_of_all`.
      ranges: disjoint ranges as (first key, last key, initializer or its name). The `input_dim` of
        their initializer is the number of keys.

    Raises:
      ValueError: an error of `spec_of_all`, or `identifier` is orthogonal and has keys above a
        range.
    """
    others = spec_of_all(identifier, input_dim, output_dim)
    parts = [others]
    free = -INT64_MAX - 1  # The first key that has no part yet.
    for first, last, initializer in sorted(ranges, key=lambda key_range: key_range[0]):
        if len(parts) > 1 and free < first:
            parts.append(f"{free} {_resumed(others)}")
        parts.append(f"{first} {spec_of_all(initializer, last - first + 1, output_dim)}")
        free = last + 1
    if len(parts) > 1 and free <= INT64_MAX:
        parts.append(f"{free} {_resumed(others)}")
    return "; ".join(parts)


def depends_on_shape(initializer: keras.initializers.Initializer) -> bool:
    """Whether the values depend on the number of rows or columns."""
    return isinstance(
        initializer, (keras.initializers.VarianceScaling, keras.initializers.Orthogonal)
    )


def parsed(text: str) -> list[tuple[int, str, dict[str, float]]]:
    """Splits a spec into parts of (first key, name, parameters). The first part has key 0."""
    parts = []
    for number, part in enumerate(text.split(";")):
        words = part.split()
        first = int(words.pop(0)) if number else 0
        name, *parameters = words
        parts.append((first, name, {n: float(v) for n, v in (p.split("=") for p in parameters)}))
    return parts


def _resumed(others: str) -> str:
    if others.startswith("orthogonal"):
        raise ValueError(
            "embeddings_initializer Orthogonal cannot go on after keys that have an initializer of"
            " their own: give the others one, too"
        )
    return others


def spec_of_all(
    identifier: str | keras.initializers.Initializer,
    input_dim: int | None = None,
    output_dim: int | None = None,
) -> str:
    """Returns the spec of an initializer for all keys.

    Args:
      identifier: a Keras initializer or its name: zeros, ones, constant, uniform, normal, truncated
        normal, variance scaling and its kinds (glorot, he, lecun), or orthogonal. Its seed is not
        used, because the table has a seed. The orthogonal matrix differs from Keras's. It is a
        cosine transform with random signs, which can be computed row by row.
      input_dim: number of rows: the fan-in, and the size of an orthogonal matrix. None: unknown.
      output_dim: number of columns: the fan-out, and the size of an orthogonal matrix. None:
        unknown.

    Raises:
      ValueError: the initializer is of another kind, or depends on an unknown dimension.
    """
    initializer = keras.initializers.get(identifier)
    kinds = keras.initializers
    match initializer:
        case kinds.Zeros():
            return "zeros"
        case kinds.Ones():
            return "constant value=1.0"
        case kinds.Constant():
            if np.ndim(initializer.value):
                raise ValueError(
                    "embeddings_initializer must be Constant of a number where it is one of many"
                    f" tables, not of shape {np.shape(initializer.value)}: set_weights or"
                    " table.assign(ids, values) sets rows"
                )
            return f"constant value={float(initializer.value)!r}"
        case kinds.RandomUniform():
            return _uniform(float(initializer.minval), float(initializer.maxval))
        case kinds.RandomNormal():
            return _normal("normal", float(initializer.stddev), float(initializer.mean))
        case kinds.TruncatedNormal():
            return _normal("truncated_normal", float(initializer.stddev), float(initializer.mean))
        case kinds.VarianceScaling(input_axes=None, output_axes=None):
            return _variance_scaling(initializer, input_dim, output_dim)
        case kinds.Orthogonal():
            rows = _needed("input_dim", input_dim, initializer)
            _needed("output_dim", output_dim, initializer)
            if rows > _MAX_ORTHOGONAL_ROWS:
                raise ValueError(
                    "embeddings_initializer Orthogonal takes an input_dim of at most"
                    f" {_MAX_ORTHOGONAL_ROWS}, not {rows}"
                )
            return f"orthogonal rows={float(rows)!r} gain={float(initializer.gain)!r}"
    raise ValueError(
        "embeddings_initializer must be zeros, ones, constant, uniform, normal, truncated normal,"
        f" variance scaling (glorot, he, lecun) or orthogonal, not {identifier!r}"
    )


def _uniform(low: float, high: float) -> str:
    return f"uniform minval={low!r} maxval={high!r}"


def _normal(kind: str, stddev: float, mean: float = 0.0) -> str:
    return f"{kind} mean={mean!r} stddev={stddev!r}"


def _variance_scaling(
    initializer: keras.initializers.VarianceScaling, input_dim: int | None, output_dim: int | None
) -> str:
    fans = []
    if initializer.mode in ("fan_in", "fan_avg"):
        fans.append(_needed("input_dim", input_dim, initializer))
    if initializer.mode in ("fan_out", "fan_avg"):
        fans.append(_needed("output_dim", output_dim, initializer))
    variance = initializer.scale / max(1.0, sum(fans) / len(fans))
    match initializer.distribution:
        case "uniform":
            limit = math.sqrt(3 * variance)
            return _uniform(-limit, limit)
        case "untruncated_normal":
            return _normal("normal", math.sqrt(variance))
    return _normal("truncated_normal", math.sqrt(variance) / TRUNCATED_STDDEV)


def _needed(name: str, value: int | None, initializer: keras.initializers.Initializer) -> int:
    if value is None:
        raise ValueError(
            f"embeddings_initializer {type(initializer).__name__} depends on {name}: give it, as in"
            " HetEmbedding(input_dim, output_dim)"
        )
    return value
