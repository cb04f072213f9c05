"""Trains in synchronous steps while a worker dies and another hangs; prints what is then as JSON.

Run by test_synchronous.py.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import het_tf
from het_tf.runtime.broadcast import cluster_devices, visit

WORKERS, BATCH, IDS = 3, 8, 60


class Watch(keras.callbacks.Callback):
    """Notes losses and how many workers live; ends the training when told to."""

    def __init__(self):
        super().__init__()
        self.done = threading.Event()
        self.losses = []
        self.live = []  # numbers of live workers, without repetitions

    @property
    def rounds(self):
        return self.model._het_trainer._compiled.rounds

    @property
    def replicas(self):
        return self.model._het_trainer._compiled.dense.replicas

    def on_train_batch_end(self, batch, logs=None):
        live = self.rounds.live_workers
        if self.live[-1:] != [live]:
            self.live.append(live)

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])
        self.model.stop_training = self.done.is_set() and len(self.losses) >= 10

    def on_train_end(self, logs=None):
        read = tf.function(
            lambda: het_tf.ops.replica_own(self.replicas._handle_op(), seeds_only=False)
        )
        owns = visit(
            cluster_devices("worker"), lambda: read.get_concrete_function()(), lambda *_: None
        )
        states = [own for own, _ in owns.values()]
        self.states = len(states)
        self.same = all(np.array_equal(states[0], state) for state in states)


def main():
    faulthandler.dump_traceback_later(600, exit=True)  # Says where, before the test gives up.
    cluster = het_tf.distribute.LocalCluster(num_workers=WORKERS, num_ps=2)
    cluster.start()
    strategy = het_tf.distribute.HetParameterServerStrategy(
        cluster.resolver, synchronous=True, lost_after=4
    )
    with strategy.scope():
        ids = keras.Input((3,), dtype="int64")
        layer = het_tf.layers.HetEmbedding(4, optimizer="adagrad", seed=3)
        hidden = keras.layers.Dense(8, activation="relu")(keras.layers.Flatten()(layer(ids)))
        model = het_tf.keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(hidden))
        model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", steps_per_execution=8)
    x = np.random.default_rng(0).integers(0, IDS, (30 * WORKERS * BATCH, 3)).astype(np.int64)
    y = ((x < IDS // 2).sum(1, keepdims=True) > 1).astype(np.float32)
    watch = Watch()

    def wait_for(workers):
        while watch.live[-1:] != [workers]:
            time.sleep(0.05)

    def disturb():
        wait_for(WORKERS)
        cluster.kill_worker(1)
        wait_for(WORKERS - 1)
        cluster.restart_worker(1)
        wait_for(WORKERS)
        cluster.process("worker", 2).send_signal(signal.SIGSTOP)
        wait_for(WORKERS - 1)
        cluster.kill_worker(2)
        cluster.restart_worker(2)
        wait_for(WORKERS)
        watch.done.set()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    model.fit(data, epochs=10**6, verbose=0, callbacks=[watch])
    disturber.join()
    every = tf.range(IDS, dtype=tf.int64)
    reads = [np.asarray(strategy.run_on_worker(i, layer, every)) for i in range(WORKERS)]
    rows = layer.table.lookup(np.arange(IDS))
    out = {
        "live": watch.live,
        "replicas": watch.states,
        "replicas_are_same": watch.same,
        "reads_are_rows": all(np.array_equal(read, rows) for read in reads),
        "losses": watch.losses,
    }
    print(json.dumps(out))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
