"""Callbacks of `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from het_tf.keras.callbacks.traffic import Traffic
from het_tf.keras.data.feeds import Feed
from het_tf.layers.embedding import named_embeddings
from het_tf.top import StatusFile


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras's progress bar, with the share of ids found in caches and kB between hosts per step."""

    def __init__(self, traffic: Traffic):
        """Adds `traffic.rates()` to the logs of training."""
        super().__init__()
        self._traffic = traffic

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Shows the steps of a closure."""
        super().on_train_batch_end(batch, {**(logs or {}), **self._traffic.rates()})


_INTERVAL = 1.0  # seconds


class StatusCallback(keras.callbacks.Callback):
    """Writes the status of training to a file, at most once a second.

    The coordinator asks the shards only while `het_tf.top` reads the file.
    """

    def __init__(self) -> None:
        """Starts without a written status."""
        super().__init__()
        self._file = StatusFile()
        self._written = 0.0
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Stores the epoch for the status."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes the status, unless the last one is less than a second old."""
        now = time.monotonic()
        if now - self._written >= _INTERVAL:
            self._written = now
            self._file.write(self._status(batch + 1))

    def remove(self) -> None:
        """Deletes the status file."""
        self._file.remove()

    def _status(self, step: int) -> dict[str, Any]:
        strategy = self.model.distribute_strategy
        layers = named_embeddings(self.model)
        watched = self._file.is_watched
        return {
            "model": self.model.name,
            "epoch": self._epoch + 1,
            "epochs": self.params.get("epochs"),
            "step": step,
            "steps": self.params.get("steps"),
            "tasks": [
                {"task": f"{task_type} {index}", "address": address, "state": state}
                for (task_type, index), (address, state) in strategy.task_states().items()
            ],
            "caches": {
                name: {
                    worker: dict(report.counters)
                    for worker, report in strategy.held.last_cache_reports(
                        layer.worker_cache
                    ).items()
                }
                for name, layer in layers.items()
            },
            "replicas": {
                report.worker: dict(report.counters)
                for report in strategy.held.last_replica_reports()
            },
            "shards": {
                name: dict(enumerate(layer.table.shard_stats())) if watched else {}
                for name, layer in layers.items()
            },
        }


Logs = dict[str, float]

_OF_BATCHES = tuple(
    f"{kind}batch_{when}" for kind in ("", "train_", "test_") for when in ("begin", "end")
)
_BARS = (keras.callbacks.ProgbarLogger, ProgressBar)
_DRAWING_INTERVAL = 0.05  # seconds, as in Keras


def callback_list(
    model: keras.Model,
    callbacks: Any,
    feed: Feed,
    verbose: str | int,
    epochs: int = 1,
    traffic: Traffic | None = None,
) -> keras.callbacks.CallbackList:
    """Returns the list of the user's callbacks and of the callbacks that `fit` adds.

    Args:
      model: model of the callbacks.
      callbacks: as in `fit`. A `CallbackList`, from Keras's own callers, is returned unchanged.
      feed: feed with the number of steps of a pass.
      verbose: as in `fit`.
      epochs: as in `fit`.
      traffic: source of rates for the progress bar of `fit`. None: the list is for `evaluate` or
        `predict`, without a history.
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
    """Deletes the status file at the end of a `fit`, also after an error."""
    try:
        yield
    finally:
        for each in callbacks.callbacks:
            if isinstance(each, StatusCallback):
                each.remove()


def look_at_batches(callbacks: keras.callbacks.CallbackList) -> bool:
    """Whether a user's callback overrides a batch hook, which may read or change anything.

    Progress bars and the status callback do not count: they only show the progress of training.
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
    """Returns a function of a finished closure's first batch, last batch and maker of logs.

    Making a closure's logs takes the coordinator as long as its other work for the closure. Logs
    are made for every closure if `look_at_batches`, else when a progress bar draws, else never.

    Args:
      callbacks: callbacks that may read the logs.
      begin: called with the first batch.
      end: called with the last batch and the newest logs.
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
