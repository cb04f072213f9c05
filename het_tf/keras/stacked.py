"""What closures are given: batches stacked over steps, and weights that steps only read."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from het_tf.keras.ahead import Batch
from het_tf.keras.components import components_of, with_components


def read_weights(model: keras.Model) -> list[tuple[keras.Variable, tf.Tensor]]:
    """The weights that are trained, with their values, for steps that only read them.

    Each step would read them from the servers otherwise.
    """
    return [(weight, tf.identity(weight.value)) for weight in model.trainable_variables]


def stacked_signature(element_spec: Any) -> list[tf.TensorSpec]:
    """Specs of the components of a batch, each stacked over any number of steps."""
    return [
        tf.TensorSpec(tf.TensorShape([None]).concatenate(spec.shape), spec.dtype)
        for spec in components_of(element_spec)
    ]


def take_batch(element_spec: Any, stacked: tuple[tf.Tensor, ...], step: tf.Tensor) -> Batch:
    """The batch of one step out of components stacked over steps, shaped as `element_spec`."""
    flat_spec = components_of(element_spec)
    components = [
        tf.ensure_shape(component[step], spec.shape)
        for component, spec in zip(stacked, flat_spec, strict=True)
    ]
    return with_components(element_spec, components)
