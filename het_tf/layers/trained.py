"""Tensors with a gradient of one's own, which goes when the graph does that they are in.

`tf.custom_gradient` writes the gradient of each call in a graph down for good, and so the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from het_tf import ops

# Of gradients with respect to the outputs those with respect to what they are trained by.
Update = Callable[[list[tf.Tensor]], list["tf.Tensor | None"]]

_UPDATE = "_het_update"


def trained(rows: list[tf.Tensor], by: list[tf.Tensor], update: Update) -> list[tf.Tensor]:
    """Has a gradient of rows call `update`.

    Args:
      rows: float32 of any shape.
      by: floats of any shape, what is to have gradients. The first is made for this call.
      update: None in what it returns stands for zeros.

    Returns:
      The rows.
    """
    # The tape or the graph has this tensor as long as it may ask for a gradient.
    setattr(by[0], _UPDATE, update)
    return ops.trained(rows, by)


@tf.RegisterGradient("Het>Trained")
def _gradient(op: Any, *gradients: tf.Tensor) -> list[tf.Tensor | None]:
    by = op.inputs[len(gradients) :]
    found = getattr(by[0], _UPDATE)(list(gradients))
    of_by = [
        tf.zeros_like(each) if of is None else tf.cast(of, each.dtype)
        for each, of in zip(by, found, strict=True)
    ]
    return [None] * len(gradients) + of_by
