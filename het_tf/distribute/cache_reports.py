"""What is known about the caches on the workers, and what is lost when a worker dies."""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from het_tf._counters import Counts, add_up, since
from het_tf.cache import WorkerCache
from het_tf.distribute.replicas import DenseReplicas

# What holds updates, or steps, back on a worker.
Holder = WorkerCache | DenseReplicas


def report_ops(caches: Sequence[Holder]) -> tf.Tensor:
    """Ops for the end of a closure: the caches' reports there, one after the other, int64."""
    return tf.concat([*(cache.report_op() for cache in caches), tf.zeros([0], tf.int64)], 0)


def reports_size(caches: Sequence[Holder]) -> int:
    """How many values `report_ops` gives."""
    return sum(2 + len(cache.counter_names) for cache in caches)


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """One cache's state on one worker, after a finished closure.

    Attributes:
      worker: task index of the worker.
      cache_id: random id of the cache instance; a restarted worker has another one.
      counters: since the instance exists, by name.
    """

    worker: int
    cache_id: int
    counters: Mapping[str, int]

    @property
    def pending(self) -> int:
        """Updates made there, or steps of a replica, that no parameter server has yet."""
        return self.counters["pending"]

    @property
    def updates(self) -> int:
        """Updates, or steps, made there since the instance exists."""
        return self.counters["updates" if "updates" in self.counters else "steps"]


def counted_between(before: Iterable[CacheReport], now: Iterable[CacheReport]) -> Counts:
    """Sums of what the caches of `now` counted since their reports of `before`, if they had one."""
    old = {report.cache_id: report.counters for report in before}
    return add_up(since(report.counters, old.get(report.cache_id, {})) for report in now)


class CacheReports:
    """The last report of every cache on every worker; warns when a cache is lost.

    A report travels with the result of the closure that made it. When a worker dies, the closure it
    was running has not delivered its result and is run again on another worker, so only updates of
    finished closures can be lost: at most as many as were pending in the last report. (Updates of
    the unfinished closure that had been sent already are then made twice, as with any variable on
    a parameter server.)

    Thread safe.
    """

    def __init__(self, ended: Callable[[], Collection[int]] = frozenset) -> None:
        """ended: says which caches and replicas, by id, have sent all that they had and ended."""
        self._ended = ended
        self._lock = threading.Lock()
        # The last report by worker.
        self._last: weakref.WeakKeyDictionary[Holder, dict[int, CacheReport]] = (
            weakref.WeakKeyDictionary()
        )
        self._warned: dict[int, int] = {}  # lost cache id -> pending updates it was said to have

    def register(self, cache: Holder) -> None:
        """Adds a cache, held weakly; a second call with the same one does nothing."""
        with self._lock:
            self._last.setdefault(cache, {})

    @property
    def caches(self) -> tuple[WorkerCache, ...]:
        """The registered caches that are still in use, in order of registration."""
        with self._lock:
            return tuple(each for each in self._last if isinstance(each, WorkerCache))

    @property
    def replicas(self) -> tuple[DenseReplicas, ...]:
        """The registered replicas that are still in use, in order of registration."""
        with self._lock:
            return tuple(each for each in self._last if isinstance(each, DenseReplicas))

    def record_all(self, caches: Sequence[Holder], values: np.ndarray) -> None:
        """Takes in what `report_ops` of registered caches gave."""
        ends = np.cumsum([2 + len(cache.counter_names) for cache in caches])
        for cache, report in zip(caches, np.split(values, ends)[:-1], strict=True):
            self.record(cache, report)

    def record(self, cache: Holder, values: Iterable[int]) -> None:
        """Takes in what the `report_op` of a registered cache gave.

        Warns if the worker has another instance of the cache than before. Closures' results, and
        the reports with them, may come in another order than they ended.
        """
        worker, cache_id, *counters = (int(value) for value in values)
        named = dict(zip(cache.counter_names, counters, strict=True))
        report = CacheReport(worker, cache_id, named)
        with self._lock:
            lost = self._take(cache, report)
        if lost is not None:
            self._warn(cache, lost)

    def _take(self, cache: Holder, report: CacheReport) -> CacheReport | None:
        """Keeps a report. Returns that of an instance which is known now to be lost."""
        last = self._last[cache]
        before = last.get(report.worker)
        if before is not None and before.cache_id != report.cache_id:
            if report.cache_id in self._warned:  # It is older than `before`.
                return report
            last[report.worker] = report
            self._warned.setdefault(before.cache_id, -1)
            return before
        if before is None or before.updates <= report.updates:
            last[report.worker] = report
        return None

    def worker_lost(self, worker: int) -> None:
        """Says what was lost with a worker, and forgets its caches.

        Says so again only if a result that came late tells of more.
        """
        with self._lock:
            lost = [(cache, last.pop(worker, None)) for cache, last in self._last.items()]
        for cache, report in lost:
            if report is not None:
                self._warn(cache, report)

    def forget(self, cache: Holder) -> None:
        """Says nothing of what the workers have of `cache` now, should they have others later.

        Results of closures that ended before may still come.
        """
        with self._lock:
            last = self._last.get(cache, {})
            self._warned.update({report.cache_id: sys.maxsize for report in last.values()})
            last.clear()

    def last(self, cache: Holder) -> dict[int, CacheReport]:
        """Worker task index -> last report of `cache`."""
        with self._lock:
            return dict(self._last.get(cache, {}))

    def _warn(self, cache: Holder, report: CacheReport) -> None:
        with self._lock:
            if self._warned.get(report.cache_id, -1) >= report.pending:
                return
            self._warned[report.cache_id] = report.pending
        kind, unit = (
            ("cache", "updates") if isinstance(cache, WorkerCache) else ("replica", "steps")
        )
        if report.cache_id in self._ended():
            logging.info(
                "worker %d has ended, after it had sent all %s of its %s %s (id %d)",
                *(report.worker, unit, kind, cache.name, report.cache_id),
            )
            return
        logging.warning(
            "worker %d lost its %s %s (id %d): at most %d %s that it had not sent are lost "
            "(of %d it had made). The steps it was running are run again on another worker.",
            report.worker,
            kind,
            cache.name,
            report.cache_id,
            report.pending,
            unit,
            report.updates,
        )
