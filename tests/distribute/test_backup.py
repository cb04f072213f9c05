"""Backups that parameter servers write while workers train."""

from __future__ import annotations

import contextlib
import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from exactly_once_program import Minus

import het_tf

BATCH, IDS = 8, 200


class Steps(keras.callbacks.Callback):
    """Counts the steps that were made.

    Attributes:
      made: that number.
      cut: `made` when rows were last cut.
    """

    def __init__(self):
        super().__init__()
        self.made, self.cut, self.ended = 0, 0, False
        self.changed = threading.Condition()

    def on_train_batch_end(self, batch, logs=None):
        with self.changed:
            self.made = batch + 1
            self.changed.notify_all()

    def on_epoch_end(self, epoch, logs=None):
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def wait_for(self, more: int) -> int:
        """Until so many steps were made since a cut, or training has ended; how many they were."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.ended or self.made >= self.cut + more, 60)
            return self.made - self.cut


@pytest.mark.parametrize("dense_staleness", [None, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_each_backup_is_a_state_that_the_model_had(
    strategy, tmp_path, monkeypatch, dense_staleness
):
    """Every example adds 1 to its row; the optimizer counts the batches."""
    strategy.dense_staleness, before = dense_staleness, strategy.dense_staleness
    steps, between = Steps(), []
    cut, save = het_tf.ops.table_cut, het_tf.ops.table_save

    def noted(*args, **kwargs):
        steps.cut = steps.made
        return cut(*args, **kwargs)

    def slow(*args, **kwargs):
        if steps.made:  # fit waits for the one of the beginning
            between.append(steps.wait_for(7))
        return save(*args, **kwargs)

    monkeypatch.setattr(het_tf.ops, "table_cut", noted)
    monkeypatch.setattr(het_tf.ops, "table_save", slow)
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        layer = het_tf.layers.HetEmbedding(
            1,
            embeddings_initializer="zeros",
            optimizer=het_tf.optimizers.SGD(1.0),
            cache=het_tf.CacheConfig(100, staleness=3),
        )
        dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
        model = het_tf.keras.Model(ids, dense(keras.layers.Flatten()(layer(ids))))
        model.compile(keras.optimizers.SGD(0.0), Minus(), steps_per_execution=2)
    x = np.random.default_rng(1).zipf(1.2, (100 * BATCH, 1)) % IDS
    backup = het_tf.keras.callbacks.BackupAndRestore(
        tmp_path, save_freq=20, max_to_keep=100, delete_checkpoint=False
    )
    try:
        model.fit(
            *(x, np.zeros(len(x))),
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
            callbacks=[steps, backup],
        )
    finally:
        strategy.dense_staleness = before
    assert len(backup.manager.checkpoints) == 6
    # The last one was written when the only epoch had ended.
    assert len(between) == 5 * strategy.num_ps
    assert min(between[: -strategy.num_ps]) >= 7
    # Of each checkpoint, the steps that its variables count and those that its rows have. Where
    # they differ, the later ones say whether steps were late for it, or lost, or made twice.
    counted = []
    for path in backup.manager.checkpoints:
        reader = tf.train.load_checkpoint(path)
        names = list(reader.get_variable_to_shape_map())
        (iterations,) = [n for n in names if "iterations/.ATTRIBUTES/VARIABLE_VALUE" in n]
        rows = [reader.get_tensor(n) for n in names if n.endswith("/values")]
        clocks = [reader.get_tensor(n) for n in names if n.endswith("/clocks")]
        assert len(rows) == strategy.num_ps
        assert sum(len(r) for r in rows) == sum((c > 0).sum() for c in clocks)
        made = float(sum(r.sum() for r in rows)) / BATCH
        counted.append((int(reader.get_tensor(iterations)), made))
    batches = [iterations for iterations, _ in counted]
    assert counted == [(n, n) for n in batches]
    assert batches == sorted(batches)
    assert batches[0] == 0
    assert all(20 <= b - a <= 40 for a, b in itertools.pairwise(batches[:-1]))
    # Restored, it goes on from there.
    assert strategy.restore_or_initialize(backup.manager) == backup.manager.latest_checkpoint
    assert layer.table.lookup(np.arange(IDS)).sum() == batches[-1] * BATCH


def test_the_fit_after_one_that_went_on_begins_with_its_first_epoch(strategy, tmp_path):
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        rows = keras.layers.Flatten()(het_tf.layers.HetEmbedding(1)(ids))
        model = het_tf.keras.Model(ids, keras.layers.Dense(1)(rows))
        model.compile("sgd", "mse")
    x = np.arange(IDS)[:, None]

    def epochs_of(*callbacks, epochs, last=10):
        begun = []

        def on_epoch_begin(epoch, logs):
            if epoch > last:
                raise KeyboardInterrupt
            begun.append(epoch)

        notes = keras.callbacks.LambdaCallback(on_epoch_begin=on_epoch_begin)
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(x, x, epochs=epochs, verbose=0, callbacks=[*callbacks, notes])
        return begun

    def backup():
        return het_tf.keras.callbacks.BackupAndRestore(tmp_path / "backup")

    assert epochs_of(backup(), epochs=5, last=2) == [0, 1, 2]
    assert epochs_of(backup(), epochs=5) == [3, 4]
    assert epochs_of(epochs=2) == [0, 1]
