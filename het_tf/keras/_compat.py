"""The non-public parts of Keras 3 that training on parameter servers cannot do without.

Nothing else in het_tf.keras reaches into Keras. Checked with Keras 3.15.
"""

from __future__ import annotations

import functools
from typing import Any

import keras


def build_from_spec(model: keras.Model, batch_spec: Any) -> None:
    """Builds the model, its compiled metrics and losses, and the optimizer.

    Keras does the same at the start of `fit` under a strategy. There is no public call that builds
    compiled metrics before the first batch, and no variable can be made inside a closure.

    Args:
      model: a compiled or not compiled model, inside its strategy's scope.
      batch_spec: an element of the dataset with `tf.TensorSpec`s for tensors.
    """
    model._symbolic_build(data_batch=batch_spec)


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Has the `fit` whose `on_train_begin` this is begin with that epoch."""
    model._initial_epoch = epoch


def take_initial_epoch(model: keras.Model) -> int:
    """The epoch from which a `BackupAndRestore` wants to resume, or 0; not the next `fit`, too."""
    epoch = getattr(model, "_initial_epoch", None) or 0
    model._initial_epoch = None
    return epoch


@functools.cache
def functional_class() -> type[keras.Model]:
    """The class of `keras.Model(inputs, outputs)`, which Keras does not export."""
    # With names of their own: the ones that Keras counts are the user's.
    inputs = keras.Input((), name="het_tf_input")
    return type(keras.Model(inputs, inputs, name="het_tf_model"))


def calls_as_keras_does(model: keras.Model) -> bool:
    """Whether it is functional or sequential, with the call of Keras."""
    is_known = isinstance(model, (functional_class(), keras.Sequential))
    base = keras.Sequential if isinstance(model, keras.Sequential) else functional_class()
    return is_known and type(model).call is base.call


def trains_as_keras_does(model: keras.Model) -> bool:
    """Whether `calls_as_keras_does`, with the train_step of Keras."""
    return calls_as_keras_does(model) and type(model).train_step is keras.Model.train_step
