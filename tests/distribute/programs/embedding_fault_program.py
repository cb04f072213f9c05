"""Trains a HetEmbedding while servers die; prints what happened as JSON. Run by the test."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time

import keras
import numpy as np
import tensorflow as tf
from faults import AtStep, Warnings

import het_tf

BATCHES = 120
BATCH = 20
KEYS_A_BATCH = 40  # all different, so a step is that many updates
STEPS_A_CLOSURE = 4


def data():
    rng = np.random.default_rng(1)
    weights = rng.normal(size=400)
    ids = np.stack([rng.permutation(400)[:KEYS_A_BATCH] for _ in range(BATCHES)])
    ids = ids.reshape(BATCHES * BATCH, 2)
    return ids, (weights[ids].sum(1) > 0).astype(np.float32)


def errors_of_what_comes_next(model, table, checkpoint, publisher, folder, x, y):
    """What calls raise, each of which needs the server that is gone."""
    calls = {
        "call": lambda: model(x),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(x, y),
        "save": lambda: model.save(f"{folder}/model.keras"),
        "save_weights": lambda: model.save_weights(f"{folder}/model.weights.h5"),
        "export": lambda: model.export(f"{folder}/exported"),
        "export_mapped": lambda: het_tf.serving.export_mapped(model, f"{folder}/mapped"),
        "publish": lambda: het_tf.serving.publish(model, f"{folder}/published"),
        "Publisher.publish": publisher.publish,
        "interop.save": lambda: het_tf.interop.save(table, het_tf.interop.Npz(f"{folder}/a.npz")),
        "Checkpoint.save": lambda: checkpoint.save(f"{folder}/checkpoint"),
        "Checkpoint.write": lambda: checkpoint.write(f"{folder}/written"),
        "Checkpoint.read": lambda: checkpoint.read(f"{folder}/before"),
        "Manager.save": het_tf.checkpoint.Manager(checkpoint, f"{folder}/managed").save,
        "table.size": table.size,
        "table.lookup": lambda: table.lookup(x),
        "table.export": table.export,
        "table.import_": lambda: table.assign(np.arange(100), np.ones([100, 8], np.float32)),
        "table.clear": table.clear,
        "table.stats": table.stats,
        "table.shard_stats": table.shard_stats,
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
            errors[name] = "nothing was raised"
        except tf.errors.UnavailableError as error:
            errors[name] = str(error)
    return errors


def main():
    keras.utils.set_random_seed(1)
    warnings = Warnings()
    cluster = het_tf.distribute.LocalCluster(num_workers=3, num_ps=2)
    cluster.start()
    strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
    with strategy.scope():
        embedding = het_tf.layers.HetEmbedding(
            8,
            optimizer=het_tf.optimizers.RowWiseAdagrad(0.5),
            seed=1,
            cache=het_tf.CacheConfig(1000, staleness=20),
        )
        ids = keras.Input((2,), dtype="int64")
        output = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(embedding(ids)))
        model = het_tf.keras.Model(ids, output)
        model.compile(
            keras.optimizers.SGD(0.1), "binary_crossentropy", steps_per_execution=STEPS_A_CLOSURE
        )
    x, y = data()

    def fit(epochs, *callbacks):
        history = model.fit(
            x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
        )
        rows = embedding.table.export()
        return {
            "loss": history.history["loss"],
            "iterations": int(model.optimizer.iterations.numpy()),
            "clocks": int(rows.clocks.sum()),
            "finite": bool(np.isfinite(rows.values).all()),
        }

    out = {"whole": fit(3)}
    out["worker killed"] = fit(4, AtStep(BATCHES // 2, lambda: cluster.kill_worker(1)))
    out["warnings"] = list(warnings.texts)
    ending = threading.Thread(target=cluster.terminate_worker, args=(2,))  # training goes on
    before = len(warnings.texts)
    out["worker ended"] = fit(4, AtStep(BATCHES // 2, ending.start))
    ending.join()
    out["warnings of the ended"] = warnings.texts[before:]
    out["log of the ended"] = cluster.log("worker", 2)
    out["addresses"] = cluster.addresses
    folder = tempfile.mkdtemp()
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.write(f"{folder}/before")
    publisher = het_tf.serving.publish(model, f"{folder}/live", every=3600)
    began = time.monotonic()
    try:
        model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=100,
            verbose=0,
            callbacks=[AtStep(BATCHES // 2, lambda: cluster.kill_ps(1))],
        )
    except tf.errors.UnavailableError as error:
        out["error"] = str(error)
    out["seconds"] = time.monotonic() - began
    table = embedding.table
    out["errors"] = errors_of_what_comes_next(model, table, checkpoint, publisher, folder, x, y)
    print(json.dumps(out))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
