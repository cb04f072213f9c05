"""Exchange of rows with other programs: npz, Parquet, Keras weights, tables of TFRA.

    het_tf.interop.load(layer, het_tf.interop.Parquet("pretrained.parquet"))
    het_tf.interop.save(layer, het_tf.interop.Npz("rows.npz"))
    het_tf.interop.load(collection, het_tf.interop.Npz("users.npz"), table="users")

These files contain values only. To continue a training later, use a checkpoint, which also has
optimizer slots and clocks. Any object with the methods `read` or `write` of these classes is a
format, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from het_tf.layers.collection import HetEmbeddingCollection
from het_tf.runtime.current_strategy import servers_named
from het_tf.runtime.validation import INT64_MAX, check_integer
from het_tf.storage.row_files import Npz, Parquet, Rows, Tfra, TfraCheckpoint, rows_a_block
from het_tf.tables.table import EmbeddingTable

__all__ = ["Npz", "Parquet", "Rows", "Tfra", "TfraCheckpoint", "Weights", "load", "save"]


class Readable(Protocol):
    """Source of rows."""

    def read(self) -> Iterator[Rows]:
        """Reads all rows, block by block. `load` calls it twice."""


class Writable(Protocol):
    """Target of rows."""

    def write(self, blocks: Iterator[Rows], dim: int) -> None:
        """Writes all rows."""


def load(to: Any, source: Readable, *, table: str | None = None) -> int:
    """Sets rows of a table and leaves its other rows unchanged. Clears the caches of the table.

    The source is read twice, in blocks of 64 MB: first to check all rows, then to set them. The
    slots and clocks of these rows get their initial values. If a key occurs several times, its last
    row counts.

    Args:
      to: target: a built `HetEmbedding`, an `EmbeddingTable` or a built `HetEmbeddingCollection`.
        The caches of a layer are flushed first. `input_dim` of a `HetEmbedding` bounds the keys.
      source: a format of this module.
      table: name of a table of a collection. The keys are ids of this table.

    Returns:
      Number of rows.

    Raises:
      ValueError: `source` is no format, keys are not int64 or out of bounds, values are not finite
        float32 or have another width, or a file is malformed. The message names the file and the
        value, and the table is unchanged. Or the source had another number of rows at the second
        read, which were set.
      OSError: a file cannot be read.
      ImportError: a package that the format needs is not installed.
      tf.errors.OpError: a parameter server is down or out of memory. The rows of earlier blocks
        have been set.
    """
    _check_format("source", source, "read")
    rows = _rows(to, table)
    dim, bound = rows.table.dim, rows.bound
    count = 0
    for block in source.read():
        count += len(_checked(source, block, dim, bound)[0])
    left = count
    for block in source.read():
        keys, values = _checked(source, block, dim, bound)
        rows.table.assign(keys + rows.first, values)
        left -= len(keys)
    if left != 0:
        raise ValueError(
            f"{source}: {count} rows were read first, and {count - left} the next time"
        )
    return count


@servers_named()
def save(of: Any, target: Writable, *, table: str | None = None) -> int:
    """Writes the values of all rows of a table, in the parts of `EmbeddingTable.export_parts`.

    Args:
      of: source: a built `HetEmbedding`, an `EmbeddingTable` or a built `HetEmbeddingCollection`.
        The caches of a layer are flushed first.
      target: a format of this module.
      table: name of a table of a collection. The keys are ids of this table.

    Returns:
      Number of rows.

    Raises:
      ValueError: `target` is no format, `of` is no such object, or the collection has no such
        table.
      OSError: a file cannot be written.
      ImportError: a package that the format needs is not installed.
      tf.errors.OpError: a parameter server is down.
    """
    _check_format("target", target, "write")
    rows = _rows(of, table)
    count = 0

    def blocks() -> Iterator[Rows]:
        nonlocal count
        for part in rows.table.export_parts():
            keys, values = part.keys, part.values
            if rows.shares:
                mine = (keys >= rows.first) & (keys - rows.first < rows.bound)
                keys, values = keys[mine] - rows.first, values[mine]
            count += len(keys)
            yield keys, values

    target.write(blocks(), rows.table.dim)
    return count


def _check_format(name: str, format: Any, method: str) -> None:
    if not callable(getattr(format, method, None)):
        raise ValueError(
            f"{name} must be a format, as het_tf.interop.Npz(path) or"
            f" het_tf.interop.Parquet(path) is, not {format!r}"
        )


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A range of keys of a table.

    Attributes:
      table: the table.
      bound: number of ids. None: ids are any int64.
      first: key of id 0.
      shares: whether the table has other rows, too.
    """

    table: EmbeddingTable
    bound: int | None = None
    first: int = 0
    shares: bool = False


