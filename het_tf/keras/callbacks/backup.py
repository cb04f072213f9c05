"""Backups of a training, written while the training continues."""

from __future__ import annotations

import os
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from het_tf.compat import keras_internals
from het_tf.distribute import HetParameterServerStrategy
from het_tf.runtime.validation import INT32_MAX, check_integer
from het_tf.storage.checkpoints.manager import Manager


class _Progress(tf.train.experimental.PythonState):
    """Epoch at which a restored training continues. Part of the checkpoint."""

    epoch = 0

    def serialize(self) -> str:
        return str(self.epoch)

    def deserialize(self, string_value: str) -> None:
        self.epoch = int(string_value)


class BackupAndRestore(keras.callbacks.Callback):
    """Saves backups during `fit`. After an interruption, `fit` continues from the last backup.

    Unlike in `keras.callbacks.BackupAndRestore`, backups are checkpoints of a
    `het_tf.checkpoint.Manager`: the parameter servers write their rows while training continues.
    The next backup raises the error of a failed one. `fit` waits for the last and raises its error.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        max_to_keep: int = 1,
        delete_checkpoint: bool = True,
        full_every: int = 1,
    ):
        """Creates the callback.

        Args:
          backup_dir: folder of the backups. The folder must contain nothing else.
          save_freq: "epoch", or a number of batches. `fit` runs an interrupted epoch again from its
            first batch, with the restored model.
          max_to_keep: number of backups to keep, at least 1.
          delete_checkpoint: whether to delete the folder when `fit` completes.
          full_every: one in `full_every` backups has all rows, as in `het_tf.checkpoint.Manager`.

        Raises:
          ValueError: an argument is out of its range.
        """
        super().__init__()
        if not os.fspath(backup_dir):
            raise ValueError("backup_dir must be the path of a folder, not ''")
        if save_freq != "epoch":
            save_freq = check_integer("save_freq", save_freq, 1, INT32_MAX, ' or "epoch"')
        self.backup_dir = os.fspath(backup_dir)
        self._save_freq = save_freq
        self._max_to_keep = check_integer("max_to_keep", max_to_keep, 1, INT32_MAX)
        self._full_every = check_integer("full_every", full_every, 1, INT32_MAX)
        self._delete = bool(delete_checkpoint)
        self._progress = _Progress()
        self._manager: Manager | None = None
        # Batches seen in this epoch, and since the last backup.
        self._seen = self._since = 0

    @property
    def manager(self) -> Manager:
        """Manager of the backups. Exists once `fit` has begun."""
        assert self._manager is not None
        return self._manager

    def begin(self, epoch: int) -> None:
        """Saves the state before the first step, if no backup exists. Waits for this backup."""
        if not self.manager.checkpoints:
            self._progress.epoch = epoch
            self.manager.save()
            self.manager.wait()

    # Hooks that Keras calls.

    def set_model(self, model: keras.Model) -> None:
        """Selects the model to back up."""
        super().set_model(model)
        if self._manager is None or self._manager.checkpoint.model is not model:
            checkpoint = tf.train.Checkpoint(model=model, progress=self._progress)
            self._manager = Manager(
                checkpoint, self.backup_dir, self._max_to_keep, full_every=self._full_every
            )

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the latest backup, if a backup exists.

        Raises:
          ValueError: the model is not built. It has no variables to restore.
        """
        if not self.model.built:
            raise ValueError(
                f"BackupAndRestore needs the variables of the model {self.model.name!r}: call it on"
                " a batch of data before fit"
            )
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        if self.manager.restore_or_initialize() is not None:
            keras_internals.set_initial_epoch(self.model, self._progress.epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Records the epoch, and resets its number of batches."""
        self._progress.epoch = epoch
        self._seen = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves a backup if `save_freq` is a number, and so many batches followed the last one."""
        # One call covers all steps of a closure.
        self._since += batch + 1 - self._seen
        self._seen = batch + 1
        if not isinstance(self._save_freq, str) and self._since >= self._save_freq:
            self._since = 0
            self.manager.save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves a backup if `save_freq` is "epoch"."""
        self._progress.epoch = epoch + 1
        if self._save_freq == "epoch":
            self.manager.save()

    def on_train_end(self, logs: Any = None) -> None:
        """Waits for the backup in progress. With `delete_checkpoint`, deletes the folder."""
        self.manager.wait()
        # Without this call, the next fit would begin at the restored epoch.
        keras_internals.take_initial_epoch(self.model)
        if self._delete and tf.io.gfile.exists(self.backup_dir):
            tf.io.gfile.rmtree(self.backup_dir)
            self._manager = None


# File in the folder of Keras's callback, for restores before its first backup.
_START = "start.weights.h5"

# Number of failures in a row, without a step between them, that ends training.
_MOST_IN_VAIN = 3


class Resuming:
    """Resumes training from the backups of a callback, or else from the strategy's checkpoints."""

    def __init__(
        self,
        model: keras.Model,
        strategy: HetParameterServerStrategy,
        callbacks: keras.callbacks.CallbackList,
    ):
        """Searches the callbacks for a `BackupAndRestore` of Keras or het_tf."""
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
        """Saves the state before the first step, in `epoch`, if no saved state exists."""
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
        """Records that steps were made."""
        self._steps_made = True

    def finish(self) -> None:
        """Waits, after the last step, until its backup is written.

        Raises:
          Exception: the error that prevented the backup. One cause is a server that was lost after
            the last step.
        """
        if isinstance(self._backup, BackupAndRestore):
            self._backup.manager.wait()

    def go_on(self, error: tf.errors.UnavailableError, epoch: int) -> int:
        """Waits for the lost servers and restores their state.

        Args:
          error: the error that ended training.
          epoch: the epoch in which training ended.

        Returns:
          The epoch at which training continues.

        Raises:
          tf.errors.UnavailableError: `error`, if nothing was saved, or training failed repeatedly
            without a step; or an error that names a server that did not come back.
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
            return keras_internals.take_initial_epoch(self._model)
        self._model.load_weights(os.path.join(os.fspath(self._backup.backup_dir), _START))
        return epoch

    def _backups(self) -> list[Any]:
        if isinstance(self._backup, BackupAndRestore):
            return self._backup.manager.checkpoints
        folder = os.fspath(self._backup.backup_dir)
        if not tf.io.gfile.exists(folder):
            return []
        return [name for name in tf.io.gfile.listdir(folder) if name != _START]
