"""Figures that `fit` shows of the workers: speed, hits, bytes and waiting."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging

from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.worker_state import Holder, counted_between
from het_tf.runtime.counters import Counts, add_up, with_ratios
from het_tf.tables.worker_cache import WorkerCache

# `fit` gives advice if the workers wait for more than this share of an epoch of so many seconds.
_MUCH_WAITING = 0.3
_LONG_EPOCH = 5.0
# Advice depends on the share of ids that are in a cache, and of keys that are fetched again.
_FEW_HITS = 0.5
_MANY_REFRESHES = 0.2


class Traffic:
    """Counts what finished closures report, for the progress bar and for the logs of an epoch."""

    def __init__(self, strategy: HetParameterServerStrategy):
        """Starts without counts."""
        self._strategy = strategy
        self._steps = 0  # of the last closure
        self._last: list[Counts] = [{}, {}]  # counts of the last closure: of all, and of caches
        self._advised = False
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forgets the counts of the last epoch."""
        self._epoch: list[Counts] = [{}, {}]
        self._waited = 0.0
        self._looks_ahead = False
        self._began = time.monotonic()

    def take(self, holders: Sequence[Holder], reports: np.ndarray, steps: int) -> None:
        """Records the reports of a finished closure.

        Args:
          holders: caches and replicas of the closure.
          reports: result of `report_ops(holders)`.
          steps: number of steps of the closure.
        """
        last = self._strategy.held.last_cache_reports
        before = [last(holder) for holder in holders]
        self._strategy.held.record_cache_reports(holders, reports)
        counted = [
            counted_between(old.values(), last(holder).values())
            for holder, old in zip(holders, before, strict=True)
        ]
        caches = [
            each
            for holder, each in zip(holders, counted, strict=True)
            if isinstance(holder, WorkerCache) and holder.config is not None
        ]
        self._steps = steps
        self._last = [add_up(counted), add_up(caches)]
        self._epoch = [add_up(each) for each in zip(self._epoch, self._last, strict=True)]

    def take_wait(self, seconds: float) -> None:
        """Records how long a closure's steps waited for rows that were looked up ahead."""
        self._waited += seconds
        self._looks_ahead = True

    def rates(self) -> dict[str, float]:
        """Returns "kB_per_step", and "hit_rate" if caches exist, of the last finished closure."""
        if not self._steps:
            return {}
        counts, cached = self._last
        rates = {"kB_per_step": _bytes_of(counts) / self._steps / 1000}
        if cached:
            rates["hit_rate"] = with_ratios(cached)["hit_rate"]
        return rates

    def epoch_logs(self, examples: float | None) -> dict[str, float]:
        """Returns the figures of an epoch that ends now, as `het_tf.keras.Model.fit` lists them.

        Args:
          examples: number of examples of the epoch. None: unknown.
        """
        seconds = max(time.monotonic() - self._began, 1e-9)
        counts, cached = self._epoch
        logs = {} if examples is None else {"examples_per_s": examples / seconds}
        if cached:
            logs["hit_rate"] = with_ratios(cached)["hit_rate"]
        if counts:
            logs["MB_up_per_s"] = counts["bytes_up"] / seconds / 1e6
            logs["MB_down_per_s"] = counts["bytes_down"] / seconds / 1e6
        if self._looks_ahead:
            logs["waiting"] = self._waited / (seconds * self._strategy.num_workers)
            if seconds >= _LONG_EPOCH and not self._advised:
                self._advise(logs["waiting"], _bytes_of(counts) / seconds, with_ratios(cached))
        return logs

    def _advise(self, waiting: float, bytes_per_s: float, cached: Mapping[str, float]) -> None:
        what = advice(waiting, cached)
        if what is None:
            return
        self._advised = True
        logging.warning(
            "The workers waited %.0f %% of the last epoch for rows, at %.1f MB/s to and from the"
            " parameter servers: %s. See docs/choosing.md.",
            100 * waiting,
            bytes_per_s / 1e6,
            what,
        )


def advice(waiting: float, cached: Mapping[str, float]) -> str | None:
    """Returns what to change so that workers wait less. None: they wait little.

    Args:
      waiting: share of the time that the workers wait for rows.
      cached: counters of the caches with their ratios. Empty: there are no caches.
    """
    if waiting < _MUCH_WAITING:
        return None
    if not cached:
        return "no layer has a cache, and a cache fetches fewer rows (cache=)"
    if cached["evictions"] and cached["hit_rate"] < _FEW_HITS:
        hits = f"{cached['hit_rate']:.0%}"
        return f"full caches have {hits} of the ids: raise the capacity of CacheConfig"
    if cached["refreshes"] > _MANY_REFRESHES * cached["keys"]:
        refreshes = f"{cached['refreshes'] / cached['keys']:.0%}"
        return (
            f"{refreshes} of the rows are fetched again because other workers have updated them:"
            " raise total_staleness of CacheConfig as long as the metrics stay"
        )
    return 'halve the bytes with wire_dtype="bfloat16", or add parameter servers'


def _bytes_of(counts: Counts) -> int:
    return counts.get("bytes_up", 0) + counts.get("bytes_down", 0)
