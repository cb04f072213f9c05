"""Pending updates of workers, for rows and dense variables: reports and flushes."""

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

# An object with pending updates, or pending steps, on a worker.
Holder = WorkerCache | DenseReplicas


def report_ops(caches: Sequence[Holder]) -> tf.Tensor:
    """Returns the concatenated reports of caches for the end of a closure, int64 [values]."""
    return tf.concat([*(cache.report_op() for cache in caches), tf.zeros([0], tf.int64)], 0)


def reports_size(caches: Sequence[Holder]) -> int:
    """Returns the number of values in the result of `report_ops`."""
    return sum(2 + len(cache.counter_names) for cache in caches)


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """State of a cache on one worker after a finished closure.

    Attributes:
      worker: task index of the worker.
      cache_id: random id of the cache instance. A restarted worker has another instance.
      counters: counters since the instance was created, by name.
    """

    worker: int
    cache_id: int
    counters: Mapping[str, int]

    @property
    def pending(self) -> int:
        """Number of updates, or of a replica's steps, that no parameter server has yet."""
        return self.counters["pending"]

    @property
    def updates(self) -> int:
        """Number of updates, or of a replica's steps, since the instance was created."""
        return self.counters["updates" if "updates" in self.counters else "steps"]


def counted_between(before: Iterable[CacheReport], now: Iterable[CacheReport]) -> Counts:
    """Sums the increases of counters from the reports of `before` to the reports of `now`.

    A cache without a report in `before` counts from 0.
    """
    old = {report.cache_id: report.counters for report in before}
    return add_up(since(report.counters, old.get(report.cache_id, {})) for report in now)


class CacheReports:
    """The last report of every cache on every worker. Logs a warning when a cache is lost.

    A report arrives with the result of the closure that made it. When a worker dies, its running
    closure has no result and runs again on another worker. Only updates of finished closures can
    therefore be lost. Their number is at most `pending` of the last report. Updates that the
    unfinished closure had already pushed are applied twice, as with any variable on a parameter
    server.

    Thread-safe.
    """

    def __init__(self, ended: Callable[[], Collection[int]] = frozenset) -> None:
        """Creates the object without reports.

        Args:
          ended: returns the ids of caches and replicas that ended after they had pushed everything.
        """
        self._ended = ended
        self._lock = threading.Lock()
        # Last report of every worker, by holder and worker.
        self._last: weakref.WeakKeyDictionary[Holder, dict[int, CacheReport]] = (
            weakref.WeakKeyDictionary()
        )
        self._warned: dict[int, int] = {}  # Id of a lost cache -> pending updates in its warning.

    def register(self, cache: Holder) -> None:
        """Adds a cache with a weak reference. Further calls with the same cache do nothing."""
        with self._lock:
            self._last.setdefault(cache, {})

    @property
    def caches(self) -> tuple[WorkerCache, ...]:
        """The registered caches that are still in use, in order of registration."""
        with self._lock:
            return tuple(holder for holder in self._last if isinstance(holder, WorkerCache))

    @property
    def replicas(self) -> tuple[DenseReplicas, ...]:
        """The registered replicas that are still in use, in order of registration."""
        with self._lock:
            return tuple(holder for holder in self._last if isinstance(holder, DenseReplicas))

    def record_all(self, caches: Sequence[Holder], values: np.ndarray) -> None:
        """Stores the result of `report_ops` of registered caches."""
        ends = np.cumsum([2 + len(cache.counter_names) for cache in caches])
        for cache, report in zip(caches, np.split(values, ends)[:-1], strict=True):
            self.record(cache, report)

    def record(self, cache: Holder, values: Iterable[int]) -> None:
        """Stores the result of the `report_op` of a registered cache.

        Logs a warning if the worker has another instance of the cache than before. Results of
        closures, and their reports, may arrive in another order than the closures finished.
        """
        worker, cache_id, *counters = (int(value) for value in values)
        named = dict(zip(cache.counter_names, counters, strict=True))
        report = CacheReport(worker, cache_id, named)
        with self._lock:
            lost = self._take(cache, report)
        if lost is not None:
            self._warn(cache, lost)

    def _take(self, cache: Holder, report: CacheReport) -> CacheReport | None:
        """Stores a report. Returns the last report of an instance that turns out to be lost."""
        last = self._last[cache]
        previous = last.get(report.worker)
        if previous is not None and previous.cache_id != report.cache_id:
            if report.cache_id in self._warned:  # The report is older than `previous`.
                return report
            last[report.worker] = report
            self._warned.setdefault(previous.cache_id, -1)
            return previous
        if previous is None or previous.updates <= report.updates:
            last[report.worker] = report
        return None

    def worker_lost(self, worker: int) -> None:
        """Logs the losses of a dead worker and drops its reports.

        A late result with more pending updates causes another warning.
        """
        with self._lock:
            lost = [(cache, last.pop(worker, None)) for cache, last in self._last.items()]
        for cache, report in lost:
            if report is not None:
                self._warn(cache, report)

    def forget(self, cache: Holder) -> None:
        """Drops the reports of a cache whose instances were freed on purpose.

        Late results of these instances cause no warning.
        """
        with self._lock:
            last = self._last.get(cache, {})
            self._warned.update({report.cache_id: sys.maxsize for report in last.values()})
            last.clear()

    def last(self, cache: Holder) -> dict[int, CacheReport]:
        """Returns the last reports of `cache`, by task index of the worker."""
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


