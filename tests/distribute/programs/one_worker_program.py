"""Trains on one worker and in one process, and prints both as JSON. Run by test_one_worker.py.

Arguments: names of cases.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

import keras
import numpy as np
import small_models as sm
import tensorflow as tf

import het_tf


def cases():
    """Name -> (arguments of fit for the cluster, the same for plain Keras)."""
    x, y = sm.make_data(100)
    arrays = {"x": x, "y": y, "batch_size": 16, "shuffle": False, "epochs": 3}
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    endless = {"steps_per_epoch": 5, "epochs": 3}
    weights = abs(x[:, 0])
    of_steps = {
        **endless,
        "validation_data": dataset,
        "validation_steps": 3,
        "validation_freq": 2,
    }
    return {
        "arrays with class weights, from a later epoch on": 2
        * ({**arrays, "class_weight": {0: 0.5, 1: 2.0}, "initial_epoch": 1, "verbose": 2},),
        "weights, validation split at times": 2
        * (
            {
                **arrays,
                "sample_weight": weights,
                "validation_split": 0.3,
                "validation_freq": [1, 3],
            },
        ),
        "dataset, validation with weights in batches": 2
        * (
            {
                "x": dataset,
                "epochs": 2,
                "validation_data": (x, y, weights),
                "validation_batch_size": 7,
            },
        ),
        "dataset with steps": ({"x": dataset, **of_steps}, {"x": dataset.repeat(), **of_steps}),
        "function with steps": (
            {"x": lambda context: dataset, **endless},
            {"x": dataset.repeat(), **endless},
        ),
        "steps without a batch size": 2
        * (
            {
                **arrays,
                "batch_size": None,
                "steps_per_epoch": 6,
                "validation_data": (x, y),
                "validation_steps": 4,
            },
        ),
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
        # Keras has no rates.
        names = sorted(name for name in logs if not name.endswith("_per_s"))
        self.calls.append(["epoch ended", epoch, names])

    def on_train_end(self, logs=None):
        self.calls.append(["end"])


def make_model(model_class):
    model = sm.make_classifier(model_class)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        "binary_crossentropy",
        metrics=["mae", BatchSizes()],
        weighted_metrics=["accuracy"],
    )
    model.optimizer.build(model.trainable_variables)
    return model


def train(model, fit):
    """Trains from the same weights on, with what was traced for earlier cases."""
    model.set_weights(sm.make_classifier(keras.Model).get_weights())
    for variable in model.optimizer.variables:
        if variable is not model.optimizer.learning_rate:
            variable.assign(keras.ops.zeros_like(variable))
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


def batches_seen(model_class, epochs=3, examples=20):
    """The examples of every batch of every epoch by their numbers: shuffled, and in order."""
    numbers = np.arange(examples, dtype=np.float32).reshape(-1, 1)
    inputs = keras.Input((1,))
    model = model_class(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Bits()], steps_per_execution=1)

    def seen_with(shuffle):
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

    return {"shuffled": seen_with(True), "in order": seen_with(False)}


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
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
    history = model.fit(ids, clicks, batch_size=32, shuffle=False, epochs=3, verbose=0).history
    return {"loss": history["loss"], "rows": embedding.table.lookup(range(50)).tolist()}


def main(chosen):
    with het_tf.distribute.LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        # Before anything sets TensorFlow's seed: Keras then has the same order in every epoch.
        with strategy.scope():
            batches = {"ours": batches_seen(het_tf.keras.Model)}
        batches["Keras's"] = batches_seen(keras.Model)
        with strategy.scope():
            ours = make_model(het_tf.keras.Model)
        theirs = make_model(keras.Model)
        results = {
            name: [train(ours, on_cluster), train(theirs, local)]
            for name, (on_cluster, local) in cases().items()
            if name in chosen
        }
        with strategy.scope():
            cache = het_tf.CacheConfig(20, staleness=0)
            ours = train_embedding(het_tf.keras.Model, cache)
        embedding = [ours, train_embedding(keras.Model, None)]
        arguments = sorted({a for fit, _ in cases().values() for a in fit} | {"callbacks"})
    output = {
        "cases": results,
        "all cases": list(cases()),
        "arguments": arguments,
        "batches": batches,
        "embedding": embedding,
    }
    print(json.dumps(output))


if __name__ == "__main__":
    main(sys.argv[1:])
