"""What training does to caches and network, from the reports that come back with every closure."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np

from het_tf._counters import Counts, add_up, with_ratios
from het_tf.cache import WorkerCache
from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.cache_reports import Holder, counted_between


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
        last = self._strategy.last_cache_reports
        before = [last(holder) for holder in holders]
        self._strategy.record_cache_reports(holders, reports)
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
