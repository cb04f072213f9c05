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
from het_tf.export import flush_model, save_servable, servable_of, signature_of
from het_tf.layers.embedding import embeddings_of
from het_tf.pooling import Bags, pool_with_stock_ops
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
) -> Versions:
    """Writes a SavedModel and a version of its rows and variables, or that into one found there.

    After an error nothing of it is there, but the versions that were there before.

    Args:
      model: a built model.
      path: folder of the SavedModel.
      input_signature: as of `het_tf.export_saved_model`.
      selection: which rows are to be served, and as what.
      poll_seconds: how often whoever loads it looks for newer versions; 0: never.

    Returns:
      What writes the next versions.

    Raises:
      ValueError: as by `het_tf.export_saved_model`; or path is an URL; or another model was saved
        there.
      RuntimeError: another publisher began to write there meanwhile.
      tf.errors.OpError: a file cannot be written, or a parameter server is down.
    """
    path = os.fspath(path)
    if "://" in path:
        raise ValueError(
            f"rows are mapped from files of the operating system: {path!r} must be a folder of it"
        )
    specs = signature_of(model, input_signature)
    layers = embeddings_of(model)
    for layer in layers:
        selection.check_table(layer.table)
    tables = [layer.table for layer in layers]
    attributes = {
        "dims": [table.dim for table in tables],
        "initializers": [table.row_attributes["initializer"] for table in tables],
        "seeds": [table.row_attributes["seed"] for table in tables],
        "poll_seconds": poll_seconds,
    }
    variables = [[tf.as_dtype(v.dtype).name, tuple(v.shape)] for v in model.variables]
    description = json.dumps(attributes | {"variables": variables})

    def values() -> list[np.ndarray]:
        return [v.value.numpy() for v in model.variables]

    def first_version(folder: str) -> Versions:
        versions = Versions(f"{folder}/{VERSIONS}", tables, values, selection)
        try:
            flush_model(model)
            versions.begin()()
        except BaseException:
            versions.close()
            raise
        return versions

    if tf.io.gfile.exists(f"{path}/saved_model.pb"):
        asset = f"{path}/assets/{_ASSET}"
        known = tf.io.gfile.GFile(asset).read() if tf.io.gfile.exists(asset) else "no such model"
        if known != description:
            raise ValueError(f"{path} holds another model: {known}, and this is {description}")
        return first_version(path)
    with saving_model(path) as folder:
        _save_without_rows(model, tables, specs, attributes, description, folder)
        versions = first_version(folder)
        if tf.io.gfile.exists(f"{path}/saved_model.pb"):
            versions.close()
            raise SupersededError(f"{path}: another publisher wrote a SavedModel there meanwhile")
    versions.folder = f"{path}/{VERSIONS}"
    return versions


def _save_without_rows(
    model: keras.Model,
    tables: Sequence[EmbeddingTable],
    specs: list[Any],
    attributes: dict[str, Any],
    description: str,
    path: str,
) -> None:
    dtypes = [tf.as_dtype(v.dtype) for v in model.variables]
    shapes = [tuple(v.shape) for v in model.variables]
    with tempfile.TemporaryDirectory() as directory, tf.device("/device:CPU:0"):
        asset = f"{directory}/{_ASSET}"
        with open(asset, "w") as file:
            file.write(description)
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
        save_servable(servable, model, specs, read, path, {"freshness": freshness})
