"""The callbacks that `fit`, `evaluate` and `predict` call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from het_tf.keras.feeds import Feed
from het_tf.keras.status import StatusCallback
from het_tf.keras.traffic import ProgressBar, Traffic


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


def batch_hooks(
    begin: Callable[[int], None],
    end: Callable[[int, Mapping[str, float]], None],
    after: Callable[[], None] = lambda: None,
) -> Callable[[int, int, Mapping[str, float]], None]:
    """What is called with the first and the last batch of a closure that ended, and its logs."""

    def on_batch(first: int, last: int, logs: Mapping[str, float]) -> None:
        begin(first)
        end(last, logs)
        after()

    return on_batch
