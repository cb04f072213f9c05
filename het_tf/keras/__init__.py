"""Keras models that train on parameter servers."""

from het_tf.keras import callbacks, metrics
from het_tf.keras.model import Model, Sequential

__all__ = ["Model", "Sequential", "callbacks", "metrics"]
