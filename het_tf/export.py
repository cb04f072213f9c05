"""SavedModels that TensorFlow loads and serves without het_tf."""

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

    This function copies the rows in the parts of `EmbeddingTable.export_parts`, through files in
    `tempfile.gettempdir()`. The model can be trained further. Ids without a row read as their
    initial value. The endpoints are those of `keras.Model.export`: `serve`, and the signature
    "serving_default".

    Args:
      model: a built model, under a strategy or not.
      path: folder of the SavedModel.
      input_signature: `tf.TensorSpec`, `tf.RaggedTensorSpec` and `tf.SparseTensorSpec` in the
        structure of the model's input. Subclassed models need it. None: the kinds, shapes and
        dtypes of the model's inputs.
      rows: stored dtype of values, "float32", "float16" or "int8". The error of "float16" is at
        most `2**-11` of a value, or `2**-25` if that is more. "int8" has a scale per row, and its
        error is at most 1 / 254 of the row's largest absolute value.
      min_updates: leaves out rows with fewer updates.
      min_norm: leaves out rows with a smaller L2 norm.
      max_age: leaves out rows whose last update is longer ago. An integer, in the unit of the ages
        of the tables' `Expiry`.

    Raises:
      ValueError: a subclassed model lacks `input_signature`, an argument is out of range, a value
        is beyond the range of float16, a table does not count updates (`min_updates`) or has no
        `Expiry` (`max_age`), or the folder holds a model of `het_tf.serving`, which the export
        would replace by a model with fixed rows.
      OSError: a file cannot be written. The existing files in the folder are unchanged.
      tf.errors.OpError: a file cannot be written, or a parameter server is down.
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
        # The variables are copied, because those of the model may be on parameter servers.
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
    """Returns the layers whose tables are exported: in a built model, only the built layers."""
    return [layer for layer in embeddings_of(model) if layer.built or not model.built]


def flush_model(model: keras.Model) -> None:
    """Pushes the workers' pending updates of a model, for rows and dense variables."""
    strategy = getattr(model, "distribute_strategy", None)
    if hasattr(strategy, "flush"):
        strategy.flush(slots=False)
        return
    for layer in embeddings_of(model):
        layer.flush()


def servable_of(model: keras.Model) -> tf.Module:
    """Returns a module with the resources of a model's layers, such as a StringLookup's table."""
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
    """Adds the endpoints of a model to a servable and saves it.

    Also accepts the arguments of `give_endpoint`.

    Args:
      path: folder of the SavedModel.
    """
    give_endpoint(servable, model, specs, read)
    save_endpoints(servable, path)


def save_endpoints(
    servable: tf.Module, path: str | os.PathLike[str], others: dict[str, Any] | None = None
) -> None:
    """Saves a servable that has an endpoint. `others` are further signatures."""
    signatures = {"serving_default": _named_outputs(servable.serve)} | (others or {})
    tf.saved_model.save(servable, os.fspath(path), signatures=signatures)


def give_endpoint(
    servable: tf.Module,
    model: keras.Model,
    specs: list[Any],
    read: Callable[[], tuple[Sequence[ServedTable], Sequence[tf.Tensor]]],
) -> None:
    """Adds the endpoint `serve` of a model to a servable.

    Args:
      servable: module from `servable_of`, with the tables and variables that `read` returns.
      model: model whose prediction the endpoint computes.
      specs: result of `signature_of`.
      read: called while the prediction is traced. It returns the tables, in the order of
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
    """Returns the specs of the inputs of a model's endpoints.

    Args:
      model: the model.
      given: `input_signature` of the user, or None.

    Raises:
      ValueError: `given` is None, and the model has no symbolic inputs. Or `model` is no model.
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
    """Returns the spec of an endpoint's input for a symbolic input: same kind, shape and dtype."""
    shape = [None, *symbolic.shape[1:]]
    if symbolic.sparse:
        return tf.SparseTensorSpec(shape, symbolic.dtype)
    if symbolic.ragged:
        rank = symbolic.ragged_rank
        if rank is None:  # The ragged axes end with the last axis of unknown length.
            rank = max(axis for axis, length in enumerate(shape) if length is None)
        return tf.RaggedTensorSpec(shape, symbolic.dtype, ragged_rank=rank)
    return tf.TensorSpec(shape, symbolic.dtype, name=symbolic.name)


def _symbolic_input(model: keras.Model) -> Any:
    """Returns the symbolic input of a model in its structure, or None."""
    # `Sequential.input` is the input of one of its calls.
    if isinstance(model, keras.Sequential):
        return model.inputs[0] if model.built else None
    try:
        return model.input
    except (AttributeError, ValueError):
        return None


def _named_outputs(serve: Any) -> Any:
    """Returns `serve` with a dict as output, which signatures need."""
    specs = serve.input_signature

    @tf.function(input_signature=specs, autograph=False)
    def signature(*inputs: Any) -> dict[str, tf.Tensor]:
        outputs = serve(*inputs)
        if isinstance(outputs, dict):
            return outputs
        return {f"output_{i}": tensor for i, tensor in enumerate(tf.nest.flatten(outputs))}

    return signature
