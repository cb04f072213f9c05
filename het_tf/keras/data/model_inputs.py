"""What a functional model is called with, by the keys of its Inputs.

Keras flattens the dict of Inputs and the one that the model is called with each in its own order:
by sorted keys, or as it was written where it is an OrderedDict.
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
    """Checks what a model with `HetEmbedding` layers is called with.

    Args:
      model: any; one that is not functional has no Inputs, and nothing is cast.
      inputs: its first argument: arrays, tensors or symbolic tensors in any structure.

    Returns:
      The inputs. In a graph, those that Keras would cast to a narrower integer type are cast.

    Raises:
      tf.errors.InvalidArgumentError: a number is given for an Input of an integer type that does
        not hold it, or is no whole one. The message has its value. A graph raises when it runs.
    """
    specs = getattr(model, "inputs", None) or ()
    narrow = [
        (spec, given)
        for spec, given in zip(specs, _flat(inputs, specs), strict=False)
        if _may_lose(given, tf.as_dtype(spec.dtype))
    ]
    embeddings = embeddings_of(model) if narrow else []
    # A model that is exported has no ops of het_tf.
    if not embeddings or served_table(embeddings[0]) is not None:
        return inputs
    cast = {}
    for spec, given in narrow:
        dtype, name = tf.as_dtype(spec.dtype), f"input {spec.name} of model {model.name}"

        def check(x: tf.Tensor, dtype: tf.DType = dtype, name: str = name) -> tf.Tensor:
            # What comes out is used: TensorFlow would leave out a check that nothing depends on.
            return tf.cast(ops.keys(x, cast_to=dtype, input_dim=0, name_of_ids=name), dtype)

        cast[id(given)] = map_values(given, check)
    if tf.executing_eagerly():  # Keras does not take tensors beside arrays
        return inputs
    return keras.tree.map_structure(lambda given: cast.get(id(given), given), inputs)


def _flat(inputs: Any, specs: Any) -> list[Any]:
    """In the order of the Inputs, as Keras has it: by their names, where all of these are keys."""
    if isinstance(inputs, dict) and all(spec.name in inputs for spec in specs):
        return [inputs[spec.name] for spec in specs]
    return keras.tree.flatten(inputs)


def _may_lose(given: Any, to: tf.DType) -> bool:
    """Whether a cast to an integer type makes other numbers of some of what may be given."""
    if not to.is_integer or not isinstance(
        given, (np.ndarray, np.generic, tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
    ):
        return False
    dtype = tf.as_dtype(given.dtype)
    if dtype.is_floating:
        return True
    return dtype.is_integer and not (to.min <= dtype.min and dtype.max <= to.max)


def by_key(model: keras.Model, inputs: Any) -> Any:
    """`inputs`, with dicts of the kind and the order that the model's Inputs have."""
    return (
        _like(model.input, inputs)
        if isinstance(model, keras_internals.functional_class())
        else inputs
    )


def _like(structure: Any, inputs: Any) -> Any:
    if isinstance(structure, dict) and isinstance(inputs, dict):
        if structure.keys() != inputs.keys():
            return inputs  # Keras says what is missing.
        kind = collections.OrderedDict if isinstance(structure, collections.OrderedDict) else dict
        return kind((key, _like(each, inputs[key])) for key, each in structure.items())
    if isinstance(structure, (list, tuple)) and isinstance(inputs, (list, tuple)):
        if len(structure) != len(inputs):
            return inputs
        values = [_like(each, x) for each, x in zip(structure, inputs, strict=True)]
        return values if isinstance(inputs, list) else tuple_like(inputs, values)
    return inputs
