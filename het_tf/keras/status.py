"""What `python -m het_tf.top` shows of a training."""

from __future__ import annotations

import time
from typing import Any

import keras

from het_tf._status_files import StatusFile
from het_tf.layers.embedding import named_embeddings

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
                    for worker, report in strategy.last_cache_reports(layer.worker_cache).items()
                }
                for name, layer in layers.items()
            },
            "replicas": {
                report.worker: dict(report.counters) for report in strategy.last_replica_reports()
            },
            "shards": {
                name: dict(enumerate(layer.table.shard_stats())) if watched else {}
                for name, layer in layers.items()
            },
        }
