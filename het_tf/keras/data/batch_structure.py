"""What a batch is made of: its tensors, and None where Keras takes that in a tensor's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

Batch = Any


def spec_of(dataset: Any) -> Any:
    """The spec of a dataset's batches, with None where they have it."""
    return tf.nest.map_structure(
        lambda spec: None if isinstance(spec, tf.NoneTensorSpec) else spec, dataset.element_spec
    )


def common_spec(specs: Sequence[Any]) -> Any:
    """The spec of batches of all of these; None: structures or dtypes differ."""
    first, *others = specs
    try:
        for other in others:
            tf.nest.assert_same_structure(first, other)
        common = tf.nest.map_structure(lambda x, *y: x.most_specific_common_supertype(y), *specs)
    except (TypeError, ValueError):
        return None
    return None if None in tf.nest.flatten(common) else common


def components_of(batch: Any) -> list[Any]:
    """The tensors of a batch, or the `tf.TensorSpec`s of its spec: those of composite ones, too."""
    return [x for x in tf.nest.flatten(batch, expand_composites=True) if x is not None]


def with_components(like: Any, components: Sequence[tf.Tensor]) -> Any:
    """A batch of the structure of another one, or of a spec, with these components."""
    remaining = iter(components)
    leaves = [
        None if x is None else next(remaining)
        for x in tf.nest.flatten(like, expand_composites=True)
    ]
    return tf.nest.pack_sequence_as(like, leaves, expand_composites=True)


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
