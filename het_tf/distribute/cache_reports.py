"""What is known about the caches on the workers, and what is lost when a worker dies."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf
from absl import logging

REPORT_SIZE = 5  # The cache's number here, and the four values of WorkerCache.report_op.


class WorkerCache(Protocol):
    """What the strategy needs of a cache that has one instance on every worker.

    Both methods build ops. They are called while a `tf.function` is traced, and the ops run on the
    worker whose instance they mean.
    """

    name: str

    def flush_op(self) -> tf.Tensor:
        """Sends every pending update to the parameter servers; any tensor as result."""

    def report_op(self) -> tf.Tensor:
        """int64[4]: worker task index, cache id, pending updates, updates made so far."""


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """One cache's state on one worker, after a finished closure.

    Attributes:
      worker: task index of the worker.
      cache_id: random id of the cache instance; a restarted worker has another one.
      pending: updates made there that no parameter server has yet.
      updates: updates made there since the instance exists.
    """

    worker: int
    cache_id: int
    pending: int
    updates: int


class CacheReports:
    """The last report of every cache on every worker; warns when a cache is lost.

    A report travels with the result of the closure that made it. When a worker dies, the closure it
    was running has not delivered its result and is run again on another worker, so only updates of
    finished closures can be lost: at most as many as were pending in the last report. (Updates of
    the unfinished closure that had been sent already are then made twice, as with any variable on
    a parameter server.)

    Thread safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._caches: list[weakref.ref[WorkerCache]] = []  # A cache's number is its place here.
        self._last: dict[tuple[int, int], CacheReport] = {}  # (cache number, worker) -> report
        self._warned: dict[int, int] = {}  # lost cache id -> pending updates it was said to have

    def register(self, cache: WorkerCache) -> None:
        """Adds a cache, held weakly; a second call with the same one does nothing."""
        with self._lock:
            if all(known() is not cache for known in self._caches):
                self._caches.append(weakref.ref(cache))

    @property
    def caches(self) -> tuple[WorkerCache, ...]:
        """The registered caches that are still in use, in order of registration."""
        return tuple(cache for _, cache in self._numbered())

    def report_ops(self) -> tf.Tensor:
        """Ops for the end of a closure: int64[number of caches, REPORT_SIZE], a report per row."""
        reports = [
            tf.concat([[number], tf.ensure_shape(cache.report_op(), [REPORT_SIZE - 1])], 0)
            for number, cache in self._numbered()
        ]
        return tf.stack(reports) if reports else tf.zeros([0, REPORT_SIZE], tf.int64)

    def flush_functions(self) -> list[Callable[[], tf.Tensor]]:
        """For every cache a function that flushes it where it is called and returns its report."""
        return [_flush_function(number, cache) for number, cache in self._numbered()]

    def note(self, reports: np.ndarray | Sequence[Sequence[int]]) -> None:
        """Takes in what `report_ops` gave, and warns of caches that were replaced meanwhile.

        Closures' results, and the reports with them, may come in another order than they ended.
        """
        for row in np.reshape(np.asarray(reports, np.int64), [-1, REPORT_SIZE]):
            number, *values = (int(value) for value in row)
            report = CacheReport(*values)
            with self._lock:
                lost = self._take(number, report)
            if lost is not None:
                self._warn(number, lost)

    def _take(self, number: int, report: CacheReport) -> CacheReport | None:
        """Keeps a report. Returns that of a cache which is known now to be lost."""
        before = self._last.get((number, report.worker))
        if before is not None and before.cache_id != report.cache_id:
            if report.cache_id in self._warned:  # It is older than `before`.
                return report
            self._last[number, report.worker] = report
            self._warned.setdefault(before.cache_id, -1)
            return before
        if before is None or before.updates <= report.updates:
            self._last[number, report.worker] = report
        return None

    def worker_lost(self, worker: int) -> None:
        """Says what was lost with a worker, and forgets its caches.

        Says so again only if a result that came late tells of more.
        """
        with self._lock:
            lost = {key: r for key, r in self._last.items() if key[1] == worker}
            for key in lost:
                del self._last[key]
        for (number, _), report in sorted(lost.items(), key=lambda item: item[0]):
            self._warn(number, report)

    def last(self, cache: WorkerCache) -> dict[int, CacheReport]:
        """Worker task index -> last report of `cache`."""
        numbers = [number for number, known in self._numbered() if known is cache]
        with self._lock:
            return {w: report for (n, w), report in self._last.items() if n in numbers}

    def _numbered(self) -> list[tuple[int, WorkerCache]]:
        with self._lock:
            caches = [(number, known()) for number, known in enumerate(self._caches)]
        return [(number, cache) for number, cache in caches if cache is not None]

    def _warn(self, number: int, report: CacheReport) -> None:
        cache = dict(self._numbered()).get(number)
        if cache is None:
            return  # Nobody uses it any more.
        with self._lock:
            if self._warned.get(report.cache_id, -1) >= report.pending:
                return
            self._warned[report.cache_id] = report.pending
        logging.warning(
            "worker %d lost its cache %s (id %d): at most %d updates that it had not sent are lost "
            "(of %d it had made). The steps it was running are run again on another worker.",
            report.worker,
            getattr(cache, "name", f"number {number}"),
            report.cache_id,
            report.pending,
            report.updates,
        )


def _flush_function(number: int, cache: WorkerCache) -> Callable[[], tf.Tensor]:
    # Kept with the cache, to which its graph refers, so that the two are forgotten together.
    flush = vars(cache).get("_flush_function")
    if flush is None:

        @tf.function(autograph=False)
        def flush() -> tf.Tensor:
            with tf.control_dependencies([cache.flush_op()]):
                return tf.concat([[number], cache.report_op()], 0)

        vars(cache)["_flush_function"] = flush
    return flush