class HeldUpdates:
    """The updates and steps that workers hold back, of which a strategy knows by this object."""

    def __init__(
        self,
        join: Callable[[], None],
        is_lost: Callable[[str, tf.errors.OpError | None], bool | None],
    ):
        """Knows no cache yet.

        Args:
          join: waits for all scheduled closures.
          is_lost: says whether a flush goes on without a device, as of `visit`.
        """
        self._join = join
        self._is_lost = is_lost
        self._reports = CacheReports(_ended_holders)

    def worker_lost(self, worker: int) -> None:
        """As `CacheReports.worker_lost`."""
        self._reports.worker_lost(worker)

    def register_cache(self, cache: WorkerCache) -> None:
        """Adds a cache to `flush`. The strategy holds a weak reference only."""
        self._reports.register(cache)

    @property
    def caches(self) -> tuple[WorkerCache, ...]:
        """The registered caches that are still in use, in order of registration."""
        return self._reports.caches

    def record_cache_reports(self, caches: Sequence[Holder], reports: np.ndarray) -> None:
        """Stores the reports of a finished closure. Logs a warning if a worker lost its cache.

        Args:
          caches: registered caches and replicas.
          reports: int64 [values], the result of `report_ops(caches)`.
        """
        self._reports.record_all(caches, reports)

    def last_cache_reports(self, cache: Holder) -> dict[int, CacheReport]:
        """Returns the last reports of `cache`, by task index of the worker."""
        return self._reports.last(cache)

    def last_replica_reports(self) -> list[CacheReport]:
        """Returns the last reports of the replicas in use, of all workers."""
        replicas = [replica for replica in self._reports.replicas if replica.in_use]
        return [report for replica in replicas for report in self._reports.last(replica).values()]

    def register_replicas(self, replicas: DenseReplicas) -> None:
        """Adds replicas to `flush`. The strategy holds a weak reference only."""
        self._reports.register(replicas)

    def forget_reports(self, replicas: DenseReplicas) -> None:
        """Drops the reports of replicas that were freed on purpose. No steps were lost."""
        self._reports.forget(replicas)

    def flush(self, slots: bool) -> None:
        """As `HetParameterServerStrategy.flush`."""
        held = self._held()
        if not held:
            return
        self._join()
        for holders, devices in held:
            self._flush(holders, devices)
        for replica in self._reports.replicas:
            if replica.in_use:
                replica.write_back(slots)

    def trace_flush(self) -> None:
        """Traces what `flush` runs, as far as that has not been done. All workers are up.

        Called while no closure runs. When a worker fails, TensorFlow's coordinator holds a lock of
        the eager context and may wait for the interpreter's lock. A thread that adds a function
        meanwhile waits for the context's lock with the interpreter's lock, and both wait forever.
        """
        for cache in self.caches:
            cache.flush_here.trace(cache_devices())
        for replica in self._reports.replicas:
            replica.flush_here.trace(cluster_devices("worker"))

    def _held(self) -> list[tuple[Sequence[Holder], list[str]]]:
        """Returns the caches and replicas in use, if there are any, and their devices."""
        replicas = [replica for replica in self._reports.replicas if replica.in_use]
        held: list[tuple[Sequence[Holder], list[str]]] = [
            (self.caches, cache_devices()),
            (replicas, cluster_devices("worker")),
        ]
        return [(holders, devices) for holders, devices in held if holders]

    def dense_stats(self) -> dict[str, int]:
        """As `HetParameterServerStrategy.dense_stats`."""
        replicas = [replica for replica in self._reports.replicas if replica.in_use]
        if not replicas:
            return {}
        counted = visit(
            cluster_devices("worker"),
            lambda: [replica.stats_here() for replica in replicas],
            self._is_lost,
        )
        return sum_stats(stats for of_worker in counted.values() for stats in of_worker)

    def _flush(self, holders: Sequence[Holder], devices: list[str]) -> None:
        reports = visit(devices, lambda: [holder.flush_here() for holder in holders], self._is_lost)
        for device, values in reports.items():
            if tf.DeviceSpec.from_string(device).job == "worker":
                self.record_cache_reports(holders, np.concatenate(values))


def _ended_holders() -> set[int]:
    """Returns the ids of caches and replicas that ended without a loss.

    Asks the parameter servers and skips those that do not answer.
    """

    def ask(device: str) -> set[int]:
        with tf.device(device):
            return set(ops.process_ended().numpy().tolist())

    answers = [call_apart(ask, device) for device in cluster_devices("ps")]
    ended: set[int] = set()
    for answer in answers:
        with contextlib.suppress(tf.errors.OpError, concurrent.futures.TimeoutError):
            ended |= answer.result(timeout=probes.PROBE_TIMEOUT)
    return ended
