"""Who calls: what a layer must know of its callers that neither Keras nor TensorFlow tells it.

Keras gives a layer no way to the model that is trained. It is on the call stack, where this
module, and no other, looks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import keras


def compiled_model() -> keras.Model | None:
    """The model that runs a step or is called, if it is compiled with an optimizer of Keras."""
    for frame in _frames():
        model = frame.f_locals.get("self")
        if isinstance(model, keras.Model) and isinstance(
            getattr(model, "optimizer", None), keras.optimizers.Optimizer
        ):
            return model
    return None


def _frames() -> Iterator[FrameType]:
    """The frames of the call stack, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
