"""Loses a parameter server of a second cluster, while the model of a first one is there still.

Prints what the second one goes on with as JSON. Run by test_lost_server.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import het_tf

ROWS = 100


def make_model(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        embedding = het_tf.layers.HetEmbedding(2, seed=1)
        x = keras.layers.Flatten()(embedding(ids))
        model = het_tf.keras.Model(ids, keras.layers.Dense(3)(x))
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    embedding.table.assign(np.arange(ROWS), np.ones([ROWS, 2], np.float32))
    manager = het_tf.checkpoint.Manager(
        tf.train.Checkpoint(model=model), tempfile.mkdtemp(), full_every=3
    )
    manager.save()
    manager.wait()
    return embedding, manager


def make_strategy(stack):
    cluster = stack.enter_context(het_tf.distribute.LocalCluster(num_workers=1, num_ps=2))
    return cluster, het_tf.distribute.HetParameterServerStrategy(cluster.resolver)


def use_the_first_of_two():
    """What is said of the model of a cluster when there is another one, and both are open."""
    said = []
    with contextlib.ExitStack() as stack:
        _, strategy = make_strategy(stack)
        embedding, manager = make_model(strategy)
        _, second = make_strategy(stack)
        model = manager.checkpoint.model
        ids, ones = np.zeros([8, 1], np.int64), np.ones([8, 3])
        for use in (
            lambda: model.fit(ids, ones, verbose=0),
            lambda: model(ids),
            strategy.scope,
            strategy.flush,
        ):
            try:
                use()
                said.append(None)
            except RuntimeError as error:
                said.append(str(error))
        embedding, _ = make_model(second)
        return said, embedding.table.size()


def main():
    out = {}
    kept = []
    for number in range(2):
        with contextlib.ExitStack() as stack:
            cluster, strategy = make_strategy(stack)
            embedding, manager = make_model(strategy)
            kept.append((embedding, manager))
            if number == 0:
                continue
            shards = embedding.table.shard_stats()
            cluster.kill_ps(1)
            cluster.restart_ps(1)
            out["path"] = strategy.restore_or_initialize(manager) == manager.latest_checkpoint
            out["recoveries"] = strategy.recoveries
            out["rows"] = [each["rows"] for each in embedding.table.shard_stats()]
            out["rows before"] = [each["rows"] for each in shards]
            kept.clear()
            make_model(strategy)  # frees what is not used any longer
    out["said"], out["rows of the second"] = use_the_first_of_two()
    print(json.dumps(out))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
