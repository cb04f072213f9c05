"""Rows of tables in Keras's weights files: inside the file, or in a folder with a pointer."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import json
import os
import re
import uuid
import zlib
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from het_tf.storage.checkpoints.shard_parts import (
    check_parts,
    new_snapshot,
    replace_rows,
    save_parts,
)
from het_tf.storage.checkpoints.table_schema import (
    check_description,
    describe,
    is_count,
    takes_clocks,
    takes_slots,
)
from het_tf.storage.files import reading
from het_tf.tables.table import EmbeddingTable, TableExport

_GROUP, _CHECKSUMS = "het_tf", "het_tf/vars/checksums"
_COLUMN = re.compile(r"(.*/)?(keys|values|slots|clocks)_\d+")

_announced: contextvars.ContextVar[bool] = contextvars.ContextVar("announced", default=False)


@contextlib.contextmanager
def with_checksums(path: str) -> Iterator[None]:
    """Adds checksums to a file that Keras writes in this context.

    Adds none after an error in the context.

    Args:
      path: path of the file, on a file system of the operating system.

    Raises:
      OSError: the checksums cannot be written.
    """
    token = _announced.set(True)
    try:
        yield
    finally:
        _announced.reset(token)
    with h5py.File(path, "r+") as file:
        add_checksums(file)


def are_announced() -> bool:
    """Whether this code runs inside `with_checksums`."""
    return _announced.get()


def add_checksums(file: h5py.File) -> None:
    """Writes the checksums of a file's datasets and replaces older checksums."""
    if _GROUP in file:
        del file[_GROUP]
    checksums = {name: [*_form(data), _crc32(data)] for name, data in _datasets(file).items()}
    file[_CHECKSUMS] = np.frombuffer(json.dumps(checksums).encode(), np.uint8)


def check_checksums(path: str) -> bool:
    """Verifies the checksums of a file, one dataset after the other.

    Args:
      path: path of the file, on any file system that TensorFlow opens.

    Returns:
      Whether the file has checksums. False if another program wrote the file, or if the file cannot
      be opened. In the second case Keras raises an error when it opens the file.

    Raises:
      ValueError: the file is damaged. The message names the dataset.
    """
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(reading(path)) if "://" in path else path
            file = stack.enter_context(h5py.File(opened, "r"))
        except OSError:
            return False
        try:
            return _check_datasets(file)
        # h5py raises errors of any class if a file is damaged.
        except Exception as error:
            raise ValueError(f"the weights file {path} is damaged: {error}") from error


def _check_datasets(file: h5py.File) -> bool:
    if _CHECKSUMS not in file:
        return False
    stored = file[_CHECKSUMS]
    if stored.nbytes > stored.id.get_storage_size():
        raise ValueError(f"{_CHECKSUMS} has {stored.nbytes} bytes")
    expected = json.loads(stored[...].tobytes())
    datasets = _datasets(file)
    for name in sorted(expected.keys() ^ datasets.keys()):
        raise ValueError(f"{name} is {'missing' if name in expected else 'not one of its parts'}")
    for name, dataset in datasets.items():
        *form, crc32 = expected[name]
        if form != _form(dataset):  # Checked first: a damaged shape could ask for too many bytes.
            raise ValueError(f"{name} is {_form(dataset)}, expected {form}")
        if crc32 != _crc32(dataset):
            raise ValueError(f"the checksum of {name} does not agree with it")
    return True


def _datasets(file: h5py.File) -> dict[str, h5py.Dataset]:
    """Returns the datasets that get checksums, by path. Rows have checksums in their table."""
    found: dict[str, h5py.Dataset] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name != _CHECKSUMS:
            is_of_rows = _COLUMN.fullmatch(name) and "table" in item.parent
            if not is_of_rows:
                found[name] = item

    file.visititems(visit)
    return found


def _form(dataset: h5py.Dataset) -> list[Any]:
    """Returns the form of a dataset: its dtype, the dtype that Keras notes, and its shape.

    Keras notes a dtype if HDF5 does not have this dtype.
    """
    return [dataset.dtype.str, str(dataset.attrs.get("dtype", "")), list(dataset.shape)]


def _crc32(dataset: h5py.Dataset) -> int:
    return zlib.crc32(np.ascontiguousarray(dataset[...]).reshape(-1).view(np.uint8).data)


_DTYPES = {"keys": np.int64, "values": np.float32, "slots": np.float32, "clocks": np.int64}
_MAX_CLOCK = 1 << 62  # ops/core/row/clock.h
# Name of the table in a bundle beside a weights file.
_NAME = "table"

_folder: contextvars.ContextVar[str | None] = contextvars.ContextVar("rows_in", default=None)
# Folders that this process has passed to `rows_in`. Servers open paths in these folders only,
# because a weights file from someone else could point anywhere.
_named: set[str] = set()


