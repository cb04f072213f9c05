"""Inputs of a call of a functional model, matched to the model's Inputs by key.

Keras flattens the dict of Inputs and the dict of a call separately: an OrderedDict in its own
order, another dict by sorted keys. The two orders may differ.
"""

from __future__ import annotations

import collections
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf.compat import keras_internals
from het_tf.layers.embedding import embeddings_of
from het_tf.layers.exporting import served_table
from het_tf.layers.features import tuple_like
from het_tf.layers.ids import map_values


def checked_inputs(model: keras.Model, inputs: Any) -> Any:
    """Checks the inputs of a model with `HetEmbedding` layers.

    Args:
      model: any model. A model that is not functional has no Inputs: nothing is checked or cast.
      inputs: first argument of the model: arrays, tensors or symbolic tensors in any structure.

    Returns:
      The inputs. In a graph, inputs that Keras would cast to a narrower integer type are cast.

    Raises:
      tf.errors.InvalidArgumentError: a number is not whole, or does not fit the integer type of its
        Input. The message contains the number. A graph raises the error when it runs.
    """
    specs = getattr(model, "inputs", None) or ()
    narrow = [
        (spec, given)
        for spec, given in zip(specs, _flat(inputs, specs), strict=False)
        if _may_lose(given, tf.as_dtype(spec.dtype))
    ]
    embeddings = embeddings_of(model) if narrow else []
    # An exported model contains no ops of het_tf.
    if not embeddings or served_table(embeddings[0]) is not None:
        return inputs
    cast = {}
    for spec, given in narrow:
        dtype, name = tf.as_dtype(spec.dtype), f"input {spec.name} of model {model.name}"

        def check(x: tf.Tensor, dtype: tf.DType = dtype, name: str = name) -> tf.Tensor:
            # The cast uses the result, because TensorFlow prunes ops that nothing depends on.
            return tf.cast(ops.keys(x, cast_to=dtype, input_dim=0, name_of_ids=name), dtype)

        cast[id(given)] = map_values(given, check)
    if tf.executing_eagerly():  # Keras rejects tensors mixed with arrays.
        return inputs
    return keras.tree.map_structure(lambda given: cast.get(id(given), given), inputs)


def _flat(inputs: Any, specs: Any) -> list[Any]:
    """Returns inputs in the order of the Inputs. As in Keras, by name if all names are keys."""
    if isinstance(inputs, dict) and all(spec.name in inputs for spec in specs):
        return [inputs[spec.name] for spec in specs]
    return keras.tree.flatten(inputs)


def _may_lose(given: Any, to: tf.DType) -> bool:
    """Whether `to` is an integer type that cannot hold all numbers of the dtype of `given`."""
    if not to.is_integer or not isinstance(
        given, (np.ndarray, np.generic, tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
    ):
        return False
    dtype = tf.as_dtype(given.dtype)
    if dtype.is_floating:
        return True
    return dtype.is_integer and not (to.min <= dtype.min and dtype.max <= to.max)


def by_key(model: keras.Model, inputs: Any) -> Any:
    """Returns `inputs`, with dicts of the type and order of the dicts of the model's Inputs."""
    return (
        _like(model.input, inputs)
        if isinstance(model, keras_internals.functional_class())
        else inputs
    )


def _like(structure: Any, inputs: Any) -> Any:
    if isinstance(structure, dict) and isinstance(inputs, dict):
        if structure.keys() != inputs.keys():
            return inputs  # Keras reports missing keys.
        kind = collections.OrderedDict if isinstance(structure, collections.OrderedDict) else dict
        return kind((key, _like(each, inputs[key])) for key, each in structure.items())
    if isinstance(structure, (list, tuple)) and isinstance(inputs, (list, tuple)):
        if len(structure) != len(inputs):
            return inputs
        values = [_like(each, x) for each, x in zip(structure, inputs, strict=True)]
        return values if isinstance(inputs, list) else tuple_like(inputs, values)
    return inputs
