"""Several steps of `fit` in one graph loop, in one process.

Every call of a TensorFlow function costs some tenths of a millisecond.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from het_tf.keras.data.arguments import FitArguments

_MOST_STEPS = 8  # 16 were not faster.
_BATCH_METHODS = tuple(
    f"on_{kind}batch_{moment}" for kind in ("", "train_", "test_") for moment in ("begin", "end")
)
_OF_FUNCTIONS = "train_function", "test_function", "predict_function"


def steps_of_loop(model: keras.Model, given: FitArguments) -> int:
    """Returns how many steps `fit` may run in one graph loop.

    Only 1 if a callback is called in every step, or if the model runs eagerly or under a strategy.
    Keras runs whole loops, so the result divides the numbers of steps that `fit` was given.
    """
    if model.run_eagerly or tf.config.functions_run_eagerly() or tf.distribute.has_strategy():
        return 1
    if model.distribute_strategy is not tf.distribute.get_strategy():
        return 1
    callbacks = given.callbacks or []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    if any(map(_sees_batches, tf.nest.flatten(callbacks))):
        return 1
    counts = [count for count in (given.steps_per_epoch, given.validation_steps) if count]
    common = math.gcd(*counts) if counts else 0  # 0: any number divides it.
    return next(n for n in range(_MOST_STEPS, 0, -1) if common % n == 0)


def _sees_batches(callback: keras.callbacks.Callback) -> bool:
    base = keras.callbacks.Callback
    if isinstance(callback, (keras.callbacks.History, keras.callbacks.ProgbarLogger)):
        return False
    per_epoch = getattr(callback, "save_freq", getattr(callback, "update_freq", None)) == "epoch"
    is_keras = type(callback).__module__.split(".")[0] == "keras"
    if is_keras and per_epoch:  # ModelCheckpoint, BackupAndRestore, TensorBoard
        return False
    # LambdaCallback sets its methods on the object.
    methods = {m: getattr(callback, m) for m in _BATCH_METHODS}
    return any(getattr(f, "__func__", f) is not getattr(base, m) for m, f in methods.items())


@contextlib.contextmanager
def looping(model: keras.Model, steps: int) -> Iterator[None]:
    """Context in which Keras runs so many steps in one graph loop.

    Keras makes its functions for a number of steps. Those of every number are kept until `compile`.
    """
    before = model.steps_per_execution
    _swap(model, steps)
    try:
        yield
    finally:
        _swap(model, before)


def _swap(model: keras.Model, steps: int) -> None:
    # Keras would track an assigned attribute as a part of the model.
    kept: dict[int, Any] = model.__dict__.setdefault("_het_functions", {})
    kept[model.steps_per_execution] = [getattr(model, name) for name in _OF_FUNCTIONS]
    functions = kept.get(steps, [None] * len(_OF_FUNCTIONS))
    for name, function in zip(_OF_FUNCTIONS, functions, strict=True):
        setattr(model, name, function)
    model.steps_per_execution = steps


def forget_functions(model: keras.Model) -> None:
    """Drops what was kept. Called by `compile`."""
    model.__dict__.pop("_het_functions", None)
