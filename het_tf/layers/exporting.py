"""What a layer reads from while Keras exports its model."""

from __future__ import annotations

import functools
import pathlib
import tempfile
import weakref
from typing import Any

import keras
import tensorflow as tf

from het_tf import _callers
from het_tf.serving import FrozenTable

# The tables that archives hold, by archive and layer.
_tables: weakref.WeakKeyDictionary[Any, dict[int, FrozenTable]] = weakref.WeakKeyDictionary()


@functools.cache
def _archive_class() -> type:
    """What `keras.export.ExportArchive` makes: a class that Keras does not export."""
    return type(keras.export.ExportArchive())


def exported_table(layer: Any) -> FrozenTable | None:
    """A copy of the layer's table that a `keras.export.ExportArchive` saves, if one is made now.

    `keras.Model.export` makes one, too.

    Raises:
      ValueError: the model is exported in a way that would leave the table out.
    """
    if tf.executing_eagerly():  # exports are traced
        return None
    archive = _callers.caller(_archive_class())
    if archive is None:
        if _callers.is_called_by(tf.saved_model.save):
            raise ValueError(
                f"tf.saved_model.save would leave out the table of layer {layer.name}: use"
                " het_tf.export_saved_model(model, path) or model.export(path)"
            )
        return None
    tables = _tables.setdefault(archive, {})
    if id(layer) not in tables:
        with tf.init_scope(), tf.device("/device:CPU:0"):
            layer.flush()
            directory = tempfile.TemporaryDirectory()
            table = FrozenTable(layer.table, pathlib.Path(directory.name))
        # The file of keys must be there until the archive is written.
        weakref.finalize(table, directory.cleanup)
        tables[id(layer)] = table
        archive.track(table)
    return tables[id(layer)]
