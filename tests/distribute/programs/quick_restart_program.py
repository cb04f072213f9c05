"""Kills parameter servers that are back at once; prints what became of the training as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf
from faults import Warnings
from lost_server_program import BATCH, BATCHES, Epochs, make_model

import het_tf

EPOCHS = 4


class Restarts(keras.callbacks.Callback):
    """Kills a server where one hook, then another, and so on is called, and starts it again."""

    def __init__(self, cluster, hooks):
        """hooks: names of methods of callbacks, epochs, and indices of servers."""
        super().__init__()
        self._cluster = cluster
        self.left = list(hooks)
        self._epoch = 0

    def _called(self, hook):
        if self.left and self.left[0][:2] == (hook, self._epoch):
            *_, index = self.left.pop(0)
            self._cluster.kill_ps(index)
            self._cluster.restart_ps(index)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._called("on_train_batch_end")

    def on_test_batch_end(self, batch, logs=None):
        self._called("on_test_batch_end")

    def on_epoch_end(self, epoch, logs=None):
        self._called("on_epoch_end")


def main():
    logged = Warnings()
    cluster = het_tf.distribute.LocalCluster(num_workers=1, num_ps=2)
    cluster.start()
    strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
    rng = np.random.default_rng(1)
    x = rng.integers(0, 100, (BATCHES * BATCH, 2))
    y = (x % 3 == 0).sum(1).astype(np.float32)

    def fit(model, epochs, *callbacks):
        noted = Epochs()
        arguments = dict(batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
        model.fit(x, y, validation_data=(x, y), callbacks=[noted, *callbacks], **arguments)
        return noted.begun

    def state(made):
        model, embedding = made
        rows = embedding.table.export()
        order = np.argsort(rows.keys)
        return {
            "loss": float(model.evaluate(x, y, batch_size=BATCH, verbose=0)),
            "predicted": model.predict(x, batch_size=BATCH, verbose=0).ravel().tolist(),
            "keys": rows.keys[order].tolist(),
            "rows": np.concatenate([rows.values, rows.slots], 1)[order].ravel().tolist(),
            "dense": [float(v) for w in model.get_layer("dense").get_weights() for v in w.ravel()],
            "iterations": int(model.optimizer.iterations.numpy()),
        }

    out = {}
    with tempfile.TemporaryDirectory() as folder:
        cluster.kill_ps(0)
        cluster.restart_ps(0)
        strategy.wait_until_reached()  # by those that are lost: not
        out["recovered"] = strategy.recover()
        made = make_model(strategy)
        out["epochs of the first half"] = fit(made[0], EPOCHS // 2)
        manager = het_tf.checkpoint.Manager(tf.train.Checkpoint(model=made[0]), f"{folder}/half")
        manager.save()
        manager.wait()
        out["half"] = state(made)
        cluster.kill_ps(0)
        cluster.restart_ps(0)
        strategy.restore_or_initialize(manager)
        out["restored half"] = state(made)
        out["epochs of the second half"] = fit(made[0], EPOCHS // 2)
        out["whole"] = state(made)
        made = make_model(strategy)
        hooks = [("on_train_batch_end", 0, 0), ("on_test_batch_end", 1, 1), ("on_epoch_end", 3, 0)]
        restarts = Restarts(cluster, hooks)
        logged.take()
        backup = het_tf.keras.callbacks.BackupAndRestore(f"{folder}/backup")
        out["epochs in one piece"] = fit(made[0], EPOCHS, backup, restarts)
        out["in one piece"] = state(made)
        out["left"] = len(restarts.left)
        out["ended early"] = sum("ended early" in text for text in logged.take())
    print(json.dumps(out))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
