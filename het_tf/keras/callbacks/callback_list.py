"""The callbacks that `fit`, `evaluate` and `predict` call."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.worker_state import Holder, counted_between
from het_tf.keras.data.feeds import Feed
from het_tf.layers.embedding import named_embeddings
from het_tf.runtime.counters import Counts, add_up, with_ratios
from het_tf.tables.worker_cache import WorkerCache
from het_tf.top import StatusFile


class Traffic:
    """Rates of the closure that ended last, from its worker's report before to that at its end."""

    def __init__(self, strategy: HetParameterServerStrategy):
        """Begins anew: there are no rates yet."""
        self._strategy = strategy
        self._bytes = self._steps = 0
        self._cached: Counts = {}

    def take(self, holders: Sequence[Holder], reports: np.ndarray, steps: int) -> None:
        """A closure has ended: records its reports, of these caches and replicas.

        Args:
          holders: of the closure.
          reports: what `report_ops(holders)` gave.
          steps: how many the closure made.
        """
        last = self._strategy.held.last_cache_reports
        before = [last(holder) for holder in holders]
        self._strategy.held.record_cache_reports(holders, reports)
        counted = [
            counted_between(old.values(), last(holder).values())
            for holder, old in zip(holders, before, strict=True)
        ]
        self._bytes = sum(each.get("bytes_up", 0) + each.get("bytes_down", 0) for each in counted)
        self._steps = steps
        self._cached = add_up(
            each
            for holder, each in zip(holders, counted, strict=True)
            if isinstance(holder, WorkerCache) and holder.config is not None
        )

    def rates(self) -> dict[str, float]:
        """For the progress bar: "hit_rate" where there are caches, and "kB_per_step"."""
        if not self._steps:
            return {}
        rates = {"kB_per_step": self._bytes / self._steps / 1000}
        if self._cached:
            rates["hit_rate"] = with_ratios(self._cached)["hit_rate"]
        return rates


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras's, which also shows the share of ids found in caches, and bytes between hosts."""

    def __init__(self, traffic: Traffic):
        """Shows `traffic.rates()` beside the logs of training."""
        super().__init__()
        self._traffic = traffic

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Shows a closure's steps."""
        super().on_train_batch_end(batch, {**(logs or {}), **self._traffic.rates()})


_INTERVAL = 1.0  # seconds


class StatusCallback(keras.callbacks.Callback):
    """Says once a second what training does: what the coordinator knows without asking anybody.

    While somebody looks, the shards are asked, too.
    """

    def __init__(self) -> None:
        """Says nothing yet."""
        super().__init__()
        self._file = StatusFile()
        self._written = 0.0
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes the status, if it is time."""
        now = time.monotonic()
        if now - self._written >= _INTERVAL:
            self._written = now
            self._file.write(self._status(batch + 1))

    def remove(self) -> None:
        """Takes the status away."""
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
