"""Initial values of rows, as the ops take them.

A row that nobody has updated is not stored anywhere: its value is computed from (seed, key, column) where it is needed
(ops/core/initializer.h). So the table takes the distribution and its parameters from a Keras initializer, and draws by
itself.
"""

from __future__ import annotations

import keras


def spec(identifier: str | keras.initializers.Initializer) -> str:
    """The initializer as the ops take it: its name and parameters.

    Args:
      identifier: a Keras initializer or its name: zeros, ones, constant, uniform, normal or truncated normal. Its seed
        is not used, the table has its own.

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
            return f"uniform minval={float(initializer.minval)!r} maxval={float(initializer.maxval)!r}"
        case kinds.RandomNormal():
            return f"normal mean={float(initializer.mean)!r} stddev={float(initializer.stddev)!r}"
        case kinds.TruncatedNormal():
            return f"truncated_normal mean={float(initializer.mean)!r} stddev={float(initializer.stddev)!r}"
    raise ValueError(
        f"embeddings_initializer must be zeros, ones, constant, uniform, normal or truncated normal, not {identifier!r}"
    )
