"""Metrics of the workers' caches, for TensorBoard and the log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.worker_state import CacheReport, counted_between
from het_tf.layers.embedding import HetEmbedding, embeddings_of, named_embeddings
from het_tf.runtime.counters import Counts, since, with_ratios
from het_tf.runtime.validation import INT32_MAX, check_integer

# Name in TensorBoard -> counter. The metric is the increase of the counter since the last write.
_COUNTED = {
    "misses": "misses",
    "refreshes": "refreshes",
    "rows_pushed": "rows_pushed",
    "evictions": "evictions",
    "bytes_pushes": "bytes_up_push",
    "bytes_down": "bytes_down",
}


class CacheMetrics(keras.callbacks.Callback):
    """Writes metrics of the workers' caches to TensorBoard and to the log.

    Metrics of a `HetEmbedding` begin with its path (path_2 for a second layer of the same path).
    Metrics cover the steps of all workers since the last write:

    - hit_rate, key_hit_rate: share of the ids, and of the unique keys, whose row was in the cache;
    - misses, refreshes (rows fetched again because they exceeded the read bound), rows_pushed,
      evictions;
    - bytes_pushes (updates) and bytes_requests (all other bytes) to the servers, bytes_down;
    - unsent_updates: at the time of the write;
    - reads_missing: histogram of the number of other workers' updates that a read missed, in the
      unit of the cache's clock. Only reads of cached rows that a server checked count. Only this
      metric needs requests to the parameter servers.

    With `dense_staleness`, metrics of the dense variables are dense/bytes_up, dense/bytes_down and
    dense/unsent_steps.
    """

    def __init__(self, log_dir: str | None = None, update_freq: str | int = "epoch"):
        """Creates the callback.

        Args:
          log_dir: folder for TensorBoard, next to the folders of `keras.callbacks.TensorBoard`.
            None: metrics appear only in the log (absl, INFO), in one line per layer.
          update_freq: "epoch", or a number of batches.

        Raises:
          ImportError: `log_dir` is given and tensorboard is not installed.
          ValueError: `update_freq` is neither "epoch" nor a positive integer.
        """
        super().__init__()
        if update_freq != "epoch":
            update_freq = check_integer("update_freq", update_freq, 1, INT32_MAX, ' or "epoch"')
        if log_dir is not None:
            try:
                import tensorboard  # noqa: F401
            except ImportError as error:
                raise ImportError(
                    'log_dir needs TensorBoard: pip install "het_tf[tensorboard]"'
                ) from error
        self._log_dir = log_dir
        self._update_freq = update_freq
        self._writer: Any = None
        self._steps = self._batches = self._written_at = 0
        self._before: dict[str, list[CacheReport]] = {}
        self._stats: dict[str, Counts] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that the model has caches, and records their counters.

        Raises:
          ValueError: the model has no `HetEmbedding` under `HetParameterServerStrategy`.
        """
        strategy = self.model.distribute_strategy
        if not isinstance(strategy, HetParameterServerStrategy) or not embeddings_of(self.model):
            raise ValueError(
                "CacheMetrics looks at the caches of HetEmbedding layers under"
                f" HetParameterServerStrategy; the model {self.model.name!r} has none."
            )
        if self._log_dir is not None and self._writer is None:
            self._writer = tf.summary.create_file_writer(self._log_dir)
        for name, layer in named_embeddings(self.model).items():
            self._since_last(name, layer)
        self._dense_since_last()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes the metrics if `update_freq` batches were trained since the last write."""
        # One call covers all steps of a closure.
        self._steps += batch + 1 - self._batches
        self._batches = batch + 1
        freq = self._update_freq
        if not isinstance(freq, str) and self._steps - self._written_at >= freq:
            self._write()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Resets the number of batches of the epoch."""
        self._batches = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the metrics of the steps since the last write."""
        if self._steps > self._written_at:
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        """Flushes the written metrics to the files of TensorBoard."""
        if self._writer is not None:
            self._writer.flush()

    def _write(self) -> None:
        self._written_at = self._steps
        for name, layer in named_embeddings(self.model).items():
            self._write_layer(name, layer)
        self._write_dense()

    def _write_layer(self, name: str, layer: HetEmbedding) -> None:
        since, stats = self._since_last(name, layer)
        counted = with_ratios(since)
        if not counted:
            return
        scalars = {rate: counted[rate] for rate in ("hit_rate", "key_hit_rate")}
        scalars |= {scalar: counted[counter] for scalar, counter in _COUNTED.items()}
        scalars["bytes_requests"] = counted["bytes_up"] - counted["bytes_up_push"]
        scalars["unsent_updates"] = counted["pending"]
        self._put(name, scalars, _missing(stats))

    def _write_dense(self) -> None:
        counted = self._dense_since_last()
        if not counted:
            return
        scalars: dict[str, float] = {name: counted[name] for name in ("bytes_up", "bytes_down")}
        self._put("dense", scalars | {"unsent_steps": counted["pending"]}, [])

    def _since_last(self, name: str, layer: HetEmbedding) -> tuple[Counts, Counts]:
        """Returns the counts of a layer's caches, and of its table, since the last call."""
        reports = self.model.distribute_strategy.held.last_cache_reports(layer.worker_cache)
        # Only the histogram needs a call of the servers.
        stats = {} if self._writer is None else layer.table.stats()
        before = self._stats.get(name, {})
        self._stats[name] = stats
        return self._counted(name, reports.values()), since(stats, before)

    def _dense_since_last(self) -> Counts:
        return self._counted("dense/", self.model.distribute_strategy.held.last_replica_reports())

    def _counted(self, of: str, reports: Iterable[CacheReport]) -> Counts:
        before, self._before[of] = self._before.get(of, []), list(reports)
        return counted_between(before, self._before[of])

    def _put(self, of: str, scalars: dict[str, float], missing: list[list[float]]) -> None:
        text = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in scalars.items()
        )
        logging.info("step %d, %s: %s", self._steps, of, text)
        if self._writer is None:
            return
        with self._writer.as_default(self._steps):
            for name, value in scalars.items():
                tf.summary.scalar(f"{of}/{name}", value)
            if missing:
                _write_histogram(f"{of}/reads_missing", missing)


def _missing(stats: Counts) -> list[list[float]]:
    """Returns the buckets of a histogram: lower bound, upper bound, number of reads."""
    buckets = []
    for name, reads in stats.items():
        match = re.fullmatch(r"reads_missing_(\d+)", name)
        if match and reads:
            least = int(match[1])
            buckets.append([least, max(2 * least, 1), reads])
    return [[float(x) for x in bucket] for bucket in sorted(buckets)]


def _write_histogram(name: str, buckets: list[list[float]]) -> None:
    # `tf.summary.histogram` takes single values, not buckets.
    from tensorboard.plugins.histogram import metadata

    tf.summary.write(
        name,
        tf.constant(buckets, tf.float64),
        metadata=metadata.create_summary_metadata(display_name=None, description=None),
    )
