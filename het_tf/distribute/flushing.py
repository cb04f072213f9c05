"""What workers hold back of rows and dense variables: taking note of it, and sending it."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf._apart import call_apart
from het_tf._counters import sum_stats
from het_tf._visits import cache_devices, cluster_devices, visit
from het_tf.cache import WorkerCache
from het_tf.distribute import health
from het_tf.distribute.cache_reports import CacheReport, CacheReports, Holder
from het_tf.distribute.replicas import DenseReplicas


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
                ended |= each.result(timeout=health.PROBE_TIMEOUT)
        return ended
