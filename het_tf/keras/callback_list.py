"""The callbacks that `fit`, `evaluate` and `predict` call."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from het_tf.keras.feeds import Feed
from het_tf.keras.status import StatusCallback
from het_tf.keras.traffic import ProgressBar, Traffic

Logs = dict[str, float]

_OF_BATCHES = tuple(
    f"{kind}batch_{when}" for kind in ("", "train_", "test_") for when in ("begin", "end")
)
_BARS = (keras.callbacks.ProgbarLogger, ProgressBar)
_DRAWING_INTERVAL = 0.05  # seconds; Keras's


def callback_list(
    model: keras.Model,
    callbacks: Any,
    feed: Feed,
    verbose: str | int,
    epochs: int = 1,
    traffic: Traffic | None = None,
) -> keras.callbacks.CallbackList:
    """What is called with the user's callbacks.

    Args:
      model: they are told of it.
      callbacks: as of `fit`; a `CallbackList`, as Keras's own callers have one, is taken as it is.
      feed: says how many steps a pass has.
      verbose: as of `fit`.
      epochs: as of `fit`.
      traffic: of `fit`, for its progress bar; None: of `evaluate` or `predict`, which has no
        history.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    callbacks = tf.nest.flatten(callbacks) if callbacks else []
    if traffic is not None:
        callbacks.append(StatusCallback())
        has_bar = any(isinstance(each, keras.callbacks.ProgbarLogger) for each in callbacks)
        if verbose != 0 and not has_bar:
            callbacks.append(ProgressBar(traffic))
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=traffic is not None,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=feed.num_steps,
        model=model,
    )


@contextlib.contextmanager
def showing_status(callbacks: keras.callbacks.CallbackList) -> Iterator[None]:
    """Around a `fit`, after which its status is gone, however it ends."""
    try:
        yield
    finally:
        for each in callbacks.callbacks:
            if isinstance(each, StatusCallback):
                each.remove()


def look_at_batches(callbacks: keras.callbacks.CallbackList) -> bool:
    """Whether a callback of the user's is called with batches, and may look or change something.

    Those that fit adds are not meant: bars draw, and the status says, how far training is.
    """
    return any(
        getattr(getattr(each, f"on_{name}"), "__func__", None)
        is not getattr(keras.callbacks.Callback, f"on_{name}")
        for each in callbacks.callbacks
        if type(each) not in (*_BARS, StatusCallback)
        for name in _OF_BATCHES
    )


def batch_hooks(
    callbacks: keras.callbacks.CallbackList,
    begin: Callable[[int], None],
    end: Callable[[int, Logs], None],
) -> Callable[[int, int, Callable[[], Logs]], None]:
    """What is called with the first and the last batch of a closure that ended, and makes its logs.

    The training program needs as long for the logs of a closure as for all else that it does for
    one. So they are new for a bar when it draws, and for nobody if nobody looks.

    Args:
      callbacks: who looks.
      begin: called with the first batch.
      end: called with the last, and the logs.
    """
    draws = any(type(each) in _BARS for each in callbacks.callbacks)
    interval = 0.0 if look_at_batches(callbacks) else _DRAWING_INTERVAL if draws else math.inf
    logs: Logs = {}
    made = -math.inf

    def on_batch(first: int, last: int, logs_now: Callable[[], Logs]) -> None:
        nonlocal logs, made
        now = time.monotonic()
        if interval < math.inf and now - made >= interval:
            logs, made = logs_now(), now
        begin(first)
        end(last, logs)

    return on_batch
