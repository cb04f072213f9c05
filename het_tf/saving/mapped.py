"""Tables in a SavedModel that keeps the het_tf ops: rows in files that are mapped, and followed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf.export import (
    flush_model,
    give_endpoint,
    layers_with_rows,
    save_endpoints,
    servable_of,
    signature_of,
)
from het_tf.pooling import Bags, pool_with_stock_ops
from het_tf.saving import graphs
from het_tf.saving.files import VERSIONS, saving_model
from het_tf.saving.row_selection import RowSelection
from het_tf.saving.versions import SupersededError, Versions
from het_tf.table import EmbeddingTable

# An asset of the SavedModel, which says where it was loaded from.
_ASSET = "het_tf.json"


class _Served(tf.saved_model.experimental.TrackableResource):
    """The versions of a model, where it was loaded."""

    def __init__(self, asset: tf.saved_model.Asset, attributes: dict[str, Any]):
        super().__init__()
        self._asset = asset
        self._attributes = attributes
        # Here, since what a graph makes of it first would stay in that graph.
        assert self.resource_handle is not None

    def _create_resource(self) -> tf.Tensor:
        return ops.served_handle(**self._attributes)

    def _initialize(self) -> tf.Operation:
        return ops.served_open(self.resource_handle, self._asset.asset_path)


class _MappedTable:
    """A table of one version."""

    def __init__(self, view: tf.Tensor, table: int, dim: int):
        self._view, self._table, self._dim = view, table, dim

    def pool(self, keys: tf.Tensor, features: Sequence[Bags]) -> list[tf.Tensor]:
        """Reads rows and pools them. Arguments as for `HetEmbedding.outputs_of`.

        Returns:
          float32 [bags, dim] of each feature.
        """
        rows = ops.served_lookup(self._view, keys, table=self._table, dim=self._dim)
        if len(features) == 1 and not features[0].pools:
            return [rows]
        of_features = tf.split(rows, [tf.size(bags.ids) for bags in features])
        return [
            pool_with_stock_ops(of_feature, tf.range(tf.size(bags.ids, tf.int64)), bags)
            for of_feature, bags in zip(of_features, features, strict=True)
        ]


def save_mapped(
    model: keras.Model,
    path: str | os.PathLike[str],
    input_signature: Any,
    selection: RowSelection,
    poll_seconds: float,
    full_every: int = 1,
) -> Versions:
    """Writes a SavedModel and a version of its rows and variables, or that into one found there.

    After an error nothing of it is there, but the versions that were there before.

    Args:
      model: a built model.
      path: folder of the SavedModel.
      input_signature: as of `het_tf.export_saved_model`.
      selection: which rows are to be served, and as what.
      poll_seconds: how often whoever loads it looks for newer versions; 0: never.
      full_every: one in so many of the next versions has all rows.

    Returns:
      What writes the next versions.

    Raises:
      ValueError: as by `het_tf.export_saved_model`; or path is an URL; or another model was saved
        there: the message says what differs.
      RuntimeError: another publisher began to write there meanwhile.
      tf.errors.OpError: a file cannot be written, or a parameter server is down.
    """
    path = os.fspath(path)
    if "://" in path:
        raise ValueError(
            f"rows are mapped from files of the operating system: {path!r} must be a folder of it"
        )
    specs = signature_of(model, input_signature)
    layers = layers_with_rows(model)
    for layer in layers:
        selection.check_table(layer.table)
    tables = [layer.table for layer in layers]
    attributes = {
        "dims": [table.dim for table in tables],
        "initializers": [table.row_attributes["initializer"] for table in tables],
        "seeds": [table.row_attributes["seed"] for table in tables],
        "poll_seconds": poll_seconds,
    }

    def values() -> list[np.ndarray]:
        return [v.value.numpy() for v in model.variables]

    def first_version(folder: str) -> Versions:
        versions = Versions(f"{folder}/{VERSIONS}", tables, values, selection, full_every)
        try:
            flush_model(model)
            versions.begin()()
        except BaseException:
            versions.close()
            raise
        return versions

    with tempfile.TemporaryDirectory() as directory:
        asset = f"{directory}/{_ASSET}"
        with tf.device("/device:CPU:0"):
            servable = _servable_without_rows(model, tables, specs, attributes, asset)
            description = attributes | _description(model, servable)
        if tf.io.gfile.exists(f"{path}/saved_model.pb"):
            _check_description(path, description, [layer.name for layer in layers])
            return first_version(path)
        with open(asset, "w") as file:
            json.dump(description, file)
        with saving_model(path) as folder:
            with tf.device("/device:CPU:0"):
                save_endpoints(servable, folder, {"freshness": servable.freshness})
            versions = first_version(folder)
            if tf.io.gfile.exists(f"{path}/saved_model.pb"):
                versions.close()
                message = f"{path}: another publisher wrote a SavedModel there meanwhile"
                raise SupersededError(message)
    versions.folder = f"{path}/{VERSIONS}"
    return versions


def _servable_without_rows(
    model: keras.Model,
    tables: Sequence[EmbeddingTable],
    specs: list[Any],
    attributes: dict[str, Any],
    asset: str,
) -> tf.Module:
    dtypes = [tf.as_dtype(v.dtype) for v in model.variables]
    shapes = [tuple(v.shape) for v in model.variables]
    servable = servable_of(model)
    servable.asset = tf.saved_model.Asset(asset)
    servable.served = _Served(servable.asset, attributes)

    def read() -> tuple[list[_MappedTable], list[tf.Tensor]]:
        view, _ = ops.served_pin(servable.served.resource_handle)
        values = ops.served_variables(view, dtypes=dtypes, shapes=shapes) if dtypes else []
        return [_MappedTable(view, i, t.dim) for i, t in enumerate(tables)], values

    @tf.function(input_signature=[], autograph=False)
    def freshness() -> dict[str, tf.Tensor]:
        return ops.served_status(servable.served.resource_handle)._asdict()

    servable.freshness = freshness
    give_endpoint(servable, model, specs, read)
    return servable


def _description(model: keras.Model, servable: tf.Module) -> dict[str, Any]:
    """What makes it another model, beside the attributes of its tables."""
    serve = servable.serve.get_concrete_function()
    lookups = [x for x in servable.resources if hasattr(x, "export")]
    return {
        "variables": [[tf.as_dtype(v.dtype).name, list(v.shape)] for v in model.variables],
        "lookup tables": [graphs.lookup_table_checksum(each) for each in lookups],
        "constants": graphs.constants_of(serve),
        "graph": [list(each) for each in graphs.checksums(serve)],
    }


def _check_description(path: str, own: dict[str, Any], layers: Sequence[str]) -> None:
    """Raises a ValueError that says what differs, if a folder's model is another one."""
    asset = f"{path}/assets/{_ASSET}"
    known = json.loads(tf.io.gfile.GFile(asset).read()) if tf.io.gfile.exists(asset) else {}
    differs = next((name for name in own if known.get(name) != own[name]), None)
    if differs == "graph" and "graph" in known:
        saved = {checksum for _, checksum in known["graph"]}
        new = [scope for scope, checksum in own["graph"] if checksum not in saved]
        if not new and len(known["graph"]) == len(own["graph"]):
            return  # only in the order of what it does
        differs = f"what it computes, in {new[0]}" if new else "it computes more"
    elif differs in known and differs not in ("lookup tables", "constants"):
        of_layers = differs in ("dims", "initializers", "seeds")
        differs = _first_difference(differs, known[differs], own[differs], layers * of_layers)
    elif differs is not None:
        differs = f"its {differs}" if known else "not one of het_tf.serving"
    if differs is not None:
        raise ValueError(f"{path} holds another model: {differs}")


def _first_difference(name: str, known: Any, own: Any, layers: Sequence[str]) -> str:
    if not isinstance(own, list):
        return f"{name} = {known} there, {own} here"
    if len(known) != len(own):
        return f"{len(known)} {name} there, {len(own)} here"
    at = next(i for i, (one, other) in enumerate(zip(known, own, strict=True)) if one != other)
    which = f" of layer {layers[at]}" if layers else f"[{at}]"
    hint = "; give the layer a seed, or load the model that was saved" if name == "seeds" else ""
    return f"{name}{which} = {known[at]} there, {own[at]} here{hint}"
