"""Tables that layers read instead of their own while their model is exported."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import pathlib
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from het_tf.compat import call_stack
from het_tf.storage.served.frozen_table import FrozenTable
from het_tf.tables.pooling import Bags


class ServedTable(Protocol):
    """Rows of a table in a served model."""

    def pool(self, keys: tf.Tensor, features: Sequence[Bags]) -> list[tf.Tensor]:
        """Reads and pools rows. Accepts the arguments of `HetEmbedding.outputs_of`.

        Returns:
          float32 [bags, dim] per feature.
        """


# The tables in archives, by archive and `id` of the layer.
_tables: weakref.WeakKeyDictionary[Any, dict[int, FrozenTable]] = weakref.WeakKeyDictionary()


_FORMAT = "tf_saved_model"


def check_format(layer: Any, format: str) -> None:
    """Raises a ValueError if a format of `keras.Model.export` cannot contain a layer's table."""
    if format != _FORMAT:
        raise ValueError(
            f"the table of layer {layer.name} cannot be exported with format={format!r}:"
            f' export with format="{_FORMAT}", which stock TensorFlow serves'
        )


@functools.cache
def _archive_class() -> type:
    """Returns the private class of the objects that `keras.export.ExportArchive` creates."""
    return type(keras.export.ExportArchive())


def _exported_table(layer: Any) -> FrozenTable | None:
    """Returns the copy of the layer's table in the running `keras.export.ExportArchive`, or None.

    `keras.Model.export` also uses an archive.

    Raises:
      ValueError: this kind of export would omit the table.
    """
    if tf.executing_eagerly():  # Exports are traced.
        return None
    check_format(layer, call_stack.export_format() or _FORMAT)
    archive = call_stack.caller(_archive_class())
    if archive is None:
        if call_stack.is_called_by(tf.saved_model.save):
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
        # The key file must exist until the archive is written.
        weakref.finalize(table, directory.cleanup)
        tables[id(layer)] = table
        archive.track(table)
    return tables[id(layer)]


_served: contextvars.ContextVar[Mapping[int, ServedTable]] = contextvars.ContextVar(
    "het_tf_served_tables"
)


@contextlib.contextmanager
def lookups_from(tables: Mapping[Any, ServedTable]) -> Iterator[None]:
    """In this context, layers read served tables. tables: served table of every layer."""
    token = _served.set({id(layer): table for layer, table in tables.items()})
    try:
        yield
    finally:
        _served.reset(token)


def served_table(layer: Any) -> ServedTable | None:
    """Returns the table that `layer` reads instead of its own, or None.

    A result means that the model is being exported. The graph must not contain ops of het_tf.

    Raises:
      ValueError: this kind of export would omit the table.
    """
    return _served.get({}).get(id(layer)) or _exported_table(layer)
