"""SavedModels that stock TensorFlow loads and serves, without het_tf."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from het_tf.layers.embedding import HetEmbedding, embeddings_of
from het_tf.layers.exporting import ServedTable, lookups_from
from het_tf.runtime.current_strategy import servers_named
from het_tf.storage.files import VERSIONS, replace_tensors, saving_model
from het_tf.storage.served.frozen_table import FrozenTable
from het_tf.storage.served.row_selection import RowSelection


@servers_named()
def export_saved_model(
    model: keras.Model,
    path: str | os.PathLike[str],
    input_signature: Any = None,
    *,
    rows: str = "float32",
    min_updates: int = 0,
    min_norm: float = 0.0,
    max_age: int | None = None,
) -> None:
    """Writes a SavedModel that needs no het_tf ops.

    Rows are copied as they are, in parts as of `EmbeddingTable.export_parts`, through files in
    `tempfile.gettempdir()`; the model can be trained further. Ids without a row read as their
    initial value. The endpoints are those of `keras.Model.export`: `serve`, and the signature
    "serving_default".

    Args:
      model: a built model, under a strategy or not.
      path: folder of the SavedModel.
      input_signature: `tf.TensorSpec`, `tf.RaggedTensorSpec` and `tf.SparseTensorSpec` in the
        structure of the model's input; needed for subclassed models. None: inputs of the kinds,
        shapes and dtypes that the model's have.
      rows: what values are stored as. "float32"; "float16", off by at most `2**-11` of a value, or
        `2**-25` where that is more; "int8" with a scale per row, off by at most 1 / 254 of the
        row's largest value.
      min_updates: rows that were updated less often are left out.
      min_norm: rows with a smaller L2 norm are left out.
      max_age: rows that were not updated for longer are left out: an integer, in the unit of the
        ages of the tables' `Expiry`.

    Raises:
      ValueError: a subclassed model without `input_signature`; an argument is out of its range;
        `min_updates` with a table whose clock does not count updates; `max_age` with one without
        an `Expiry`; a value is beyond the range of float16; or the folder holds a model of
        `het_tf.serving`, which would be served as it is now by those who load it later.
      OSError: a file cannot be written. What was there in the folder is there still.
      tf.errors.OpError: as OSError, or a parameter server is down.
    """
    selection = RowSelection(rows, min_updates, min_norm, max_age)
    if tf.io.gfile.exists(f"{os.fspath(path)}/{VERSIONS}"):
        raise ValueError(
            f"path = {os.fspath(path)} holds a model of het_tf.serving: remove it first, or export "
            "to another folder"
        )
    specs = signature_of(model, input_signature)
    layers = layers_with_rows(model)
    for layer in layers:
        selection.check_table(layer.table)
    with tempfile.TemporaryDirectory() as directory, tf.device("/device:CPU:0"):
        servable = servable_of(model)
        flush_model(model)
        servable.tables = [
            FrozenTable(x.table, pathlib.Path(directory), selection, in_memory=False)
            for x in layers
        ]
        # Copies, because the model's own variables may be on parameter servers.
        servable.variables_ = [
            tf.Variable(v.value.numpy(), trainable=False) for v in model.variables
        ]

        def read() -> tuple[Sequence[ServedTable], Sequence[tf.Tensor]]:
            return servable.tables, list(map(tf.convert_to_tensor, servable.variables_))

        columns = {
            f"tables/{i}/{attribute}/.ATTRIBUTES/VARIABLE_VALUE": column
            for i, table in enumerate(servable.tables)
            for attribute, column in table.columns().items()
        }
        with saving_model(os.fspath(path)) as folder:
            save_servable(servable, model, specs, read, folder)
            replace_tensors(f"{folder}/variables/variables", columns)


def layers_with_rows(model: keras.Model) -> list[HetEmbedding]:
    """Those whose tables a SavedModel has: of a built model without what nothing has called."""
    return [layer for layer in embeddings_of(model) if layer.built or not model.built]


def flush_model(model: keras.Model) -> None:
    """Has what workers hold back of a model, rows and dense variables, where it is read from."""
    strategy = getattr(model, "distribute_strategy", None)
    if hasattr(strategy, "flush"):
        strategy.flush(slots=False)
        return
    for layer in embeddings_of(model):
        layer.flush()


def servable_of(model: keras.Model) -> tf.Module:
    """What a SavedModel of a model holds in any case: what layers such as StringLookup hold."""
    servable = tf.Module()
    servable.resources = [
        node
        for node in tf.train.TrackableView(model).descendants()
        if isinstance(node, tf.saved_model.experimental.TrackableResource)
    ]
    return servable


def save_servable(
    servable: tf.Module,
    model: keras.Model,
    specs: list[Any],
    read: Callable[[], tuple[Sequence[ServedTable], Sequence[tf.Tensor]]],
    path: str | os.PathLike[str],
) -> None:
    """Gives a servable the endpoints of a model, and saves it. Arguments as of `give_endpoint`.

    Args:
      path: folder of the SavedModel.
    """
    give_endpoint(servable, model, specs, read)
    save_endpoints(servable, path)


def save_endpoints(
    servable: tf.Module, path: str | os.PathLike[str], others: dict[str, Any] | None = None
) -> None:
    """Saves a servable that has an endpoint. others: further signatures."""
    signatures = {"serving_default": _named_outputs(servable.serve)} | (others or {})
    tf.saved_model.save(servable, os.fspath(path), signatures=signatures)


def give_endpoint(
    servable: tf.Module,
    model: keras.Model,
    specs: list[Any],
    read: Callable[[], tuple[Sequence[ServedTable], Sequence[tf.Tensor]]],
) -> None:
    """Gives a servable the endpoint `serve` of a model.

    Args:
      servable: of `servable_of`, with what `read` reads from.
      model: whose prediction it is.
      specs: of `signature_of`.
      read: called where a prediction is traced: the tables, in the order of
        `layers_with_rows(model)`, and the values of `model.variables`.
    """
    layers = layers_with_rows(model)

    def predict(*inputs: Any) -> Any:
        tables, values = read()
        mapping = list(zip(model.variables, values, strict=True))
        of_layers = dict(zip(layers, tables, strict=True))
        with keras.StatelessScope(state_mapping=mapping), lookups_from(of_layers):
            return model(inputs[0] if len(specs) == 1 else list(inputs), training=False)

    servable.serve = tf.function(predict, input_signature=specs, autograph=False)


def signature_of(model: keras.Model, given: Any) -> list[Any]:
    """The inputs of a model's endpoints.

    Raises:
      ValueError: none are given, and the model is not made of symbolic inputs; or it is no model.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(f"model must be a keras.Model, not {model!r}")
    if given is None:
        structure = _symbolic_input(model)
        if structure is None:
            raise ValueError(
                f"input_signature must be given: model {model.name} is not made of symbolic inputs"
            )
        given = tf.nest.map_structure(_spec_of, structure)
    return given if isinstance(given, list) else [given]


def _spec_of(symbolic: keras.KerasTensor) -> Any:
    """What an endpoint takes for an input of a model: of its kind, shape and dtype."""
    shape = [None, *symbolic.shape[1:]]
    if symbolic.sparse:
        return tf.SparseTensorSpec(shape, symbolic.dtype)
    if symbolic.ragged:
        rank = symbolic.ragged_rank
        if rank is None:  # all axes but those at the end that have a length
            rank = max(axis for axis, length in enumerate(shape) if length is None)
        return tf.RaggedTensorSpec(shape, symbolic.dtype, ragged_rank=rank)
    return tf.TensorSpec(shape, symbolic.dtype, name=symbolic.name)


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
