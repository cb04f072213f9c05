"""Trains on one worker and in one process, and prints both as JSON. Run by test_one_worker.py."""

from __future__ import annotations

import json

import keras
import small_models as sm
import tensorflow as tf

import het_tf


def cases():
    """Name -> (optimizer, arguments of fit for the cluster, the same for plain Keras)."""
    x, y = sm.make_data(100)
    arrays = {"x": x, "y": y, "batch_size": 16, "shuffle": False, "epochs": 3}
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    endless = {"steps_per_epoch": 5, "epochs": 3}
    adam = {"class_name": "Adam", "config": {"learning_rate": 0.01}}
    momentum = {"class_name": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.9}}
    return {
        "arrays": (momentum, arrays, arrays),
        "adam, weights, validation split": (
            adam,
            *2 * [{**arrays, "sample_weight": abs(x[:, 0]), "validation_split": 0.3}],
        ),
        "dataset": (momentum, *2 * [{"x": dataset, "epochs": 2, "validation_data": (x, y)}]),
        "dataset with steps": (
            momentum,
            {"x": dataset, **endless},
            {"x": dataset.repeat(), **endless},
        ),
        "function with steps": (
            momentum,
            {"x": lambda context: dataset, **endless},
            {"x": dataset.repeat(), **endless},
        ),
    }


def train(model_class, optimizer, fit):
    model = sm.make_classifier(model_class)
    model.compile(
        keras.optimizers.get(optimizer),
        "binary_crossentropy",
        metrics=["mae"],
        weighted_metrics=["accuracy"],
    )
    history = model.fit(**fit, verbose=0).history
    return {
        "history": history,
        "weights": [w.tolist() for w in model.get_weights()],
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def main():
    with het_tf.distribute.LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        results = {}
        for name, (optimizer, on_cluster, local) in cases().items():
            with strategy.scope():
                ours = train(het_tf.keras.Model, optimizer, on_cluster)
            results[name] = [ours, train(keras.Model, optimizer, local)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
