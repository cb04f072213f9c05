"""What a batch is made of: its tensors, and None where Keras takes that in a tensor's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


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
