"""Tables and workers in `tf.train.Checkpoint`, and where tables' rows are for Keras's files."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

# There is no public way for an object to write its part of a checkpoint by itself.
from tensorflow.python.saved_model import registration

from het_tf.saving import parts
from het_tf.saving.descriptions import check_shape, shape_of
from het_tf.saving.manager import Manager
from het_tf.saving.weights_files import rows_in
from het_tf.table import EmbeddingTable

__all__ = ["FlushedFirst", "Manager", "TableState", "rows_in"]

_PACKAGE, _NAME = "het_tf", "Table"

# By path of a checkpoint, what removes the folders that are left of it if it was not completed.
_leftovers: dict[str, weakref.finalize] = {}


class _Shape(tf.train.experimental.PythonState):
    """Has a restore fail before it changes anything, if rows of another width are to come.

    TensorFlow restores the states of Python first, then variables, and then rows.
    """

    def __init__(self, table: EmbeddingTable):
        self._table = table

    def serialize(self) -> str:
        return json.dumps(shape_of(self._table))

    def deserialize(self, string_value: bytes) -> None:
        where = f"the checkpoint's table for {self._table.shared_name.rpartition('/')[0]}"
        check_shape(json.loads(string_value), self._table, where)


class TableState(tf.Module):
    """The rows of a table as a part of a checkpoint.

    Every shard writes its own rows into the checkpoint, and reads them from it.
    """

    def __init__(self, table: EmbeddingTable, flush: Callable[[], None]):
        """Ties a table to checkpoints.

        Args:
          table: its rows are saved and replaced.
          flush: sends what caches hold back; called before the rows are saved.
        """
        super().__init__()
        self.table = table
        self.flush = flush
        self.shape = _Shape(table)

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """What TensorFlow calls first where a checkpoint is to be written in a thread of its own.

        It copies the variables before, and has the rows written when they have changed.

        Raises:
          ValueError: always.
        """
        raise ValueError(
            "tf.train.CheckpointOptions(enable_async=True) would write rows of a later moment than"
            " variables: het_tf.checkpoint.Manager writes while training goes on"
        )


class FlushedFirst(tf.Module):
    """Has variables brought up to date before a checkpoint is written whose part it is.

    Nothing of itself is in the checkpoint.
    """

    def __init__(self, flush: Callable[[], None]):
        """flush: called before anything is written."""
        super().__init__()
        self.flush = flush


def _flush(trackables: Mapping[str, FlushedFirst], file_prefix: tf.Tensor) -> None:
    del file_prefix
    with tf.init_scope():
        for each in trackables.values():
            each.flush()


def _save(trackables: Mapping[str, TableState], file_prefix: tf.Tensor) -> list[tf.Tensor]:
    with tf.init_scope():
        path = _path(file_prefix)
        if path in _leftovers:
            _leftovers[path]()
        for done in [each for each, leftover in _leftovers.items() if not leftover.alive]:
            del _leftovers[done]
        for state in trackables.values():
            state.flush()
        prefixes = parts.save_parts(_tables(trackables), path)
    # TensorFlow writes the variables next. It leaves its folder, and this one, when it cannot; the
    # tensor with the path is there for as long as it writes.
    folders = [f"{path}_temp", f"{path.removesuffix(f'-{_PACKAGE}.{_NAME}')}_temp"]
    _leftovers[path] = weakref.finalize(file_prefix, parts.remove, folders)
    return [tf.constant(prefix) for prefix in prefixes]


def _restore(trackables: Mapping[str, TableState], merged_prefix: tf.Tensor) -> None:
    with tf.init_scope():
        parts.restore_parts(_tables(trackables), _path(merged_prefix))


def _tables(trackables: Mapping[str, TableState]) -> dict[str, EmbeddingTable]:
    return {name: state.table for name, state in trackables.items()}


def _path(prefix: Any) -> str:
    if tf.is_symbolic_tensor(prefix):
        raise ValueError(
            "tables are saved and restored eagerly: call tf.train.Checkpoint outside of tf.function"
        )
    return prefix.numpy().decode()


registration.register_checkpoint_saver(
    package=_PACKAGE,
    name=_NAME,
    predicate=lambda trackable: isinstance(trackable, TableState),
    save_fn=_save,
    restore_fn=_restore,
)

registration.register_checkpoint_saver(
    package=_PACKAGE,
    name="FlushedFirst",
    predicate=lambda trackable: isinstance(trackable, FlushedFirst),
    save_fn=_flush,
    restore_fn=lambda trackables, merged_prefix: None,
)
