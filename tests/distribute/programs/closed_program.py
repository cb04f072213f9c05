"""Goes on after its cluster was closed, and under a strategy that is TensorFlow's own.

Prints what that gives as JSON. Run by test_scope.py.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings

import clicks
import made_before
import tensorflow as tf

import het_tf


def error_of(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main():
    seen = {}
    made = made_before.MadeBefore()
    with het_tf.distribute.LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            model = clicks.make_model()
        model.fit(clicks.IDS, clicks.LABELS, verbose=0)
        folder = tempfile.TemporaryDirectory()
        checkpoint = tf.train.Checkpoint(model=model).write(f"{folder.name}/before")
        # Nothing is written but there, should a call below do what it should not.
        os.chdir(folder.name)
    seen["log"] = cluster.log("ps", 0)
    seen["in log_dir"] = sorted(path.name for path in cluster.log_dir.iterdir())
    ids, labels = clicks.IDS, clicks.LABELS
    seen["closed"] = {
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
        "table.size": error_of(model.layers[1].table.size),
        "table.lookup": error_of(lambda: model.layers[1].table.lookup([1])),
        "table.export": error_of(model.layers[1].table.export),
    }
    seen["batches"] = {name: len(list(dataset)) for name, dataset in made.datasets.items()}
    # There is no cluster any more that a model could use.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clicks.make_model().fit(ids, labels, verbose=0)
    seen["without a scope"] = [str(w.message) for w in caught if "strategy" in str(w.message)]
    with het_tf.distribute.LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = tf.distribute.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            model = clicks.make_model()
        seen["of tensorflow"] = {
            "fit": error_of(lambda: model.fit(ids, labels)),
            "evaluate": error_of(lambda: model.evaluate(ids, labels)),
            "predict": error_of(lambda: model.predict(ids)),
        }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
