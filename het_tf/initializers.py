"""Initial values of rows, as the ops take them.

A row that nobody has updated is not stored anywhere: its value is computed from (seed, key, column)
where it is needed (ops/core/row/initializer.h). So the table takes the distribution and its
parameters from a Keras initializer, and draws by itself.
"""

from __future__ import annotations

import keras


def spec(identifier: str | keras.initializers.Initializer) -> str:
    """The initializer as the ops take it: its name and parameters.

    Args:
      identifier: a Keras initializer or its name: zeros, ones, constant, uniform, normal or
        truncated normal. Its seed is not used, the table has its own.

    Raises:
      ValueError: the initializer is of another kind, for example one that depends on the shape.
    """
    initializer = keras.initializers.get(identifier)
    kinds = keras.initializers
    match initializer:
        case kinds.Zeros():
            return "zeros"
        case kinds.Ones():
            return "constant value=1.0"
        case kinds.Constant():
            return f"constant value={float(initializer.value)!r}"
        case kinds.RandomUniform():
            low, high = float(initializer.minval), float(initializer.maxval)
            return f"uniform minval={low!r} maxval={high!r}"
        case kinds.RandomNormal() | kinds.TruncatedNormal():
            kind = "normal" if isinstance(initializer, kinds.RandomNormal) else "truncated_normal"
            mean, stddev = float(initializer.mean), float(initializer.stddev)
            return f"{kind} mean={mean!r} stddev={stddev!r}"
    raise ValueError(
        "embeddings_initializer must be zeros, ones, constant, uniform, normal or truncated normal,"
        f" not {identifier!r}"
    )