@dataclasses.dataclass(frozen=True)
class _Check:
    """State of a context in which `load_rows` verifies rows and replaces none.

    Attributes:
      has_checksums: whether the file has checksums of its datasets.
      wrong: collects the errors.
    """

    has_checksums: bool
    wrong: list[Exception] = dataclasses.field(default_factory=list)


_check: contextvars.ContextVar[_Check | None] = contextvars.ContextVar("check", default=None)


@contextlib.contextmanager
def rows_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Writes the rows of tables into a folder, instead of into Keras's files.

    In this context, `save`, `save_weights`, `ModelCheckpoint` and `BackupAndRestore` put a pointer
    to the rows into the file. Every shard writes its own rows into the folder, as in a
    `tf.train.Checkpoint`. Every save uses a new name, and nothing deletes the rows.

    Load such a file in this context, with the folder that has the rows now. No context is needed if
    the process has passed the folder of the pointer to `rows_in` before.

    Args:
      folder: folder for the rows. Parameter servers must reach it under the same path. It is
        created if it does not exist.
    """
    path = os.fspath(folder)
    path = path if "://" in path else os.path.abspath(path)
    _named.add(path)
    token = _folder.set(path)
    try:
        yield
    finally:
        _folder.reset(token)


@contextlib.contextmanager
def only_checked(has_checksums: bool) -> Iterator[list[Exception]]:
    """Makes `load_rows` verify rows and replace none. Returns the list of their errors.

    Args:
      has_checksums: result of `check_checksums` for the file.
    """
    check = _Check(has_checksums)
    token = _check.set(check)
    try:
        yield check.wrong
    finally:
        _check.reset(token)


def save_rows(store: Any, table: EmbeddingTable, name: str) -> None:
    """Writes all rows of a table, or a pointer to the rows, into a Keras weights file.

    Args:
      store: argument that Keras passes to `save_own_variables`.
      table: table whose caches were flushed.
      name: name of the layer.

    Raises:
      tf.errors.OpError: rows cannot be written into the folder. The folder then has no part of
        them.
    """
    folder = _folder.get()
    if folder is None:
        where: dict[str, Any] = {"rows": "inside", "parts": 0, "count": 0}
        checksums: dict[str, list[int]] = {column: [] for column in _DTYPES}
        for number, part in enumerate(table.export_parts()):
            for column, of_parts in checksums.items():
                array = getattr(part, column)
                store[f"{column}_{number}"] = array
                of_parts.append(zlib.crc32(array))
            where["parts"] += 1
            where["count"] += len(part.keys)
        where["crc32"] = checksums
    else:
        prefix = f"{folder}/{name.replace('/', '_')}-{uuid.uuid4().hex}"
        bundles = save_parts({_NAME: table}, prefix, {_NAME: new_snapshot()})
        with tf.device("/device:CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=bundles, destination_prefix=prefix, delete_old_dirs=True
            )
        where = {"rows": "beside", "prefix": prefix}
    if are_announced():
        where["checksums"] = True
    text = json.dumps(describe(table) | where)
    store["table"] = np.frombuffer(text.encode(), np.uint8)


def load_rows(store: Any, table: EmbeddingTable, name: str) -> None:
    """Replaces the rows of a table by the rows of a Keras weights file. Clears its caches.

    All rows are verified before the first row is replaced. Inside `only_checked`, no row is
    replaced.

    Args:
      store: argument that Keras passes to `load_own_variables`.
      table: table for the rows.
      name: name of the layer, for messages.

    Raises:
      ValueError: the file has no rows, rows of another width, or damaged rows. The table is
        unchanged.
      tf.errors.NotFoundError: rows in a folder are missing. The message has their path. The table
        is unchanged.
      tf.errors.OpError: rows in a folder are damaged, and the table is unchanged. Or a parameter
        server is down or out of memory.
    """
    check = _check.get()
    try:
        _load_rows(store, table, name, check)
    except Exception as error:
        if check is None:
            raise
        check.wrong.append(error)


def _load_rows(store: Any, table: EmbeddingTable, name: str, check: _Check | None) -> None:
    if "table" not in store:
        raise ValueError(
            f"the weights file has no rows for the table of layer {name}; those of a"
            " keras.layers.Embedding are set by layer.set_weights(embedding.get_weights())"
        )
    where = f"the weights file's table of layer {name}"
    config = _read_config(store, where)
    if check is not None and config.get("checksums") and not check.has_checksums:
        raise ValueError(f"{where} is damaged: the file was written with checksums, and has none")
    if config["rows"] == "beside":
        _restore_beside(config["prefix"], table, name, check is not None)
        return
    has_slots = takes_slots(config, table, where)
    has_clocks = takes_clocks(config, table, where)
    checked = _check_parts(store, config, where)
    if check is not None:
        return
    table.clear()
    for part in range(checked):
        rows = TableExport(*(np.asarray(store[f"{column}_{part}"]) for column in _DTYPES))
        if not has_slots:
            rows = dataclasses.replace(rows, slots=rows.slots[:, :0])
        if not has_clocks:
            rows = dataclasses.replace(rows, clocks=np.zeros_like(rows.clocks))
        table.import_(rows, initial_slots=not has_slots)
    table.note_restored()


def _restore_beside(prefix: str, table: EmbeddingTable, name: str, only_check: bool) -> None:
    folder, (written, _, own_name) = _folder.get(), prefix.rpartition("/")
    if folder is not None:
        prefix = f"{folder}/{own_name}"
    elif written not in _named:
        raise ValueError(
            f"the rows of layer {name} are not in the weights file, which says that they are in"
            f" {written!r}: if you trust the file, load it in `with"
            f" het_tf.checkpoint.rows_in({written!r}):`, or with the folder where they are now"
        )
    try:
        saved = check_parts({_NAME: table}, prefix)
        if not only_check:
            replace_rows({_NAME: table}, saved)
    except tf.errors.NotFoundError as error:
        raise tf.errors.NotFoundError(
            None,
            None,
            f"the weights file has no rows of layer {name}, but a pointer to {prefix}*, where"
            " they are not complete; with het_tf.checkpoint.rows_in(folder) they are looked"
            f" for in that folder ({error.message})",
        ) from error


def _read_config(store: Any, where: str) -> dict[str, Any]:
    """Reads the description of the rows from a file and checks that it is complete."""
    try:
        config = json.loads(np.asarray(store["table"], np.uint8).tobytes())
        check_description(config)
        if config.get("rows") not in ("inside", "beside"):
            raise ValueError(f"it says rows = {config.get('rows')!r}")
        if config["rows"] == "beside":
            if not isinstance(config.get("prefix"), str) or not config["prefix"]:
                raise ValueError(f"it says prefix = {config.get('prefix')!r}")
        elif not is_count(config.get("parts")):
            raise ValueError(f"it says parts = {config.get('parts')!r}")
        elif "crc32" in config or "count" in config:  # Older files have neither.
            _check_checksums(config)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: {error}") from error
    return config


def _check_checksums(config: dict[str, Any]) -> None:
    if not is_count(config.get("count")):
        raise ValueError(f"it says count = {config.get('count')!r}")
    of_columns = config.get("crc32")
    if not isinstance(of_columns, dict) or of_columns.keys() != _DTYPES.keys():
        raise ValueError(f"it says crc32 = {of_columns!r}")
    for column, checksums in of_columns.items():
        if not isinstance(checksums, list) or len(checksums) != config["parts"]:
            raise ValueError(
                f"it has not one checksum of {column} for each of {config['parts']} parts"
            )


def _check_parts(store: Any, config: dict[str, Any], where: str) -> int:
    """Reads all rows and checks them against their description.

    Returns:
      Number of parts.

    Raises:
      ValueError: a part is missing or damaged.
    """
    keys = []
    for part in range(config["parts"]):
        arrays = {}
        for column in _DTYPES:
            name = f"{column}_{part}"
            if name not in store:
                raise ValueError(
                    f"{where} is damaged: {name} of {config['parts']} parts is missing"
                )
            arrays[column] = np.asarray(store[name])
        try:
            _check_part(arrays, config, part)
        except ValueError as error:
            raise ValueError(f"{where} is damaged: part {part}: {error}") from error
        keys.append(arrays["keys"])
    if f"keys_{config['parts']}" in store:
        raise ValueError(f"{where} is damaged: it has more than {config['parts']} parts")
    count = sum(map(len, keys))
    if count != config.get("count", count):
        raise ValueError(
            f"{where} is damaged: it says count = {config['count']}, and has {count} rows"
        )
    if len(np.unique(np.concatenate([np.zeros(0, np.int64), *keys]))) != count:
        raise ValueError(f"{where} is damaged: it has a key twice")
    return config["parts"]


def _check_part(arrays: dict[str, np.ndarray], config: dict[str, Any], part: int) -> None:
    count = len(arrays["keys"]) if arrays["keys"].ndim else 0
    shapes = {
        "keys": (count,),
        "values": (count, config["dim"]),
        "slots": (count, config["slot_dim"]),
        "clocks": (count,),
    }
    for column, array in arrays.items():
        if array.dtype != _DTYPES[column] or array.shape != shapes[column]:
            expected = f"{np.dtype(_DTYPES[column])} {list(shapes[column])}"
            raise ValueError(f"{column} is {array.dtype} {list(array.shape)}, expected {expected}")
        if "crc32" in config and zlib.crc32(array.data) != config["crc32"][column][part]:
            raise ValueError(f"the checksum of {column} does not agree with it")
        if not np.isfinite(array).all():
            raise ValueError(f"{column} holds NaN or infinity")
    for clock in arrays["clocks"][(arrays["clocks"] < 0) | (arrays["clocks"] > _MAX_CLOCK)]:
        raise ValueError(f"clocks holds {clock}")
