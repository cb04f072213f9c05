"""A model of clicks on ids, compiled, and data for it."""

from __future__ import annotations

import keras
import numpy as np

import het_tf.keras

IDS, LABELS = np.arange(32).reshape(-1, 1), np.ones([32, 1], np.float32)


def make_model(model_class=het_tf.keras.Model, optimizer="sgd"):
    inputs = keras.Input((1,), dtype="int64")
    hidden = keras.layers.Flatten()(het_tf.layers.HetEmbedding(2, name="user")(inputs))
    model = model_class(inputs, keras.layers.Dense(1)(hidden), name="clicks")
    model.compile(optimizer, "mse", metrics=["mae"])
    return model
