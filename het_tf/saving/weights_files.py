"""The rows of a table in Keras's weights files: in the file, or beside it with a pointer there."""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from het_tf.saving.parts import describe, restore_parts, save_parts, takes_slots
from het_tf.table import EmbeddingTable, TableExport

_COLUMNS = ("keys", "values", "slots", "clocks")
# What the table is called in a bundle beside a weights file.
_NAME = "table"

_folder: contextvars.ContextVar[str | None] = contextvars.ContextVar("rows_in", default=None)

# Where rows are only looked at: takes what is wrong with them.
_wrong: contextvars.ContextVar[list[Exception] | None] = contextvars.ContextVar(
    "wrong", default=None
)


@contextlib.contextmanager
def rows_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps the rows of tables out of Keras's files that are written in this context.

    `save`, `save_weights`, `ModelCheckpoint` and `BackupAndRestore` then put a pointer into the
    file. Every shard writes its own rows into the folder, as into a `tf.train.Checkpoint`, under a
    new name each time; nothing deletes them. Files with a pointer are loaded without this context
    as long as the folder is where it was, and with it where it is now.

    Args:
      folder: for the rows; parameter servers must reach it under the same path. It is made if it is
        not there.
    """
    path = os.fspath(folder)
    token = _folder.set(path if "://" in path else os.path.abspath(path))
    try:
        yield
    finally:
        _folder.reset(token)


@contextlib.contextmanager
def only_checked() -> Iterator[list[Exception]]:
    """Has `load_rows` check rows and replace none. Gives a list, for what is wrong with them."""
    wrong: list[Exception] = []
    token = _wrong.set(wrong)
    try:
        yield wrong
    finally:
        _wrong.reset(token)


def save_rows(store: Any, table: EmbeddingTable, name: str) -> None:
    """Puts all rows of a table, or a pointer to them, into a Keras weights file.

    Args:
      store: what Keras hands to `save_own_variables`.
      table: whose caches were flushed.
      name: of the layer.

    Raises:
      tf.errors.OpError: rows cannot be written beside the file; then none are there.
    """
    folder = _folder.get()
    if folder is None:
        parts = 0
        for parts, part in enumerate(table.export_parts(), start=1):
            for column in _COLUMNS:
                store[f"{column}_{parts - 1}"] = getattr(part, column)
        where = {"rows": "inside", "parts": parts}
    else:
        prefix = f"{folder}/{name.replace('/', '_')}-{uuid.uuid4().hex}"
        bundles = save_parts({_NAME: table}, prefix)
        with tf.device("/device:CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=bundles, destination_prefix=prefix, delete_old_dirs=True
            )
        where = {"rows": "beside", "prefix": prefix}
    text = json.dumps(describe(table) | where)
    store["table"] = np.frombuffer(text.encode(), np.uint8)


def load_rows(store: Any, table: EmbeddingTable, name: str) -> None:
    """Replaces the rows of a table with those of a Keras weights file. Caches drop what they hold.

    The rows are checked before the first one is replaced; in `only_checked` that is all.

    Args:
      store: what Keras hands to `load_own_variables`.
      table: to have the rows.
      name: of the layer, for messages.

    Raises:
      ValueError: the file has no rows, rows of another width, or damaged ones. The table is as it
        was.
      tf.errors.NotFoundError: rows beside the file are not there; the message says where they
        should be. The table is as it was.
      tf.errors.OpError: rows beside the file are damaged, and the table is as it was; or a
        parameter server is down or out of memory.
    """
    wrong = _wrong.get()
    try:
        _load_rows(store, table, name, only_check=wrong is not None)
    except Exception as error:
        if wrong is None:
            raise
        wrong.append(error)


def _load_rows(store: Any, table: EmbeddingTable, name: str, only_check: bool) -> None:
    if "table" not in store:
        raise ValueError(f"the weights file has no rows for the table of layer {name}")
    config = json.loads(np.asarray(store["table"], np.uint8).tobytes())
    if config["rows"] == "beside":
        prefix, folder = config["prefix"], _folder.get()
        if folder is not None:
            prefix = f"{folder}/{prefix.rsplit('/', 1)[-1]}"
        try:
            restore_parts({_NAME: table}, prefix, only_check=only_check)
        except tf.errors.NotFoundError as error:
            raise tf.errors.NotFoundError(
                None,
                None,
                f"the weights file has no rows of layer {name}, but a pointer to {prefix}*, where"
                " they are not complete; with het_tf.checkpoint.rows_in(folder) they are looked"
                f" for in that folder ({error.message})",
            ) from error
        return
    has_slots = takes_slots(config, table, f"the weights file's table of layer {name}")

    def parts() -> Iterator[TableExport]:
        for part in range(config["parts"]):
            rows = TableExport(*(np.asarray(store[f"{column}_{part}"]) for column in _COLUMNS))
            yield (
                rows
                if has_slots
                else TableExport(rows.keys, rows.values, rows.slots[:, :0], rows.clocks)
            )

    slot_dim = table.slot_dim if has_slots else 0
    for number, rows in enumerate(parts()):
        _check(rows, table.dim, slot_dim, f"part {number} of the table of layer {name}")
    if only_check:
        return
    table.clear()
    for rows in parts():
        table.import_(rows, initial_slots=not has_slots)


def _check(rows: TableExport, dim: int, slot_dim: int, what: str) -> None:
    count = len(rows.keys)
    expected = {
        "keys": (count,),
        "values": (count, dim),
        "slots": (count, slot_dim),
        "clocks": (count,),
    }
    for column, shape in expected.items():
        array = getattr(rows, column)
        if array.shape != shape:
            raise ValueError(f"{what}: {column} has shape {array.shape}, expected {shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"{what}: {column} holds NaN or infinity")
    if (rows.clocks < 0).any():
        raise ValueError(f"{what}: clocks holds {rows.clocks.min()}")
