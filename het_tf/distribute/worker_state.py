"""What workers hold back of rows and dense variables: taking note of it, and sending it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from het_tf import ops
from het_tf.distribute.dense.replicas import DenseReplicas
from het_tf.distribute.failures import probes
from het_tf.runtime.broadcast import cache_devices, cluster_devices, visit
from het_tf.runtime.counters import Counts, add_up, since, sum_stats
from het_tf.runtime.threads import call_apart
from het_tf.tables.worker_cache import WorkerCache

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


class Flushing:
    """The part of `HetParameterServerStrategy` that knows the caches and replicas of workers."""

    _reports: CacheReports
    check_open: Callable[[], None]
    is_lost: Callable[[str, tf.errors.OpError | None], bool | None]
    join: Callable[[], None]

    def register_cache(self, cache: WorkerCache) -> None:
        """Has `flush` look after `cache`. It is held weakly: whoever made it keeps it."""
        self._reports.register(cache)

    @property
    def caches(self) -> tuple[WorkerCache, ...]:
        """The registered caches that are still in use, in order of registration."""
        return self._reports.caches

    def record_cache_reports(self, caches: Sequence[Holder], reports: np.ndarray) -> None:
        """Takes in what a closure reported at its end; warns when a worker lost its cache.

        Args:
          caches: registered caches and replicas.
          reports: the value of `cache_reports.report_ops(caches)`.
        """
        self._reports.record_all(caches, reports)

    def last_cache_reports(self, cache: WorkerCache) -> dict[int, CacheReport]:
        """Worker task index -> last known state of `cache` there."""
        return self._reports.last(cache)

    def last_replica_reports(self) -> list[CacheReport]:
        """Last known states of the replicas that are in use, of all workers."""
        replicas = [each for each in self._reports.replicas if each.in_use]
        return [report for each in replicas for report in self._reports.last(each).values()]

    def register_replicas(self, replicas: DenseReplicas) -> None:
        """Has `flush` look after `replicas`. They are held weakly: whoever made them keeps them."""
        self._reports.register(replicas)

    def forget_reports(self, replicas: DenseReplicas) -> None:
        """`replicas` were freed, and are others when they are made anew: nothing was lost."""
        self._reports.forget(replicas)

    def flush(self, *, slots: bool = True) -> None:
        """Sends what the workers and the coordinator hold back to the parameter servers.

        Afterwards tables hold every update, and variables are what all workers made of them. Waits
        for scheduled closures first. A worker that is down is skipped with a warning.

        Args:
          slots: bring the slots of Keras' optimizers up to date, too, where workers have their own
            (`dense_staleness`).

        Raises:
          RuntimeError: the cluster was closed.
          tf.errors.UnavailableError: a parameter server is down; the message names it.
          Exception: what a scheduled closure raised.
        """
        caches = self.caches
        replicas = [each for each in self._reports.replicas if each.in_use]
        if not caches and not replicas:
            return
        self.check_open()
        self.join()
        if caches:
            self._flush(caches, cache_devices())
        if replicas:
            self._flush(replicas, cluster_devices("worker"))
            for each in replicas:
                each.write_back(slots)

    def dense_stats(self) -> dict[str, int]:
        """Counters of the workers' replicas of dense variables, summed (`dense_staleness`).

        For callbacks: `fit` makes replicas, and frees them when it ends. They are made anew, and
        count from 0, when something else than training has changed a variable.

        Returns:
          "steps": made; "steps_sent": those that a parameter server has merged; "steps_lost": made
          on what a parameter server lost since; "pending": not known to be merged, now; "pushes"
          and "values": times that steps went up, and variables came down, one for each part of the
          variables, of which a server may have several; "bytes_up", "bytes_down": of messages.
          Empty while there are no replicas. Without those of workers that are down.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        replicas = [each for each in self._reports.replicas if each.in_use]
        if not replicas:
            return {}
        counted = visit(
            cluster_devices("worker"),
            lambda: [each.stats_here() for each in replicas],
            self.is_lost,
        )
        return sum_stats(stats for of_worker in counted.values() for stats in of_worker)

    def _flush(self, holders: Sequence[Holder], devices: list[str]) -> None:
        reports = visit(devices, lambda: [each.flush_here() for each in holders], self.is_lost)
        for device, values in reports.items():
            if tf.DeviceSpec.from_string(device).job == "worker":
                self.record_cache_reports(holders, np.concatenate(values))

    def _ended_holders(self) -> set[int]:
        """What workers that ended have told the parameter servers that answer."""

        def ask(device: str) -> set[int]:
            with tf.device(device):
                return set(ops.process_ended().numpy().tolist())

        asked = [call_apart(ask, device) for device in cluster_devices("ps")]
        ended: set[int] = set()
        for each in asked:
            with contextlib.suppress(tf.errors.OpError, concurrent.futures.TimeoutError):
                ended |= each.result(timeout=probes.PROBE_TIMEOUT)
        return ended
