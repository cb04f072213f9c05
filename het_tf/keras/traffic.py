"""What training does to caches and network, from the reports that come back with every closure."""

from __future__ import annotations

import keras

from het_tf._counters import add_up, since, with_ratios
from het_tf.cache import WorkerCache
from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.cache_reports import Holder


class Traffic:
    """Rates between one closure that has ended and the next."""

    def __init__(self, strategy: HetParameterServerStrategy):
        """Begins anew: what comes first has no rates yet."""
        self._strategy = strategy
        self._before: dict[Holder, dict[str, int]] = {}
        self._bytes = self._steps = 0
        self._cached: dict[str, int] = {}

    def take(self, holders: list[Holder], steps: int) -> None:
        """A closure with these caches and replicas has ended, after so many steps."""
        self._bytes = 0
        self._steps = steps
        cached = []
        for holder in holders:
            reports = self._strategy.last_cache_reports(holder).values()
            now = add_up(report.counters for report in reports)
            counted = since(now, self._before.get(holder, {}))
            self._before[holder] = now
            self._bytes += counted.get("bytes_up", 0) + counted.get("bytes_down", 0)
            if isinstance(holder, WorkerCache) and holder.config is not None:
                cached.append(counted)
        self._cached = add_up(cached)

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
