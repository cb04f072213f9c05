"""The weight that stands for a table among the weights of a Keras model."""

from __future__ import annotations

from typing import Any, NoReturn

import keras


class Anchor(keras.Variable):
    """A scalar whose gradient trains a table; its value has no meaning.

    What asks for its value or sets it, as `get_weights`, `set_weights` and `.h5` files do, would
    leave the table out, and is refused.
    """

    def __init__(self, layer_name: str):
        """The anchor of the table of that layer."""
        self._layer_name = layer_name
        # By an initializer: a layer may be built in a scope that lets values wait.
        super().__init__(keras.initializers.Zeros(), shape=(), dtype="float32", name="anchor")

    def numpy(self) -> NoReturn:
        """Refused."""
        raise ValueError(
            f"the table of layer {self._layer_name} is no Keras weight: get_weights, set_weights"
            " and .h5 files have no place for it. Use save_weights(path.weights.h5),"
            " save(path.keras), tf.train.Checkpoint, or the layer's table.export() and import_()"
        )

    def __array__(self, dtype: Any = None) -> NoReturn:
        """Refused."""
        self.numpy()

    def assign(self, value: Any) -> NoReturn:
        """Refused."""
        self.numpy()
