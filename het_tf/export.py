"""SavedModels that stock TensorFlow loads and serves, without het_tf."""

from __future__ import annotations

import os
import pathlib
import tempfile
from typing import Any

import keras
import tensorflow as tf

from het_tf.layers.embedding import embeddings_of
from het_tf.serving import FrozenTable, lookups_from


def export_saved_model(
    model: keras.Model, path: str | os.PathLike[str], input_signature: Any = None
) -> None:
    """Writes a SavedModel that needs no het_tf ops.

    Rows are copied as they are; the model can be trained further. Ids without a row read as their
    initial value. The endpoints are those of `keras.Model.export`: `serve`, and the signature
    "serving_default".

    Args:
      model: a built model, under a strategy or not.
      path: folder of the SavedModel.
      input_signature: `tf.TensorSpec`s in the structure of the model's input; needed only for
        subclassed models.

    Raises:
      ValueError: a subclassed model without `input_signature`.
    """
    specs = _input_signature(model, input_signature)
    with tempfile.TemporaryDirectory() as directory, tf.device("/device:CPU:0"):
        servable = tf.Module()
        layers = embeddings_of(model)
        for layer in layers:
            layer.flush()
        servable.tables = [FrozenTable(x.table, pathlib.Path(directory)) for x in layers]
        # What layers such as StringLookup hold.
        servable.resources = [
            node
            for node in tf.train.TrackableView(model).descendants()
            if isinstance(node, tf.saved_model.experimental.TrackableResource)
        ]
        # Copies, because the model's own variables may be on parameter servers.
        servable.variables_ = [
            tf.Variable(v.value.numpy(), trainable=False) for v in model.variables
        ]

        def predict(*inputs: Any) -> Any:
            copies = map(tf.convert_to_tensor, servable.variables_)
            mapping = list(zip(model.variables, copies, strict=True))
            tables = dict(zip(layers, servable.tables, strict=True))
            with keras.StatelessScope(state_mapping=mapping), lookups_from(tables):
                return model(inputs[0] if len(specs) == 1 else list(inputs), training=False)

        servable.serve = tf.function(predict, input_signature=specs, autograph=False)
        signatures = {"serving_default": _named_outputs(servable.serve)}
        tf.saved_model.save(servable, os.fspath(path), signatures=signatures)


def _input_signature(model: keras.Model, given: Any) -> list[Any]:
    if given is None:
        structure = _symbolic_input(model)
        if structure is None:
            raise ValueError(
                f"input_signature must be given: model {model.name} is not made of symbolic inputs"
            )
        given = tf.nest.map_structure(
            lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype, name=x.name), structure
        )
    return given if isinstance(given, list) else [given]


def _symbolic_input(model: keras.Model) -> Any:
    """The model's input in its structure, or None."""
    if isinstance(model, keras.Sequential):  # whose `input` is that of a layer that was called
        return model.inputs[0] if model.built else None
    try:
        return model.input
    except (AttributeError, ValueError):
        return None


def _named_outputs(serve: Any) -> Any:
    """`serve` with a dict as output, as signatures must have."""
    specs = serve.input_signature

    @tf.function(input_signature=specs, autograph=False)
    def signature(*inputs: Any) -> dict[str, tf.Tensor]:
        outputs = serve(*inputs)
        if isinstance(outputs, dict):
            return outputs
        return {f"output_{i}": tensor for i, tensor in enumerate(tf.nest.flatten(outputs))}

    return signature
