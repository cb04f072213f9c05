"""What a model is called with eagerly, looked at before Keras casts it to the types of its Inputs.

In a graph a layer finds what was fed behind the cast (het_tf/layers/ids.py). A tensor that is there
already does not say what it was made of, so the model checks it on its way in.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf.layers.embedding import embeddings_of
from het_tf.layers.ids import map_values


def check_inputs(model: keras.Model, inputs: Any) -> None:
    """Checks what a model with `HetEmbedding` layers is called with, outside of graphs.

    Args:
      model: any; one that is not functional has no Inputs, and nothing is cast.
      inputs: its first argument: arrays, tensors or symbolic tensors in any structure.

    Raises:
      tf.errors.InvalidArgumentError: a number is given for an Input of an integer type that does
        not hold it, or is no whole one. The message has its value.
    """
    if not tf.executing_eagerly():
        return
    specs = getattr(model, "inputs", None) or ()
    cast = [
        (spec, given)
        for spec, given in zip(specs, _flat(inputs, specs), strict=False)
        if _may_lose(given, tf.as_dtype(spec.dtype))
    ]
    if not cast or not embeddings_of(model):
        return
    for spec, given in cast:
        name = f"input {spec.name} of model {model.name}"
        dtype = tf.as_dtype(spec.dtype)
        map_values(
            given,
            lambda x, dtype=dtype, name=name: ops.keys(
                x, cast_to=dtype, input_dim=0, name_of_ids=name
            ),
        )


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