def _rows(of: Any, name: str | None) -> _Rows:
    if isinstance(of, HetEmbeddingCollection):
        layer, keys = of.place_of(name)
        layer.flush()
        return _Rows(layer.table, len(keys), keys.start, shares=True)
    if name is not None:
        raise ValueError(f"table = {name!r} is for a HetEmbeddingCollection, not for {of!r}")
    if isinstance(of, EmbeddingTable):
        return _Rows(of)
    table = getattr(of, "table", None)
    if not isinstance(table, EmbeddingTable):
        raise ValueError(
            "rows are of a HetEmbedding or an EmbeddingTable, or of a table of a"
            f" HetEmbeddingCollection, not of {of!r}"
        )
    of.flush()
    return _Rows(table, of.input_dim)


def _checked(source: Any, rows: Rows, dim: int, bound: int | None) -> Rows:
    """Returns keys as int64 and values as float32 after checking them."""
    keys, values = np.asarray(rows[0]), np.asarray(rows[1])
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise ValueError(f"{source}: keys are {keys.dtype} {list(keys.shape)}, expected integers")
    is_float = values.dtype.kind == "f" or values.dtype == tf.bfloat16.as_numpy_dtype
    if values.shape != (len(keys), dim) or not is_float:
        raise ValueError(
            f"{source}: values are {values.dtype} {list(values.shape)}, expected floats"
            f" [{len(keys)}, {dim}]"
        )
    high = INT64_MAX if bound is None else bound - 1
    bad = (keys > high) if bound is None else (keys > high) | (keys < 0)
    if bad.any():
        low = -INT64_MAX - 1 if bound is None else 0
        raise ValueError(f"{source}: key {keys[bad][0]} is not in [{low}, {high}]")
    with np.errstate(over="ignore"):
        values = values.astype(np.float32, copy=False)
    bad = ~np.isfinite(values).all(axis=1)
    if bad.any():
        value = np.asarray(rows[1])[bad][0][~np.isfinite(values[bad][0])][0]
        raise ValueError(f"{source}: key {keys[bad][0]} has {value}, expected finite float32")
    return keys.astype(np.int64, copy=False), np.ascontiguousarray(values)


class Weights:
    """An array of rows in memory, such as the weights of a `keras.layers.Embedding`.

    `Weights.of(layer, rows)` returns such an array for a trained table.
    """

    def __init__(self, values: Any, keys: Any = None):
        """Stores the rows.

        Args:
          values: floats [rows, dim], or a built `keras.layers.Embedding`.
          keys: integers [rows]. None: 0, 1, ...

        Raises:
          ValueError: `values` is neither, or is a layer that is not built.
        """
        values = getattr(values, "embeddings", values)
        self._values = np.asarray(values)
        if self._values.ndim != 2:
            raise ValueError(
                "values must be floats [rows, dim] or a built keras.layers.Embedding, not"
                f" {values!r}"
            )
        self._keys = np.arange(len(self._values)) if keys is None else np.asarray(keys)

    def __str__(self) -> str:
        return "weights"

    @staticmethod
    def of(layer: Any, rows: int, *, table: str | None = None) -> np.ndarray:
        """Returns the rows 0 .. rows - 1 of a table. Untrained rows have their initial values.

        Args:
          layer: source of the rows, as `of` in `save`.
          rows: number of rows. For `set_weights([...])` of a `keras.layers.Embedding`, this is its
            `input_dim`. At most the number of ids for a table of a collection.
          table: name of a table of a collection.

        Returns:
          float32 [rows, dim].

        Raises:
          ValueError: `rows` is out of range, `layer` is no such object, or the collection has no
            such table.
        """
        stored = _rows(layer, table)
        most = stored.bound if stored.shares else INT64_MAX
        rows = check_integer("rows", rows, 0, most)
        block = rows_a_block(4 * stored.table.dim)
        values = np.empty((rows, stored.table.dim), np.float32)
        for first in range(0, rows, block):
            keys = stored.first + np.arange(first, min(rows, first + block))
            values[first : first + block] = stored.table.lookup(keys)
        return values

    def read(self) -> Iterator[Rows]:
        """Reads all rows, block by block."""
        if len(self._keys) != len(self._values):
            raise ValueError(f"weights: {len(self._keys)} keys of {len(self._values)} rows")
        block = rows_a_block(self._values[:1].nbytes)
        for first in range(0, len(self._keys), block):
            yield self._keys[first : first + block], self._values[first : first + block]
