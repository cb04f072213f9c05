"""Callers of a function, read from the call stack of Python.

A layer that is traced for a SavedModel needs the archive and the format of the export. Neither
Keras nor TensorFlow passes them to layers. Checked with Keras 3.15 and TensorFlow 2.21. Without
this module, `keras.Model.export` and `tf.saved_model.save` would leave out the rows of tables.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras


def caller(kind: type) -> Any:
    """Returns the innermost `self` on the call stack that is a `kind`, or None."""
    selves = (frame.f_locals.get("self") for frame in _frames())
    return next((each for each in selves if isinstance(each, kind)), None)


def is_called_by(function: Callable[..., Any]) -> bool:
    """Whether a Python function is on the call stack."""
    code = inspect.unwrap(function).__code__
    return any(frame.f_code is code for frame in _frames())


def export_format() -> str | None:
    """Returns the `format` of the running `keras.Model.export`, or None if none is running."""
    for frame in _frames():
        if frame.f_code is inspect.unwrap(keras.Model.export).__code__:
            return frame.f_locals["format"]
    return None


def _frames() -> Iterator[FrameType]:
    """Yields the frames of the call stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
