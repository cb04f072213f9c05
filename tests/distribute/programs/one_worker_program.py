"""Trains on one worker and in one process, and prints both as JSON. Run by test_one_worker.py."""

from __future__ import annotations

import contextlib
import io
import json

import keras
import numpy as np
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
        **{
            name: (momentum, *2 * [{**arrays, **changed}])
            for name, changed in {
                "class weights": {"class_weight": {0: 0.5, 1: 2.0}},
                "initial epoch": {"initial_epoch": 1},
                "validation batches": {"validation_data": (x, y), "validation_batch_size": 7},
                "validation with weights": {"validation_data": (x, y, abs(x[:, 0]))},
                "validation at times": {"validation_split": 0.2, "validation_freq": [1, 3]},
                "validation steps": {
                    "validation_data": dataset,
                    "validation_steps": 3,
                    "validation_freq": 2,
                },
                "one line an epoch": {"verbose": 2},
                "steps without a batch size": {
                    "batch_size": None,
                    "steps_per_epoch": 6,
                    "validation_data": (x, y),
                    "validation_steps": 4,
                },
            }.items()
        },
    }


class BatchSizes(keras.metrics.Metric):
    """Adds up the squares of the batches' sizes: tells 15 batches of 7 from 7 batches of 16."""

    def __init__(self):
        super().__init__(name="sizes")
        self.squares = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.squares.assign_add(tf.cast(tf.shape(y_true)[0] ** 2, tf.float32))

    def result(self):
        return tf.identity(self.squares)


class Bits(keras.metrics.Metric):
    """Has bit n set if label n was seen once; for less than 24 labels, which float32 counts."""

    def __init__(self):
        super().__init__(name="bits")
        self.bits = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.bits.assign_add(tf.reduce_sum(2.0**y_true))

    def result(self):
        return tf.identity(self.bits)


class Epochs(keras.callbacks.Callback):
    """Notes what is called, but for batches: those of a closure are told together."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_begin(self, logs=None):
        self.calls.append(["begin", self.params["epochs"], self.params["steps"]])

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(["epoch", epoch])

    def on_test_begin(self, logs=None):
        self.calls.append(["test"])

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(["epoch ended", epoch, sorted(logs)])

    def on_train_end(self, logs=None):
        self.calls.append(["end"])


def train(model_class, optimizer, fit):
    model = sm.make_classifier(model_class)
    model.compile(
        keras.optimizers.get(optimizer),
        "binary_crossentropy",
        metrics=["mae", BatchSizes()],
        weighted_metrics=["accuracy"],
    )
    epochs = Epochs()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        history = model.fit(**{"verbose": 0, **fit}, callbacks=[epochs]).history
    return {
        "history": history,
        "calls": epochs.calls,
        "printed": [line for line in printed.getvalue().splitlines() if "Epoch" in line],
        "weights": [w.tolist() for w in model.get_weights()],
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def batches_seen(model_class, shuffle, epochs=3, examples=20):
    """The examples of every batch of every epoch, by their numbers."""
    numbers = np.arange(examples, dtype=np.float32).reshape(-1, 1)
    inputs = keras.Input((1,))
    model = model_class(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Bits()], steps_per_execution=1)
    seen = []
    until_now = [0]
    note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: seen.append([]))

    def note_batch(batch, logs):
        before, until_now[0] = until_now[0] if batch else 0, int(logs["bits"])
        new = until_now[0] - before
        seen[-1].append([n for n in range(examples) if new >> n & 1])

    note.on_train_batch_end = note_batch
    fit = dict(batch_size=5, epochs=epochs, shuffle=shuffle, callbacks=[note], verbose=0)
    model.fit(numbers, numbers, **fit)
    return seen


def train_embedding(model_class, cache):
    """A click model on ids, of which each occurs in many batches."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 50, (640, 3))
    clicks = (rng.random((640, 1)) < 0.2 + 0.6 * (ids[:, :1] % 2)).astype(np.float32)
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(
        8, optimizer=het_tf.optimizers.Adam(0.01), seed=1, cache=cache
    )
    hidden = keras.layers.Dense(8, activation="relu")(keras.layers.Flatten()(embedding(inputs)))
    model = model_class(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["AUC"])
    history = model.fit(ids, clicks, batch_size=32, shuffle=False, epochs=5, verbose=0).history
    loss, auc = model.evaluate(ids, clicks, verbose=0)
    return history | {"test loss": loss, "test AUC": auc}


def main():
    with het_tf.distribute.LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        # Before anything sets TensorFlow's seed: Keras then has the same order in every epoch.
        batches = {}
        for shuffle in (True, False):
            with strategy.scope():
                ours = batches_seen(het_tf.keras.Model, shuffle)
            batches[str(shuffle)] = [ours, batches_seen(keras.Model, shuffle)]
        results = {}
        for name, (optimizer, on_cluster, local) in cases().items():
            with strategy.scope():
                ours = train(het_tf.keras.Model, optimizer, on_cluster)
            results[name] = [ours, train(keras.Model, optimizer, local)]
        with strategy.scope():
            cache = het_tf.CacheConfig(20, staleness=0)
            ours = train_embedding(het_tf.keras.Model, cache)
        embedding = [ours, train_embedding(keras.Model, None)]
        arguments = sorted({a for _, fit, _ in cases().values() for a in fit} | {"callbacks"})
    output = {"cases": results, "batches": batches, "embedding": embedding, "arguments": arguments}
    print(json.dumps(output))


if __name__ == "__main__":
    main()
