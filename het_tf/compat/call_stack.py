"""The callers of a function, where neither Keras nor TensorFlow names them.

A layer that is traced for a SavedModel has to know which archive is written, and in which format.
Both are on the call stack. Checked with Keras 3.15 and TensorFlow 2.21. Without this module,
`keras.Model.export` and `tf.saved_model.save` would leave out the rows of tables.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras


def caller(kind: type) -> Any:
    """The innermost object of a class, a method of which runs; None if there is none."""
    selves = (frame.f_locals.get("self") for frame in _frames())
    return next((each for each in selves if isinstance(each, kind)), None)


def is_called_by(function: Callable[..., Any]) -> bool:
    """Returns whether a function of Python runs."""
    code = inspect.unwrap(function).__code__
    return any(frame.f_code is code for frame in _frames())


def export_format() -> str | None:
    """The format of the `keras.Model.export` that runs, if one does."""
    for frame in _frames():
        if frame.f_code is inspect.unwrap(keras.Model.export).__code__:
            return frame.f_locals["format"]
    return None


def _frames() -> Iterator[FrameType]:
    """The frames of the call stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
