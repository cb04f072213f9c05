"""Embedding tables that TensorFlow serves without het_tf: fixed rows and stock ops."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from het_tf import initializers
from het_tf.storage.served.row_selection import RowSelection
from het_tf.tables.pooling import Bags, pool_with_stock_ops
from het_tf.tables.table import EmbeddingTable, TableExport

_MASK_32 = (1 << 32) - 1


class FrozenTable(tf.Module):
    """A copy of a table's rows, for lookups with stock ops only.

    A key without a row has its initial value, as in the table. The value is equal for zeros,
    constant and uniform, and equal up to rounding for the normal distributions.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        directory: pathlib.Path,
        selection: RowSelection | None = None,
        *,
        in_memory: bool = True,
    ):
        """Copies the rows of `table` into files, in parts.

        Args:
          table: table to copy. Its caches must be flushed.
          directory: directory of the files. Saving the SavedModel copies the file of the keys. The
            files of the rows must exist as long as `columns` is in use.
          selection: rows to copy, and the dtype to store. None: all rows, as float32.
          in_memory: whether the variables contain the rows. If not, the variables are empty, and
            the caller replaces them by `columns` in the saved files.
        """
        super().__init__()
        self._dim = table.dim
        self._seed = table.row_attributes["seed"]
        self._distributions = initializers.parsed(table.row_attributes["initializer"])
        name = table.shared_name.replace("/", "_")
        paths = [directory / f"{what}_{name}" for what in ("keys.txt", "values", "scales")]
        rows = self._write(table, selection or RowSelection(), paths)
        # The keys are in a file, because a graph has at most 2 GB.
        self.index = tf.lookup.StaticHashTable(
            tf.lookup.TextFileInitializer(
                str(paths[0]), tf.int64, 0, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
            ),
            default_value=-1,
        )
        dtype = (selection or RowSelection()).stored_dtype
        # float16 is stored as int16, because TensorFlow cannot read slices of float16.
        kept = np.int16 if dtype == np.float16 else dtype
        values = np.memmap(paths[1], kept, "r", shape=(rows, self._dim))
        # Contents of the variables, by attribute.
        self._columns: dict[str, np.ndarray] = {"values": values}
        if dtype == np.int8:
            self._columns["scales"] = np.memmap(paths[2], np.float32, "r", shape=(rows,))
        for attribute, column in self._columns.items():
            value = column if in_memory else np.zeros((0, *column.shape[1:]), column.dtype)
            variable = tf.Variable(value, trainable=False, shape=[None, *column.shape[1:]])
            # The shape of the loaded variable. keras.layers.TFSMLayer needs it.
            variable.set_shape(column.shape)
            setattr(self, attribute, variable)

    def columns(self) -> dict[str, np.ndarray]:
        """Returns the contents of the variables by attribute, mapped from files."""
        return self._columns

    def _write(
        self, table: EmbeddingTable, selection: RowSelection, paths: list[pathlib.Path]
    ) -> int:
        """Writes the rows of a table into files. Returns their number."""
        count = 0
        with paths[0].open("w") as keys, paths[1].open("wb") as values, paths[2].open("wb") as of:

            def write(rows: TableExport) -> None:
                stored, scales = selection.store(rows)
                keys.write("".join(f"{key}\n" for key in rows.keys.tolist()))
                stored.tofile(values)
                scales.tofile(of)

            for part in table.export_parts(selection.most_age):
                selected = selection.select(part)
                write(selected)
                count += len(selected.keys)
            # TensorFlow supports no empty file or variable here. Writes the initial value of key 0.
            if not count:
                key = np.zeros([1], np.int64)
                value = self._initial_values(tf.constant(key)).numpy()
                write(TableExport(key, value, np.zeros((1, 0), np.float32), key))
                count = 1
        return count

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        """Reads rows.

        Args:
          ids: int64 of any shape.

        Returns:
          float32 [*ids.shape, dim].
        """
        flat = tf.reshape(ids, [-1])
        places = self.index.lookup(flat)
        known = tf.maximum(places, 0)
        rows = tf.gather(self.values, known)
        rows = tf.bitcast(rows, tf.half) if rows.dtype == tf.int16 else rows
        rows = tf.cast(rows, tf.float32)
        if "scales" in self._columns:
            rows *= tf.gather(self.scales, known)[:, tf.newaxis]
        unknown = tf.where(places < 0)
        initial = self._initial_values(tf.gather_nd(flat, unknown))
        rows = tf.tensor_scatter_nd_update(rows, unknown, initial)
        return tf.reshape(rows, tf.concat([tf.shape(ids), [self._dim]], 0))

    def pool(self, keys: tf.Tensor, features: Sequence[Bags]) -> list[tf.Tensor]:
        """Reads rows and pools them. Accepts the arguments of `HetEmbedding.outputs_of`.

        Returns:
          float32 [bags, dim], one per feature.
        """
        unique, places = tf.unique(keys, tf.int64)
        rows = self(unique)
        of_features = tf.split(places, [tf.size(bags.ids) for bags in features])
        return [
            pool_with_stock_ops(rows, of_feature, bags)
            for of_feature, bags in zip(of_features, features, strict=True)
        ]

    def _initial_values(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the initial values of keys, as ops/core/row/initializer.cc computes them.

        Args:
          keys: int64 [n].

        Returns:
          float32 [n, dim].
        """
        if len(self._distributions) == 1:
            return self._draw(keys, *self._distributions[0])
        firsts = tf.constant([first for first, _, _ in self._distributions[1:]], tf.int64)
        which = tf.searchsorted(firsts, keys, side="right")
        count = len(self._distributions)
        places = tf.dynamic_partition(tf.range(tf.size(keys)), which, count)
        parts = tf.dynamic_partition(keys, which, count)
        values = [self._draw(k, *d) for k, d in zip(parts, self._distributions, strict=True)]
        return tf.reshape(tf.dynamic_stitch(places, values), [tf.size(keys), self._dim])

    def _draw(
        self, keys: tf.Tensor, first: int, kind: str, parameters: dict[str, float]
    ) -> tf.Tensor:
        """Returns the initial values of keys that have the same distribution.

        Args:
          keys: int64 [n].
          first: first key of the distribution.
          kind: name of the distribution.
          parameters: parameters of the distribution.
        """
        if kind in ("zeros", "constant"):
            return tf.fill([tf.size(keys), self._dim], parameters.get("value", 0.0))
        if kind == "orthogonal":
            return self._orthogonal(keys - first, self._seed + first, parameters)
        words = _philox(keys, -(-self._dim // 4), self._seed)
        unit = tf.cast(words // 256, tf.float32) * 2**-24
        if kind == "uniform":
            low, high = np.float32(parameters["minval"]), parameters["maxval"]
            values = low + unit * np.float32(high - parameters["minval"])
        else:
            mean, stddev = np.float32(parameters["mean"]), np.float32(parameters["stddev"])
            if kind == "normal":
                radius = tf.sqrt(-2.0 * tf.math.log(unit[..., 0::2] + 2**-24))
                angle = np.float32(2 * np.pi) * unit[..., 1::2]
                pairs = [radius * tf.cos(angle), radius * tf.sin(angle)]
                normal = tf.reshape(tf.stack(pairs, -1), tf.shape(unit))
            else:
                tail = 0.022750131948179195  # P(x < -2)
                p = tail + (tf.cast(unit, tf.float64) + 2**-25) * (1 - 2 * tail)
                normal = tf.cast(tf.math.ndtri(p), tf.float32)
            values = mean + stddev * normal
        return tf.reshape(values, [tf.size(keys), -1])[:, : self._dim]

    def _orthogonal(self, keys: tf.Tensor, seed: int, parameters: dict[str, float]) -> tf.Tensor:
        rows = int(parameters["rows"])
        length = max(rows, self._dim)
        stride = max(1, int(length * 0.6180339887498949))
        while math.gcd(stride, length) != 1:
            stride += 1
        row = tf.math.floormod(keys, rows)[:, tf.newaxis]
        column = tf.range(self._dim, dtype=tf.int64)[tf.newaxis, :]
        place, function = (row, column) if rows >= self._dim else (column, row)
        frequency = (stride * function + seed % 2**64 % length) % length
        turned = tf.cast((2 * place + 1) * frequency % (4 * length), tf.float64)
        scale = tf.sqrt(tf.where(frequency == 0, tf.constant(1.0, tf.float64), 2.0) / length)
        values = scale * tf.cos(np.pi * turned / (2 * length)) * parameters["gain"]
        signs = [
            1 - 2 * tf.cast(_philox(which, 1, seed, what)[:, 0, 0] % 2, tf.float64)
            for which, what in ((row[:, 0], 1), (column[0], 2))
        ]
        return tf.cast(values * signs[0][:, tf.newaxis] * signs[1], tf.float32)


def _philox(keys: tf.Tensor, blocks: int, seed: int, what: int = 0) -> tf.Tensor:
    """Computes Philox 4x32-10 with stock ops.

    Args:
      keys: int64 [n]. They are the first two words of the counters.
      blocks: number of counters per key. Their index is the third word.
      seed: key of the generator.
      what: number of the stream. It is the fourth word.

    Returns:
      uint64 [n, blocks, 4], with 32 random bits each.
    """
    key = tf.bitcast(keys, tf.uint64)[:, tf.newaxis]
    mask = tf.constant(_MASK_32, tf.uint64)
    zero = tf.zeros([tf.size(keys), blocks], tf.uint64)
    counter = [
        tf.bitwise.bitwise_and(key, mask) + zero,
        tf.bitwise.right_shift(key, tf.constant(32, tf.uint64)) + zero,
        tf.range(blocks, dtype=tf.int64)[tf.newaxis, :],
        zero + tf.constant(what, tf.uint64),
    ]
    counter[2] = tf.cast(counter[2], tf.uint64) + zero
    round_keys = [seed & _MASK_32, (seed >> 32) & _MASK_32]
    for _ in range(10):
        products = [
            tf.constant(0xD2511F53, tf.uint64) * counter[0],
            tf.constant(0xCD9E8D57, tf.uint64) * counter[2],
        ]
        high = [tf.bitwise.right_shift(p, tf.constant(32, tf.uint64)) for p in products]
        low = [tf.bitwise.bitwise_and(p, mask) for p in products]
        first = [tf.constant(k, tf.uint64) for k in round_keys]
        counter = [
            tf.bitwise.bitwise_xor(tf.bitwise.bitwise_xor(high[1], counter[1]), first[0]),
            low[1],
            tf.bitwise.bitwise_xor(tf.bitwise.bitwise_xor(high[0], counter[3]), first[1]),
            low[0],
        ]
        round_keys = [
            (round_keys[0] + 0x9E3779B9) & _MASK_32,
            (round_keys[1] + 0xBB67AE85) & _MASK_32,
        ]
    return tf.stack(counter, -1)
