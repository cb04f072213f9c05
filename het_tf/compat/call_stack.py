"""Who calls: what a layer must know of its callers that neither Keras nor TensorFlow tells it.

Keras gives a layer no way to the model that is trained. A `GradientTape` calls the gradients of all
that it recorded, whatever it was asked for. Both are on the call stack, where this module, and no
other, looks: for locals called `self`, and for the arguments of `GradientTape.gradient`.
"""

from __future__ import annotations

import inspect
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


def fitted_model() -> keras.Model | None:
    """The model whose `fit` or `train_on_batch` of Keras runs, if it is compiled so."""
    codes = [inspect.unwrap(f).__code__ for f in (keras.Model.fit, keras.Model.train_on_batch)]
    for frame in _frames():
        if frame.f_code in codes:
            model = frame.f_locals["self"]
            is_compiled = isinstance(model.optimizer, keras.optimizers.Optimizer)
            return model if is_compiled else None
    return None


def caller(kind: type) -> Any:
    """The innermost object of a class, a method of which runs; None if there is none."""
    selves = (frame.f_locals.get("self") for frame in _frames())
    return next((each for each in selves if isinstance(each, kind)), None)


def is_called_by(function: Callable[..., Any], of: Any = None) -> bool:
    """Whether a function of Python runs; of: as a method of that object."""
    code = inspect.unwrap(function).__code__
    return any(
        frame.f_code is code and (of is None or frame.f_locals.get("self") is of)
        for frame in _frames()
    )


def export_format() -> str | None:
    """The format of the `keras.Model.export` that runs, if one does."""
    for frame in _frames():
        if frame.f_code is inspect.unwrap(keras.Model.export).__code__:
            return frame.f_locals["format"]
    return None


def gradient_call() -> tuple[list[Any], list[Any]] | None:
    """Targets and sources of the `GradientTape.gradient` that runs, if one does."""
    for frame in _frames():
        if frame.f_code is tf.GradientTape.gradient.__code__:
            arguments = frame.f_locals
            return tf.nest.flatten(arguments["target"]), tf.nest.flatten(arguments["sources"])
    return None


def optimizer_with(variable: keras.Variable) -> keras.optimizers.Optimizer | None:
    """Who takes a variable among those that it is built with, or was; None if nobody does.

    Called where the variable is asked for its value, which Keras's optimizers do to tell variables
    apart (`_var_key`).

    Returns:
      The optimizer; of a `LossScaleOptimizer` and its inner one the former.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "_var_key" or frame.f_locals.get("variable") is not variable:
        return None
    return caller(keras.optimizers.LossScaleOptimizer) or caller(keras.optimizers.Optimizer)


def jacobian_sources() -> list[Any] | None:
    """Sources of the `GradientTape.jacobian` or `batch_jacobian` that runs, if one does."""
    tape = tf.GradientTape
    for frame in _frames():
        if frame.f_code is tape.jacobian.__code__:
            return tf.nest.flatten(frame.f_locals["sources"])
        if frame.f_code is tape.batch_jacobian.__code__:
            return tf.nest.flatten(frame.f_locals["source"])
    return None


def _frames() -> Iterator[FrameType]:
    """The frames of the call stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
