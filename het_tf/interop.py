"""Rows from and for other programs: npz, Parquet, Keras's weights, the tables of TFRA.

    het_tf.interop.load(layer, het_tf.interop.Parquet("pretrained.parquet"))
    het_tf.interop.save(layer, het_tf.interop.Npz("rows.npz"))

Values only: what goes on training later, with optimizer slots and clocks, belongs into a
checkpoint. Any object that has `read`, or `write`, as these have, is a format, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from het_tf._arguments import INT64_MAX, check_integer
from het_tf._strategy import servers_named
from het_tf.saving.row_files import Npz, Parquet, Rows, Tfra, TfraCheckpoint, rows_a_block
from het_tf.table import EmbeddingTable

__all__ = ["Npz", "Parquet", "Rows", "Tfra", "TfraCheckpoint", "Weights", "load", "save"]


class Readable(Protocol):
    """What rows are read from."""

    def read(self) -> Iterator[Rows]:
        """All rows, block by block. Called twice."""


class Writable(Protocol):
    """What rows are written to."""

    def write(self, blocks: Iterator[Rows], dim: int) -> None:
        """Writes all rows."""


def load(to: Any, source: Readable) -> int:
    """Sets rows of a table; all others stay as they are. Caches of the table drop what they hold.

    The rows are read twice, 64 MB at a time: once to check all of them, then to set them. What is
    set is as before its first update. Of a key that comes twice the last row counts.

    Args:
      to: a built `HetEmbedding`, whose caches are flushed first and whose `input_dim` bounds the
        keys, or an `EmbeddingTable`.
      source: one of the formats here.

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
    table, bound = _table(to)
    count = 0
    for block in source.read():
        count += len(_checked(source, block, table.dim, bound)[0])
    left = count
    for block in source.read():
        keys, values = _checked(source, block, table.dim, bound)
        table.assign(keys, values)
        left -= len(keys)
    if left != 0:
        raise ValueError(
            f"{source}: {count} rows were read first, and {count - left} the next time"
        )
    return count


@servers_named()
def save(of: Any, target: Writable) -> int:
    """Writes the values of all rows of a table, in parts as of `EmbeddingTable.export_parts`.

    Args:
      of: a built `HetEmbedding`, whose caches are flushed first, or an `EmbeddingTable`.
      target: one of the formats here.

    Returns:
      How many rows were written.

    Raises:
      ValueError: target is no format, or of is neither.
      OSError: a file cannot be written.
      ImportError: what the format needs is not installed.
      tf.errors.OpError: a parameter server is down.
    """
    _check_format("target", target, "write")
    table, _ = _table(of)
    count = 0

    def blocks() -> Iterator[Rows]:
        nonlocal count
        for part in table.export_parts():
            count += len(part.keys)
            yield part.keys, part.values

    target.write(blocks(), table.dim)
    return count


def _check_format(name: str, format: Any, method: str) -> None:
    if not callable(getattr(format, method, None)):
        raise ValueError(
            f"{name} must be a format, as het_tf.interop.Npz(path) or"
            f" het_tf.interop.Parquet(path) is, not {format!r}"
        )


def _table(layer: Any) -> tuple[EmbeddingTable, int | None]:
    if isinstance(layer, EmbeddingTable):
        return layer, None
    table = getattr(layer, "table", None)
    if not isinstance(table, EmbeddingTable):
        raise ValueError(f"rows are of a HetEmbedding or an EmbeddingTable, not of {layer!r}")
    layer.flush()
    return table, layer.input_dim


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
    def of(layer: Any, rows: int) -> np.ndarray:
        """The rows 0 .. rows - 1 of a table, those never trained with their initial values.

        Args:
          layer: a built `HetEmbedding`, whose caches are flushed first, or an `EmbeddingTable`.
          rows: how many; the `input_dim` of a `keras.layers.Embedding` that takes them with
            `set_weights([...])`.

        Returns:
          float32 [rows, dim].

        Raises:
          ValueError: rows is no such number, or layer is neither.
        """
        rows = check_integer("rows", rows, 0, INT64_MAX)
        table, _ = _table(layer)
        block = rows_a_block(4 * table.dim)
        values = np.empty((rows, table.dim), np.float32)
        for first in range(0, rows, block):
            values[first : first + block] = table.lookup(np.arange(first, min(rows, first + block)))
        return values

    def read(self) -> Iterator[Rows]:
        """All rows, block by block."""
        if len(self._keys) != len(self._values):
            raise ValueError(f"weights: {len(self._keys)} keys of {len(self._values)} rows")
        block = rows_a_block(self._values[:1].nbytes)
        for first in range(0, len(self._keys), block):
            yield self._keys[first : first + block], self._values[first : first + block]
