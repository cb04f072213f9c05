"""Tables as parts of a `tf.train.Checkpoint`, and flushes of workers before it is written."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from het_tf.compat.tensorflow_internals import CheckpointHooks, register_checkpoint_saver
from het_tf.runtime.current_strategy import current_strategy
from het_tf.storage.checkpoints import shard_parts
from het_tf.storage.checkpoints.increments import find_table, is_of_part
from het_tf.storage.checkpoints.table_schema import check_shape, shape_of
from het_tf.storage.files import check_tensors
from het_tf.tables.table import EmbeddingTable

_PACKAGE, _NAME = "het_tf", "Table"

# TensorFlow's number of the last restore whose variables were checked.
_checked = -1

# Finalizers that remove the folders of incomplete checkpoints, by path of the checkpoint.
_leftovers: dict[str, weakref.finalize[..., Any]] = {}


class _Shape(tf.train.experimental.PythonState):
    """Verification of the rows before a restore changes anything.

    TensorFlow restores Python states such as this object first, then variables, and then rows.

    Attributes:
      snapshot: random name of the last save, in all of its parts.
      path: path of the checkpoint that is being restored.
      saved: verified rows of this checkpoint. None: the rows were not verified.
    """

    def __init__(self, table: EmbeddingTable):
        self._table = table
        self.snapshot = shard_parts.new_snapshot()
        self.path = ""
        self.saved: shard_parts.Saved | None = None

    def serialize(self) -> str:
        self.snapshot = shard_parts.new_snapshot()
        return json.dumps({**shape_of(self._table), "snapshot": self.snapshot})

    def deserialize(self, string_value: bytes) -> None:
        where = f"the checkpoint's table for {self._table.shared_name.rpartition('/')[0]}"
        try:
            said = dict(json.loads(string_value))
        except (ValueError, TypeError, RecursionError) as error:
            message = f"{where} is damaged: {string_value!r}"
            raise tf.errors.DataLossError(None, None, message) from error
        check_shape(said, self._table, where)
        if "snapshot" in said:  # Older checkpoints do not have it.
            name = find_table(self.path, said["snapshot"])
            self.saved = shard_parts.check_parts({name: self._table}, self.path)[name]


class TableState(CheckpointHooks, tf.Module):
    """The rows of a table as a part of a checkpoint.

    Every shard writes its own rows into the checkpoint, and reads its own rows from it.
    """

    def __init__(self, table: EmbeddingTable, flush: Callable[[], None]):
        """Connects a table to checkpoints.

        Args:
          table: table whose rows are saved and restored.
          flush: pushes the pending updates of caches. It is called before rows are saved.
        """
        super().__init__()
        self.table = table
        self.flush = flush
        self.shape = _Shape(table)

    def before_checkpoint_restore(self, path: str) -> None:
        """Prepares a restore."""
        _wait_until_reached()
        _check_variables(path, self._update_uid)
        self.shape.path, self.shape.saved = path, None

    def before_checkpoint_copy(self) -> None:
        """Rejects asynchronous checkpoints.

        TensorFlow would copy the variables first and write the rows later, after more updates.

        Raises:
          ValueError: always.
        """
        raise ValueError(
            "tf.train.CheckpointOptions(enable_async=True) would write rows of a later moment than"
            " variables: het_tf.checkpoint.Manager writes while training goes on"
        )


class FlushedFirst(tf.Module):
    """Part of a checkpoint that only calls a function before the checkpoint is written.

    The function updates variables, such as those that workers hold copies of. The checkpoint
    contains no data of this object.
    """

    def __init__(self, flush: Callable[[], None]):
        """Stores `flush`, which is called before anything is written."""
        super().__init__()
        self.flush = flush


def _check_variables(path: str, restore: int) -> None:
    """Verifies all tensors of a checkpoint except rows, once per restore.

    Args:
      path: path of the checkpoint.
      restore: TensorFlow's number of the restore.

    Raises:
      tf.errors.OpError: a tensor is damaged or missing.
    """
    global _checked
    if restore != _checked:
        check_tensors(path, lambda name: not is_of_part(name))
        _checked = restore


def _flush(trackables: Mapping[str, FlushedFirst], file_prefix: tf.Tensor) -> None:
    del file_prefix
    with tf.init_scope():
        _wait_until_reached()
        for trackable in trackables.values():
            trackable.flush()


def _save(trackables: Mapping[str, TableState], file_prefix: tf.Tensor) -> list[tf.Tensor]:
    with tf.init_scope():
        _wait_until_reached()
        path = _path(file_prefix)
        if path in _leftovers:
            _leftovers[path]()
        for done in [key for key, leftover in _leftovers.items() if not leftover.alive]:
            del _leftovers[done]
        for state in trackables.values():
            state.flush()
        snapshots = {name: state.shape.snapshot for name, state in trackables.items()}
        prefixes = shard_parts.save_parts(_tables(trackables), path, snapshots)
    # TensorFlow writes the variables next. If this fails, its folder and the folder of the rows are
    # left behind. The tensor `file_prefix` exists as long as TensorFlow writes.
    folders = [f"{path}_temp", f"{path.removesuffix(f'-{_PACKAGE}.{_NAME}')}_temp"]
    _leftovers[path] = weakref.finalize(file_prefix, shard_parts.remove, folders)
    return [tf.constant(prefix) for prefix in prefixes]


def _restore(trackables: Mapping[str, TableState], merged_prefix: tf.Tensor) -> None:
    with tf.init_scope():
        path = _path(merged_prefix)
        found = {name: state.shape.saved for name, state in trackables.items()}
        saved = {name: each for name, each in found.items() if each is not None}
        unchecked = {name: state.table for name, state in trackables.items() if name not in saved}
        shard_parts.replace_rows(
            _tables(trackables), {**saved, **shard_parts.check_parts(unchecked, path)}
        )


def _tables(trackables: Mapping[str, TableState]) -> dict[str, EmbeddingTable]:
    return {name: state.table for name, state in trackables.items()}


def _wait_until_reached() -> None:
    if (strategy := current_strategy()) is not None:
        strategy.wait_until_reached()


def _path(prefix: Any) -> str:
    if tf.is_symbolic_tensor(prefix):
        from het_tf.compat import call_stack

        if call_stack.is_called_by(tf.saved_model.save):
            raise ValueError(
                "tf.saved_model.save would leave out the rows of tables: use"
                " het_tf.export_saved_model(model, path) or model.export(path) of the model"
            )
        raise ValueError(
            "tables are saved and restored eagerly: call tf.train.Checkpoint outside of tf.function"
        )
    return prefix.numpy().decode()


register_checkpoint_saver(_NAME, TableState, _save, _restore)
register_checkpoint_saver(
    "FlushedFirst", FlushedFirst, _flush, lambda trackables, merged_prefix: None
)
