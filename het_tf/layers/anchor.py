"""The weight that stands for a table among the weights of a Keras model."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import keras

from het_tf.layers import callers, whole_steps


class Anchor(keras.Variable):
    """A scalar whose gradient trains a table; its value has no meaning.

    What asks for its value or sets it, as `get_weights`, `set_weights` and `.h5` files do, would
    leave the table out, and is refused.
    """

    def __init__(self, layer_name: str):
        """The anchor of the table of that layer."""
        self.layer_name = layer_name
        self.waiting: weakref.ref | None = None  # the updates that wait for the optimizer
        # By an initializer: a layer may be built in a scope that lets values wait.
        super().__init__(keras.initializers.Zeros(), shape=(), dtype="float32", name="anchor")

    @property
    def value(self) -> Any:
        """The variable of TensorFlow; an optimizer that asks for it is built with it."""
        optimizer = callers.optimizer_with(self)
        if optimizer is not None:
            whole_steps.build_with(optimizer, self)
        return super().value

    def numpy(self) -> NoReturn:
        """Refused."""
        raise ValueError(
            f"the table of layer {self.layer_name} is no Keras weight: get_weights, set_weights,"
            " .h5 files and EarlyStopping(restore_best_weights=True), which calls get_weights, have"
            " no place for it. Use save_weights(path.weights.h5), save(path.keras),"
            " ModelCheckpoint(path, save_best_only=True), tf.train.Checkpoint, or the layer's"
            " table.export() and import_()"
        )

    def __array__(self, dtype: Any = None) -> NoReturn:
        """Refused."""
        self.numpy()

    def assign(self, value: Any) -> None:
        """Refused, but to optimizers, whose weight decay has no meaning here."""
        if callers.caller(keras.optimizers.Optimizer) is None:
            self.numpy()
