"""Who calls: what a layer must know of its callers that neither Keras nor TensorFlow tells it.

Keras gives a layer no way to the model that is trained. A `GradientTape` calls the gradients of all
that it recorded, whatever it was asked for. Both are on the call stack, where this module, and no
other, looks: for locals called `self`, and for the arguments of `GradientTape.gradient`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras
import tensorflow as tf


def compiled_model() -> keras.Model | None:
    """The model that runs a step or is called, if it is compiled with an optimizer of Keras."""
    for frame in _frames():
        model = frame.f_locals.get("self")
        if isinstance(model, keras.Model) and isinstance(
            getattr(model, "optimizer", None), keras.optimizers.Optimizer
        ):
            return model
    return None


def caller(kind: type) -> Any:
    """The innermost object of a class, a method of which runs; None if there is none."""
    selves = (frame.f_locals.get("self") for frame in _frames())
    return next((each for each in selves if isinstance(each, kind)), None)


def is_called_by(function: Callable[..., Any]) -> bool:
    """Whether a function of Python runs."""
    return any(frame.f_code is function.__code__ for frame in _frames())


def gradient_call() -> tuple[list[Any], list[Any]] | None:
    """Targets and sources of the `GradientTape.gradient` that runs, if one does."""
    for frame in _frames():
        if frame.f_code is tf.GradientTape.gradient.__code__:
            arguments = frame.f_locals
            return tf.nest.flatten(arguments["target"]), tf.nest.flatten(arguments["sources"])
    return None


def _frames() -> Iterator[FrameType]:
    """The frames of the call stack, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
