"""What `fit` goes on from when a parameter server was lost and came back."""

from __future__ import annotations

import os
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from het_tf import _keras
from het_tf.distribute import HetParameterServerStrategy
from het_tf.keras.backup import BackupAndRestore

# In the folder of Keras's callback, until it has made its first backup.
_START = "start.weights.h5"

# Times in a row that training goes on without having done a step.
_MOST_IN_VAIN = 3


class Resuming:
    """Goes on from the backups of a callback, or else from the strategy's checkpoints."""

    def __init__(
        self,
        model: keras.Model,
        strategy: HetParameterServerStrategy,
        callbacks: keras.callbacks.CallbackList,
    ):
        """Looks for a `BackupAndRestore` among the callbacks, Keras's or ours."""
        self._model = model
        self._strategy = strategy
        kinds = (keras.callbacks.BackupAndRestore, BackupAndRestore)
        self._backup = next((c for c in callbacks.callbacks if isinstance(c, kinds)), None)
        manager = strategy.manager
        has_model = manager is not None and any(
            each is model for each in vars(manager.checkpoint).values()
        )
        self._manager = manager if has_model else None
        self._steps_made = False
        self._in_vain = 0

    def begin(self, epoch: int) -> None:
        """Before the first step, of an epoch: saves what there is, where nothing was saved yet."""
        if self._backup is None:
            if self._manager is not None and self._manager.latest_checkpoint is None:
                self._manager.save()
        elif isinstance(self._backup, BackupAndRestore):
            self._backup.begin(epoch)
        elif not self._backups():
            folder = os.fspath(self._backup.backup_dir)
            tf.io.gfile.makedirs(folder)
            self._model.save_weights(os.path.join(folder, _START))

    def note_steps(self) -> None:
        """Steps were made."""
        self._steps_made = True

    def finish(self) -> None:
        """After the last step: returns when its backup is written.

        Raises:
          Exception: what kept it from that, as a server that was lost when there were no more steps
            to notice it.
        """
        if isinstance(self._backup, BackupAndRestore):
            self._backup.manager.wait()

    def go_on(self, error: tf.errors.UnavailableError, epoch: int) -> int:
        """Waits for the servers and restores what they lost.

        Args:
          error: what training ended with.
          epoch: in which.

        Returns:
          The epoch to go on with.

        Raises:
          tf.errors.UnavailableError: `error`, if there is nothing to go on from, or it came again
            and again; or one that names a server which did not come back.
        """
        self._in_vain = 0 if self._steps_made else self._in_vain + 1
        self._steps_made = False
        if (self._backup is None and self._manager is None) or self._in_vain >= _MOST_IN_VAIN:
            raise error
        what = getattr(error, "what", error)
        logging.warning("epoch %d ended early, to go on from a checkpoint: %s", epoch, what)
        if self._backup is None:
            self._strategy.restore_or_initialize(self._manager)
            return epoch
        self._strategy.recover()
        if self._backups():
            self._backup.on_train_begin()
            return _keras.take_initial_epoch(self._model)
        self._model.load_weights(os.path.join(os.fspath(self._backup.backup_dir), _START))
        return epoch

    def _backups(self) -> list[Any]:
        if isinstance(self._backup, BackupAndRestore):
            return self._backup.manager.checkpoints
        folder = os.fspath(self._backup.backup_dir)
        if not tf.io.gfile.exists(folder):
            return []
        return [name for name in tf.io.gfile.listdir(folder) if name != _START]
