"""Trains on a replica on one worker and in one process, and prints both as JSON.

Run by test_dense_one_worker.py.
"""

from __future__ import annotations

import json

import keras
import small_models as sm

import het_tf
from het_tf.layers import HetEmbedding

EPOCHS, BATCH = 10, 5  # 10 epochs of 20 steps


def cases():
    """Name -> (optimizer, dense_staleness)."""
    layers = keras.optimizers
    schedule = layers.schedules.ExponentialDecay(0.05, 20, 0.9)
    return {
        "sgd": (layers.SGD(0.05), 0),
        "momentum, clipnorm": (layers.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.5), 1),
        "adam": (layers.Adam(0.01), 16),
        "adamw, global_clipnorm, schedule": (
            layers.AdamW(schedule, weight_decay=0.1, global_clipnorm=0.5),
            7,
        ),
        "adagrad": (layers.Adagrad(0.1), 64),
        "ema": (layers.Adam(0.01, use_ema=True, ema_momentum=0.9), 1000),
    }


def train(model_class, optimizer):
    """A model with everything that has a rule: slots, moving statistics, seeds, a frozen layer."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((sm.FEATURES,))
    frozen = keras.layers.Dense(sm.FEATURES, trainable=False)(inputs)
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Add()([inputs, frozen]))
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.2, seed=3)(hidden)
    ids = keras.ops.cast(keras.ops.abs(inputs[:, :2]) * 10, "int64")
    cache = het_tf.CacheConfig(8, staleness=10, lookahead=2)
    rows = HetEmbedding(4, seed=1, optimizer=het_tf.optimizers.SGD(0.1), cache=cache)(ids)
    hidden = keras.layers.Concatenate()([hidden, keras.layers.Flatten()(rows)])
    model = model_class(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(optimizer, "binary_crossentropy", metrics=["mae"])
    x, y = sm.make_data(100)

    def halve(epoch):
        if epoch == 5 and not isinstance(optimizer.get_config()["learning_rate"], dict):
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
    }


def main():
    with het_tf.distribute.LocalCluster(num_workers=1, num_ps=2) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver, dense_staleness=0)
        results = {}
        for name, (optimizer, staleness) in cases().items():
            strategy.dense_staleness = staleness
            config = keras.optimizers.serialize(optimizer)
            with strategy.scope():
                ours = train(het_tf.keras.Model, keras.optimizers.deserialize(config))
            results[name] = [ours, train(keras.Model, keras.optimizers.deserialize(config))]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
