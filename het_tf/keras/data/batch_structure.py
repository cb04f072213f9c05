"""Structure of batches: tensors, and None where Keras accepts None in place of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

Batch = Any


def spec_of(dataset: Any) -> Any:
    """Returns the spec of a dataset's batches, with None in place of `tf.NoneTensorSpec`."""
    return tf.nest.map_structure(
        lambda spec: None if isinstance(spec, tf.NoneTensorSpec) else spec, dataset.element_spec
    )


def common_spec(specs: Sequence[Any]) -> Any:
    """Returns a spec that covers all `specs`. None: structures or dtypes differ."""
    first, *others = specs
    try:
        for other in others:
            tf.nest.assert_same_structure(first, other)
        common = tf.nest.map_structure(lambda x, *y: x.most_specific_common_supertype(y), *specs)
    except (TypeError, ValueError):
        return None
    return None if None in tf.nest.flatten(common) else common


def components_of(batch: Any) -> list[Any]:
    """Returns a batch's tensors or a spec's `tf.TensorSpec`s, with composites split into parts."""
    return [x for x in tf.nest.flatten(batch, expand_composites=True) if x is not None]


def with_components(like: Any, components: Sequence[tf.Tensor]) -> Any:
    """Returns a batch of the structure of `like`, a batch or spec, with these components."""
    remaining = iter(components)
    leaves = [
        None if x is None else next(remaining)
        for x in tf.nest.flatten(like, expand_composites=True)
    ]
    return tf.nest.pack_sequence_as(like, leaves, expand_composites=True)


def read_weights(model: keras.Model) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Returns the trainable weights with their values, for steps that only read the weights.

    Without these values, every step would read the weights from the servers.
    """
    return [(weight, tf.identity(weight.value)) for weight in model.trainable_variables]


def stacked_signature(element_spec: Any) -> list[tf.TensorSpec]:
    """Returns the specs of a batch's components, stacked over any number of steps."""
    return [
        tf.TensorSpec(tf.TensorShape([None]).concatenate(spec.shape), spec.dtype)
        for spec in components_of(element_spec)
    ]


def take_batch(element_spec: Any, stacked: tuple[tf.Tensor, ...], step: tf.Tensor) -> Batch:
    """Returns the batch of one step from stacked components, with shapes of `element_spec`."""
    flat_spec = components_of(element_spec)
    components = [
        tf.ensure_shape(component[step], spec.shape)
        for component, spec in zip(stacked, flat_spec, strict=True)
    ]
    return with_components(element_spec, components)
