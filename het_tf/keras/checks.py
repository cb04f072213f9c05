"""What asynchronous training asks of a model, checked with errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from het_tf.distribute import HetParameterServerStrategy
from het_tf.keras.components import components_of
from het_tf.keras.dense import accumulated_steps, has_own, optimizers_of
from het_tf.layers.embedding import embeddings_of


def check_one_gpu(strategy: HetParameterServerStrategy) -> None:
    """Raises a ValueError if a worker task has several GPUs."""
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "het_tf.keras.Model uses one GPU per worker task, but the workers have "
            f"{strategy.num_replicas_in_sync}: list one worker per GPU in the cluster, and start "
            "each with `python -m het_tf.server`, which takes one of its host's GPUs."
        )


def check_placement(variables: Iterable[keras.Variable]) -> None:
    """Raises a ValueError for a variable that is not on a parameter server."""
    for variable in variables:
        if "/job:ps" not in variable.value.device:
            raise ValueError(
                f"Variable {variable.path!r} was not made under the strategy, so the workers "
                "cannot use it: make the model, its layers and the optimizer inside "
                "`with strategy.scope():`."
            )


def check_inputs(model: keras.Model, element_spec: Any) -> None:
    """Raises a ValueError for strings where no input of a model takes any."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    inputs = getattr(model, "inputs", None) or ()  # a subclassed model has none
    takes_strings = not inputs or any(each.dtype == "string" for each in inputs)
    if takes_strings or all(spec.dtype != tf.string for spec in components_of(x)):
        return
    names = ", ".join(f"{each.name!r} of {each.dtype}" for each in inputs)
    raise ValueError(
        f"x holds strings, and the model's inputs take none ({names}): make integers of them, by"
        " keras.layers.StringLookup in the dataset's map or on an Input of dtype='string'."
    )


def check_optimizers(model: keras.Model, strategy: HetParameterServerStrategy) -> None:
    """Raises a ValueError for an optimizer that does not do what the strategy promises."""
    steps = accumulated_steps(model.optimizer)
    if steps and strategy.exactly_once:
        raise ValueError(
            f"gradient_accumulation_steps={steps} does not work with exactly_once=True: a worker "
            "that dies takes the gradients along that it had accumulated. Use larger batches."
        )
    for optimizer in optimizers_of(model):
        if optimizer is not model.optimizer and has_own(optimizer):
            raise ValueError(
                f"The optimizer {optimizer.name!r} accumulates gradients or scales the loss, which"
                " under HetParameterServerStrategy only the one can that the model is compiled"
                " with."
            )


def check_callbacks(model: keras.Model, callbacks: keras.callbacks.CallbackList) -> None:
    """Raises a ValueError for a callback that would restore a part of the model only."""
    for callback in callbacks.callbacks:
        if getattr(callback, "restore_best_weights", False) and embeddings_of(model):
            raise ValueError(
                f"{type(callback).__name__}(restore_best_weights=True) restores Keras weights, and "
                f"not the table of layer {embeddings_of(model)[0].name!r}: use "
                "ModelCheckpoint(path, save_best_only=True, save_weights_only=True), and "
                "load_weights(path) afterwards."
            )
