"""What closures are given: batches stacked over steps, and weights that steps only read."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from het_tf.keras.ahead import Batch


def read_weights(model: keras.Model) -> list[tuple[keras.Variable, tf.Tensor]]:
    """The weights that are trained, with their values, for steps that only read them.

    Each step would read them from the servers otherwise.
    """
    return [(weight, tf.identity(weight.value)) for weight in model.trainable_variables]


def stacked_signature(element_spec: Any) -> list[tf.TensorSpec]:
    """Specs of the components of a batch, each stacked over any number of steps."""
    return [
        tf.TensorSpec(tf.TensorShape([None]).concatenate(spec.shape), spec.dtype)
        for spec in tf.nest.flatten(element_spec, expand_composites=True)
    ]


def take_batch(element_spec: Any, stacked: tuple[tf.Tensor, ...], step: tf.Tensor) -> Batch:
    """The batch of one step out of components stacked over steps, shaped as `element_spec`."""
    flat_spec = tf.nest.flatten(element_spec, expand_composites=True)
    components = [
        tf.ensure_shape(component[step], spec.shape)
        for component, spec in zip(stacked, flat_spec, strict=True)
    ]
    return tf.nest.pack_sequence_as(element_spec, components, expand_composites=True)
