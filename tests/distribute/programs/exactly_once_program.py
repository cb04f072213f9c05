"""Counts examples while workers are killed; prints what the tables say as JSON.

Each row is the number of times that its id was trained on: steps of SGD with rate 1 on a loss whose
gradient is -1 for every example. Run by test_exactly_once.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time

import keras
import numpy as np

import het_tf

BATCHES = 60
BATCH = 16
IDS = 400


class Minus(keras.losses.Loss):
    """Of -1 an example."""

    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y_true, y_pred):
        return -y_pred[:, 0]


class Check(keras.callbacks.Callback):
    """Compares the tables with the examples at the end of each epoch; ends when told to."""

    def __init__(self, layers, counts):
        super().__init__()
        self._layers, self._counts = layers, counts
        self.done = threading.Event()
        self.epochs = 0
        self.wrong = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs = epoch + 1
        sums, rows = [], 0
        for layer in self._layers:
            values = layer.table.lookup(np.arange(IDS))[:, 0]
            sums.append(float(values.sum()))
            rows += int((values != self._counts * (epoch + 1)).sum())
        examples = BATCHES * BATCH * (epoch + 1)
        if rows or sums != [examples] * len(sums):
            self.wrong.append({"examples": examples, "sums": sums, "wrong rows": rows})
        print(f"{examples} examples; rows add up to {sums}", file=sys.stderr, flush=True)
        self.model.stop_training = self.done.is_set()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    cluster = het_tf.distribute.LocalCluster(num_workers=args.workers, num_ps=2)
    cluster.start()
    strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver, exactly_once=True)

    def embedding(cache):
        return het_tf.layers.HetEmbedding(
            1, embeddings_initializer="zeros", optimizer=het_tf.optimizers.SGD(1.0), cache=cache
        )

    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        layers = [
            embedding(het_tf.CacheConfig(1000, staleness=3)),
            embedding(het_tf.CacheConfig(40, staleness=None)),  # rows leave within a closure
            embedding(None),
        ]
        if het_tf.ops.build()["cuda"] is None:
            layers.append(embedding(het_tf.CacheConfig(device_capacity=40, device="CPU")))
        values = [keras.layers.Flatten()(layer(ids)) for layer in layers]
        model = het_tf.keras.Model(ids, keras.layers.Add()(values))
        model.compile(keras.optimizers.SGD(0.0), Minus(), steps_per_execution=5)
    x = np.random.default_rng(args.seed).zipf(1.2, (BATCHES * BATCH, 1)) % IDS
    counts = np.bincount(x[:, 0], minlength=IDS)
    check = Check(layers, counts)
    alive, killed, restarts = list(range(args.workers)), [], []

    def restart(worker):
        cluster.restart_worker(worker)
        alive.append(worker)

    def kill():
        for _ in range(args.kills):
            time.sleep(chance.uniform(0.1, 2))
            while len(alive) < 2:  # somebody has to train
                time.sleep(0.1)
            worker = alive.pop(chance.randrange(len(alive)))
            cluster.kill_worker(worker)
            killed.append(worker)
            print(f"killed worker {worker}", file=sys.stderr, flush=True)
            restarts.append(threading.Thread(target=restart, args=(worker,)))
            restarts[-1].start()
        for thread in restarts:
            thread.join()
        check.done.set()

    killer = threading.Thread(target=kill)
    killer.start()
    began = time.monotonic()
    model.fit(
        *(x, np.zeros(len(x))),
        batch_size=BATCH,
        epochs=10**6,
        shuffle=False,
        verbose=0,
        callbacks=[check],
    )
    killer.join()
    stats = [layer.table.stats() for layer in layers]
    out = {
        "killed": killed,
        "seconds": time.monotonic() - began,
        "epochs": check.epochs,
        "wrong": check.wrong,
        "pushes_counted": sum(table["pushes_counted"] for table in stats),
    }
    print(json.dumps(out))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
