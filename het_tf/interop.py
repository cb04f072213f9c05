"""Rows from and for other programs: npz, Parquet, Keras's weights, the tables of TFRA.

    het_tf.interop.load(layer, het_tf.interop.Parquet("pretrained.parquet"))
    het_tf.interop.save(layer, het_tf.interop.Npz("rows.npz"))
    het_tf.interop.load(collection, het_tf.interop.Npz("users.npz"), table="users")

Values only: what goes on training later, with optimizer slots and clocks, belongs into a
checkpoint. Any object that has `read`, or `write`, as these have, is a format, too.
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
    """What rows are read from."""

    def read(self) -> Iterator[Rows]:
        """All rows, block by block. Called twice."""


class Writable(Protocol):
    """What rows are written to."""

    def write(self, blocks: Iterator[Rows], dim: int) -> None:
        """Writes all rows."""


def load(to: Any, source: Readable, *, table: str | None = None) -> int:
    """Sets rows of a table; all others stay as they are. Caches of the table drop what they hold.

    The rows are read twice, 64 MB at a time: once to check all of them, then to set them. What is
    set is as before its first update. Of a key that comes twice the last row counts.

    Args:
      to: a built `HetEmbedding`, whose caches are flushed first and whose `input_dim` bounds the
        keys, or an `EmbeddingTable`; or a built `HetEmbeddingCollection`.
      source: one of the formats here.
      table: name of a collection's table, whose ids are the keys.

    Returns:
      How many rows were read.

    Raises:
      ValueError: source is no format; keys are no int64 or out of bounds, values are not finite
        float32 or of another width, or a file is not what it should be. The message names the file
        and the value, and the table is as it was. Or a source has not as many rows the second time,
        which were set then.
      OSError: a file cannot be read.
      ImportError: what the format needs is not installed.
      tf.errors.OpError: a parameter server is down or out of memory. Rows of the blocks before are
        set then.
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
    """Writes the values of all rows of a table, in parts as of `EmbeddingTable.export_parts`.

    Args:
      of: a built `HetEmbedding`, whose caches are flushed first, or an `EmbeddingTable`; or a built
        `HetEmbeddingCollection`.
      target: one of the formats here.
      table: name of a collection's table, whose ids are the keys.

    Returns:
      How many rows were written.

    Raises:
      ValueError: target is no format, or of is none of these, or it has no such table.
      OSError: a file cannot be written.
      ImportError: what the format needs is not installed.
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
    """Where rows are.

    Attributes:
      table: that has them.
      bound: ids are less; None: they are any int64.
      first: key of id 0.
      shares: whether the table has rows of others.
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
    """Rows as a table takes them."""
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

    `Weights.of(layer, rows)` makes that array of a trained table.
    """

    def __init__(self, values: Any, keys: Any = None):
        """Names rows.

        Args:
          values: floats [rows, dim]; or a built `keras.layers.Embedding`.
          keys: integers [rows]; None: 0, 1, ...

        Raises:
          ValueError: values are something else, or of a layer that is not built.
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
        """The rows 0 .. rows - 1 of a table, those never trained with their initial values.

        Args:
          layer: as of `save`.
          rows: how many; the `input_dim` of a `keras.layers.Embedding` that takes them with
            `set_weights([...])`. Of a collection's table at most as many as it has.
          table: name of a collection's table.

        Returns:
          float32 [rows, dim].

        Raises:
          ValueError: rows is no such number, or layer is none of these, or it has no such table.
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
        """All rows, block by block."""
        if len(self._keys) != len(self._values):
            raise ValueError(f"weights: {len(self._keys)} keys of {len(self._values)} rows")
        block = rows_a_block(self._values[:1].nbytes)
        for first in range(0, len(self._keys), block):
            yield self._keys[first : first + block], self._values[first : first + block]
