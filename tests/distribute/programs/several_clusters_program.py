"""Goes from one cluster to the next, and keeps what was made on the earlier ones.

Prints what that gives as JSON. Run by test_scope.py.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import warnings

import clicks
import made_before
import numpy as np
import tensorflow as tf

import het_tf


def error_of(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def start_cluster(num_ps=1):
    cluster = het_tf.distribute.LocalCluster(num_workers=1, num_ps=num_ps)
    cluster.start()
    return cluster


def make_model(strategy):
    with strategy.scope():
        model = clicks.make_model()
        model.optimizer.build(model.trainable_variables)
    return model


def use_closed(model, strategy, checkpoint):
    """What is said of a model whose cluster was closed."""
    ids, labels, table = clicks.IDS, clicks.LABELS, model.layers[1].table
    return {
        "fit": error_of(lambda: model.fit(ids, labels)),
        "evaluate": error_of(lambda: model.evaluate(ids, labels)),
        "predict": error_of(lambda: model.predict(ids)),
        "flush": error_of(strategy.flush),
        "cache_stats": error_of(model.layers[1].cache_stats),
        "call": error_of(lambda: model(ids)),
        "scope": error_of(strategy.scope),
        "save": error_of(lambda: model.save("clicks.keras")),
        "save_weights": error_of(lambda: model.save_weights("clicks.weights.h5")),
        "checkpoint": error_of(lambda: tf.train.Checkpoint(model=model).save("clicks")),
        "restore": error_of(lambda: tf.train.Checkpoint(model=model).read(checkpoint)),
        "table.size": error_of(table.size),
        "table.lookup": error_of(lambda: table.lookup([1])),
        "table.export": error_of(table.export),
    }


def lose_server(cluster, strategy):
    """Has a server die and come back; a model that goes on, and what came of its table."""
    model = make_model(strategy)
    table = model.layers[1].table
    table.assign(np.arange(100), np.ones([100, 2], np.float32))
    checkpoint = tf.train.Checkpoint(model=model)
    manager = het_tf.checkpoint.Manager(checkpoint, tempfile.mkdtemp(), full_every=3)
    manager.save()
    manager.wait()
    before = [shard["rows"] for shard in table.shard_stats()]
    cluster.kill_ps(1)
    cluster.restart_ps(1)
    return model, {
        "is the latest": strategy.restore_or_initialize(manager) == manager.latest_checkpoint,
        "recoveries": strategy.recoveries,
        "rows before": before,
        "rows": [shard["rows"] for shard in table.shard_stats()],
    }


def main():
    seen = {}
    made = made_before.MadeBefore()
    first = start_cluster()
    strategy = het_tf.distribute.HetParameterServerStrategy(first.resolver)
    model = make_model(strategy)
    model.fit(clicks.IDS, clicks.LABELS, verbose=0)
    folder = tempfile.mkdtemp()
    checkpoint = tf.train.Checkpoint(model=model).write(f"{folder}/before")
    # Nothing is written but there, should a call below do what it should not.
    os.chdir(folder)
    pids = [first.process(job, 0).pid for job in ("ps", "worker")]
    first.close()
    seen["processes left"] = [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]
    seen["log"] = first.log("ps", 0)
    seen["in log_dir"] = sorted(path.name for path in first.log_dir.iterdir())
    seen["closed"] = use_closed(model, strategy, checkpoint)
    seen["batches"] = {name: len(list(dataset)) for name, dataset in made.datasets.items()}
    # There is no cluster any more that a model could use.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clicks.make_model().fit(clicks.IDS, clicks.LABELS, verbose=0)
    seen["without a scope"] = [str(w.message) for w in caught if "strategy" in str(w.message)]

    second = start_cluster(num_ps=2)
    strategy = het_tf.distribute.HetParameterServerStrategy(second.resolver)
    other, seen["of the second cluster"] = lose_server(second, strategy)
    del model  # So that what its cluster had is freed.

    third = start_cluster()
    latest = het_tf.distribute.HetParameterServerStrategy(third.resolver)
    seen["another cluster"] = {
        "fit": error_of(lambda: other.fit(clicks.IDS, clicks.LABELS, verbose=0)),
        "call": error_of(lambda: other(clicks.IDS)),
        "scope": error_of(strategy.scope),
        "flush": error_of(strategy.flush),
    }
    table = make_model(latest).layers[1].table
    table.assign(np.arange(100), np.ones([100, 2], np.float32))
    seen["rows of the third cluster"] = table.size()

    with tf.distribute.ParameterServerStrategy(third.resolver).scope():
        model = clicks.make_model()
    seen["of tensorflow"] = {
        "fit": error_of(lambda: model.fit(clicks.IDS, clicks.LABELS)),
        "evaluate": error_of(lambda: model.evaluate(clicks.IDS, clicks.LABELS)),
        "predict": error_of(lambda: model.predict(clicks.IDS)),
    }
    print(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
