"""Trains on a replica on one worker and in one process, and prints both as JSON.

The arguments name the cases. Run by test_dense_one_worker.py.
"""

from __future__ import annotations

import copy
import json
import sys

import keras
import small_models as sm

import het_tf
from het_tf.layers import HetEmbedding

EPOCHS, BATCH = 4, 5  # 4 epochs of 20 steps


def scaled(inner, initial_scale=2.0**127, growth_steps=1000):
    """Of a scale that overflows in float32, too. (Keras never comes back from one of 2**128.)"""
    return keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=initial_scale, dynamic_growth_steps=growth_steps
    )


def cases():
    """Name -> (optimizer, dense_staleness)."""
    layers = keras.optimizers
    # At rates of 0.05 and more AdamW ends further than 1e-6 from itself, if inputs are off by their
    # last bit.
    slower = layers.schedules.ExponentialDecay(0.01, 20, 0.9)

    return {
        "adamw, global_clipnorm, schedule, ema, 7": (
            layers.AdamW(
                slower, weight_decay=0.1, global_clipnorm=0.5, use_ema=True, ema_momentum=0.9
            ),
            7,
        ),
        "scaled, float16, 7": (scaled(layers.SGD(0.05), 2.0**20, 20), 7),
    }


def is_for_whole_steps(optimizer):
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return scales or bool(optimizer.gradient_accumulation_steps)


def train(model_class, optimizer):
    """A model with everything that has a rule: slots, moving statistics, seeds, a frozen layer."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((sm.FEATURES,))
    frozen = keras.layers.Dense(sm.FEATURES, trainable=False)(inputs)
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Add()([inputs, frozen]))
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.2, seed=3)(hidden)
    ids = keras.ops.cast(keras.ops.abs(inputs[:, :2]) * 10, "int64")
    whole = is_for_whole_steps(optimizer)
    # What is sent of several updates together is so by its last bit, and which are together depends
    # on the machine's load. Adam makes up to 4e-7 of that.
    cache = het_tf.CacheConfig(8, staleness=0 if whole else 10, lookahead=2)
    of_rows = "same" if whole else het_tf.optimizers.SGD(0.1)
    embedding = HetEmbedding(4, seed=1, optimizer=of_rows, cache=cache)
    hidden = keras.layers.Concatenate()([hidden, keras.layers.Flatten()(embedding(ids))])
    model = model_class(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(optimizer, "binary_crossentropy", metrics=["mae"])
    x, y = sm.make_data(100)

    def halve(epoch):
        if epoch == 2 and isinstance(model.optimizer.learning_rate, keras.Variable):
            model.optimizer.learning_rate = model.optimizer.learning_rate / 2

    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_begin=lambda e, logs: halve(e))],
    )
    return {
        "history": history.history,
        "weights": [w.value.numpy().tolist() for w in model.weights],
        "slots": [v.numpy().tolist() for v in model.optimizer.variables],
        "rows": [embedding.table.lookup(range(40)).tolist()],
    }


def brief_cases():
    """Name -> what makes it: Keras's other optimizers, and what they can be told."""
    layers = keras.optimizers
    return {
        "rmsprop": lambda: layers.RMSprop(0.01, momentum=0.5, centered=True),
        "nadam": lambda: layers.Nadam(0.01),
        "adafactor, two fits, noise in validation": lambda: layers.Adafactor(0.01),
        "muon": lambda: layers.Muon(0.01),
        "amsgrad, clipvalue": lambda: layers.Adam(0.01, amsgrad=True, clipvalue=0.1),
        "ema, overwriting": lambda: layers.SGD(
            0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=5
        ),
        "accumulated, schedule": lambda: layers.Adam(
            layers.schedules.ExponentialDecay(0.05, 2, 0.5), gradient_accumulation_steps=3
        ),
        "scaled, accumulated, None": lambda: scaled(
            layers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=3)
        ),
        "scaled, clipped": lambda: scaled(layers.SGD(0.05, global_clipnorm=0.5)),
        "momentum, clipnorm, 0": lambda: layers.SGD(
            0.05, momentum=0.9, nesterov=True, clipnorm=0.5
        ),
    }


class Noise(keras.layers.Layer):
    """Draws random numbers, in validation, too."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, inputs):
        return inputs + 0.1 * keras.random.normal((sm.FEATURES,), seed=self.seeds)


def train_briefly(model_class, optimizer, fits, noisy):
    """A small model, for a few steps."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((sm.FEATURES,))
    hidden = Noise()(inputs) if noisy else inputs
    hidden = keras.layers.Dense(8, activation="tanh")(hidden)
    hidden = keras.layers.Dropout(0.5, seed=3)(hidden)
    model = model_class(inputs, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, "mse")
    x, y = sm.make_data(30)
    losses = []
    validation = dict(epochs=3, validation_data=(x, y)) if noisy else {}
    for _ in range(fits):
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **validation).history
        losses += [*history["loss"], *history.get("val_loss", ())]
    seeds = [v for v in model.variables if "seed" in v.path]
    return {
        "history": {"loss": losses},
        "weights": [w.value.numpy().tolist() for w in [*model.weights, *seeds]],
        "slots": [v.numpy().tolist() for v in model.optimizer.variables],
        "rows": [],
    }


def optimizer_of(config):
    return keras.optimizers.deserialize(copy.deepcopy(config))  # Keras changes it


def main(*names):
    with het_tf.distribute.LocalCluster(num_workers=1, num_ps=2) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver, dense_staleness=0)
        results = {}
        for name in names:
            if name in brief_cases():
                bounds = {"0": 0, "None": None}
                strategy.dense_staleness = bounds.get(name.split(", ")[-1], 4)
                make = brief_cases()[name]
                arguments = 2 if "two fits" in name else 1, "noise" in name
                with strategy.scope():
                    ours = train_briefly(het_tf.keras.Model, make(), *arguments)
                results[name] = [ours, train_briefly(het_tf.keras.Model, make(), *arguments)]
                continue
            optimizer, strategy.dense_staleness = cases()[name]
            config = keras.optimizers.serialize(optimizer)
            policy = "mixed_float16" if "float16" in name else "float32"
            keras.config.set_dtype_policy(policy)
            with strategy.scope():
                ours = train(het_tf.keras.Model, optimizer_of(config))
            results[name] = [ours, train(het_tf.keras.Model, optimizer_of(config))]
            keras.config.set_dtype_policy("float32")
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
