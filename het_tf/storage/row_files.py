"""Row files for exchange with other programs: npz, Parquet, and tables of TFRA."""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from het_tf.runtime.validation import INT32_MAX, check_integer
from het_tf.storage.files import reading, replacing

# Size of a block of rows that is read and written at once.
_BLOCK_BYTES = 64 << 20
# Compressed bytes of a Parquet column that are read at once.
_READ_BYTES = 1 << 20

Rows = tuple[np.ndarray, np.ndarray]  # keys int64 [rows], values float32 [rows, dim]


def rows_a_block(row_bytes: int) -> int:
    """Returns the number of rows in a block, for rows of `row_bytes` bytes."""
    return max(1, _BLOCK_BYTES // max(1, row_bytes))


class _File:
    """Base class of the formats that consist of one file."""

    def __init__(self, path: str | os.PathLike[str]):
        """Stores the path of the file, on any file system that TensorFlow opens."""
        self.path = os.fspath(path)

    def __str__(self) -> str:
        return self.path


class Npz(_File):
    """A file as `numpy.savez(path, keys=..., values=...)` writes it.

    `keys` are integers [rows], and `values` are floats [rows, dim]. `write` buffers the rows in
    files in `tempfile.gettempdir()`.
    """

    def read(self) -> Iterator[Rows]:
        """Reads all rows, block by block."""
        with (
            _named(self.path),
            reading(self.path) as file,
            zipfile.ZipFile(file) as archive,
        ):
            for name in ("keys.npy", "values.npy"):
                if name not in archive.namelist():
                    raise ValueError(f"has no array {name.removesuffix('.npy')}")
            with archive.open("keys.npy") as keys, archive.open("values.npy") as values:
                shapes, dtypes = zip(*map(_npy_header, (keys, values)), strict=True)
                if len(shapes[0]) != 1 or len(shapes[1]) != 2 or shapes[0][0] != shapes[1][0]:
                    raise ValueError(f"has keys {list(shapes[0])} and values {list(shapes[1])}")
                block = rows_a_block(dtypes[1].itemsize * shapes[1][1])
                width = shapes[1][1]
                for first in range(0, shapes[0][0], block):
                    n = min(block, shapes[0][0] - first)
                    yield _array(keys, dtypes[0], (n,)), _array(values, dtypes[1], (n, width))

    def write(self, blocks: Iterator[Rows], dim: int) -> None:
        """Writes all rows."""
        with tempfile.TemporaryFile() as all_keys, tempfile.TemporaryFile() as all_values:
            count = 0
            for keys, values in blocks:
                all_keys.write(np.ascontiguousarray(keys).tobytes())
                all_values.write(np.ascontiguousarray(values).tobytes())
                count += len(keys)

            with (
                replacing(self.path) as (target,),
                zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive,
            ):
                for name, file, dtype, shape in (
                    ("keys", all_keys, "<i8", (count,)),
                    ("values", all_values, "<f4", (count, dim)),
                ):
                    file.seek(0)
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        header = {"descr": dtype, "fortran_order": False, "shape": shape}
                        np.lib.format.write_array_header_2_0(member, header)
                        while block := file.read(1 << 20):
                            member.write(block)


class Parquet(_File):
    """A Parquet file with a column of keys and a column of values.

    The keys are integers. The values are lists of floats, all of the table's width. `write` adds
    checksums, and `read` verifies the checksums that a file has. This class needs pyarrow
    (`pip install pyarrow`).
    """

    def __init__(self, path: str | os.PathLike[str], key: str = "key", values: str = "values"):
        """Stores the path and the names of the columns.

        Args:
          path: path of the file, on any file system that TensorFlow opens.
          key: name of the column of keys.
          values: name of the column of values.

        Raises:
          ValueError: `key` and `values` are not two different strings.
        """
        super().__init__(path)
        if not (isinstance(key, str) and isinstance(values, str)) or key == values:
            raise ValueError(f"key and values must be two names, not {key!r} and {values!r}")
        self._columns = [key, values]

    def read(self) -> Iterator[Rows]:
        """Reads all rows, block by block."""
        parquet = _pyarrow().parquet
        with (
            _named(self.path),
            reading(self.path) as opened,
            # Without `buffer_size`, pyarrow reads the column of a row group at once.
            parquet.ParquetFile(
                opened, pre_buffer=False, buffer_size=_READ_BYTES, page_checksum_verification=True
            ) as file,
        ):
            names = file.schema_arrow.names
            for name in self._columns:
                if names.count(name) != 1:
                    raise ValueError(f"has columns {names}, expected one {name}")
            for batch in file.iter_batches(batch_size=1 << 14, columns=self._columns):
                yield self._rows(*(batch.column(name) for name in self._columns))

    def _rows(self, keys: Any, lists: Any) -> Rows:
        for name, column in zip(self._columns, (keys, lists), strict=True):
            if column.null_count:
                raise ValueError(f"column {name} has {column.null_count} rows without a value")
        types = _pyarrow().types
        is_list = types.is_fixed_size_list(lists.type) or types.is_list(lists.type)
        if not (is_list or types.is_large_list(lists.type)):
            raise ValueError(f"column {self._columns[1]} is of {lists.type}, expected lists")
        flat = lists.flatten()
        if flat.null_count:
            raise ValueError(f"column {self._columns[1]} has {flat.null_count} missing numbers")
        values = flat.to_numpy(zero_copy_only=False)
        width = len(values) // max(1, len(keys))
        lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(lengths != width):
            raise ValueError(
                f"column {self._columns[1]} has lists of {lengths[0]} and of {lengths[row]} numbers"
                if lengths[row] != lengths[0]
                else f"column {self._columns[1]} has lists of unequal lengths"
            )
        return keys.to_numpy(zero_copy_only=False), values.reshape(len(keys), width)

    def write(self, blocks: Iterator[Rows], dim: int) -> None:
        """Writes all rows."""
        arrow = _pyarrow()
        types = [arrow.int64(), arrow.list_(arrow.float32(), dim)]
        schema = arrow.schema(zip(self._columns, types, strict=True))

        with (
            replacing(self.path) as (file,),
            arrow.parquet.ParquetWriter(file, schema, write_page_checksum=True) as writer,
        ):
            for keys, values in blocks:
                flat = arrow.array(np.ascontiguousarray(values).reshape(-1))
                lists = arrow.FixedSizeListArray.from_arrays(flat, dim)
                writer.write_table(arrow.table([arrow.array(keys), lists], schema=schema))


class Tfra:
    """A table that TensorFlow Recommenders Addons (TFRA) saved into a folder (`FileSystemSaver`).

    Every shard of every process has two files without a header: NAME_mht_1of2_rank0_size1-keys,
    int64 [rows], and NAME_mht_1of2_rank0_size1-values, float32 [rows, dim]. File names of older
    TFRA versions have no _rank0_size1. TFRA saves the slots of an optimizer as tables of other
    names. `write` writes one shard. TFRA loads this shard into a table on one device, or with
    load_entire_dir=True.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str, dim: int):
        """Stores the folder, name and width of a table.

        Args:
          folder: path of the folder, on any file system that TensorFlow opens.
          name: name of the table. File names have "_" in place of "/".
          dim: number of columns of a row. The files do not contain it.

        Raises:
          ValueError: `dim` is not a positive integer.
        """
        self._folder, self._dim = os.fspath(folder), check_integer("dim", dim, 1, INT32_MAX)
        self._name = name.replace("/", "_")  # as TFRA does

    def __str__(self) -> str:
        return f"{self._folder}/{self._name}"

    def read(self) -> Iterator[Rows]:
        """Reads all rows, block by block."""
        begin = re.compile(
            rf"{re.escape(self._name)}_mht_(\d+)of(\d+)(?:_rank(\d+)_size(\d+))?-keys"
        )
        try:
            files = tf.io.gfile.listdir(self._folder)
        except tf.errors.OpError as error:
            raise FileNotFoundError(f"{self._folder}: {error.message}") from error
        found = {file: match for file in sorted(files) if (match := begin.fullmatch(file))}
        if not found:
            raise FileNotFoundError(f"{self} has no files {self._name}_mht_*-keys")
        parts = [(int(m[1]) - 1, int(m[2]), int(m[3] or 0), int(m[4] or 1)) for m in found.values()]
        _, shards, _, ranks = parts[0]
        if sorted(parts) != [(i, shards, r, ranks) for i in range(shards) for r in range(ranks)]:
            raise ValueError(f"{self} has {sorted(found)}, expected one file of each shard")
        for file in found:
            yield from self._read_shard(f"{self._folder}/{file.removesuffix('-keys')}")

    def _read_shard(self, path: str) -> Iterator[Rows]:
        if not tf.io.gfile.exists(f"{path}-values"):
            raise FileNotFoundError(f"{path}-values is missing")
        sizes = [tf.io.gfile.stat(f"{path}-{what}").length for what in ("keys", "values")]
        rows = sizes[0] // 8
        if sizes != [8 * rows, 4 * self._dim * rows]:
            raise ValueError(
                f"{path}-keys has {sizes[0]} bytes and {path}-values {sizes[1]}: expected 8 and"
                f" {4 * self._dim} for each row of {self._dim} columns"
            )
        block = rows_a_block(4 * self._dim)
        with (
            tf.io.gfile.GFile(f"{path}-keys", "rb") as keys,
            tf.io.gfile.GFile(f"{path}-values", "rb") as values,
        ):
            for first in range(0, rows, block):
                n = min(block, rows - first)
                yield (
                    np.frombuffer(keys.read(8 * n), "<i8"),
                    np.frombuffer(values.read(4 * self._dim * n), "<f4").reshape(n, self._dim),
                )

    def write(self, blocks: Iterator[Rows], dim: int) -> None:
        """Writes all rows as one shard."""
        if dim != self._dim:
            raise ValueError(f"{self} is to have {self._dim} columns, the table has {dim}")
        tf.io.gfile.makedirs(self._folder)
        path = f"{self._folder}/{self._name}_mht_1of1_rank0_size1"
        with replacing(f"{path}-values", f"{path}-keys") as (all_values, all_keys):
            for keys, values in blocks:
                all_keys.write(np.ascontiguousarray(keys, "<i8").tobytes())
                all_values.write(np.ascontiguousarray(values, "<f4").tobytes())


class TfraCheckpoint:
    """A table that TensorFlow Recommenders Addons (TFRA) saved in a TensorFlow checkpoint.

    This class only reads. Every shard has two tensors, int64 [rows] and floats [rows, dim].
    `tf.train.Checkpoint` names them .../tables_of_NAME/0/.ATTRIBUTES/table-keys and -values.
    `tf.compat.v1.train.Saver` names them NAME_mht_1of2-keys and -values. TFRA saves the slots of an
    optimizer as tables of other names. TensorFlow reads a tensor as a whole, so reading needs
    memory for one shard.
    """

    _KEYS = re.compile(
        r"(?:.*/)?(?:tables_of_([^/]+)/(\d+)/\.ATTRIBUTES/table|([^/]+)_mht_(\d+)of(\d+))-keys"
    )

    def __init__(self, path: str | os.PathLike[str], name: str):
        """Stores the path of the checkpoint and the name of the table.

        Args:
          path: path of the checkpoint, as `tf.train.latest_checkpoint` returns it.
          name: name of the table, which is TFRA's `Variable`.
        """
        self._path, self._name = os.fspath(path), name

    def __str__(self) -> str:
        return f"{self._path}, table {self._name}"

    def read(self) -> Iterator[Rows]:
        """Reads all rows, block by block."""
        try:
            reader = tf.train.load_checkpoint(self._path)
        except (tf.errors.OpError, ValueError) as error:
            raise FileNotFoundError(f"{self._path}: {error}") from error
        shapes = reader.get_variable_to_shape_map()
        for shard in self._shards(shapes):
            keys, values = (shapes.get(f"{shard}-{what}") for what in ("keys", "values"))
            if values is None or len(keys) != 1 or len(values) != 2 or keys[0] != values[0]:
                raise ValueError(f"{self}: {shard}-keys is {keys} and {shard}-values {values}")
            try:
                keys, values = (reader.get_tensor(f"{shard}-{what}") for what in ("keys", "values"))
            except tf.errors.OpError as error:
                raise ValueError(f"{self}: {error.message}") from error
            block = rows_a_block(values.itemsize * values.shape[1])
            for first in range(0, len(keys), block):
                yield keys[first : first + block], values[first : first + block]

    def _shards(self, tensors: Iterable[str]) -> list[str]:
        """Returns the prefixes of the names of the table's tensors, one per shard."""
        escaped = self._name.replace(".", "..").replace("/", ".S")  # as tf.train.Checkpoint does
        flat = self._name.replace("/", "_")  # as TFRA does
        found, others = {}, set()
        for match in filter(None, map(self._KEYS.fullmatch, sorted(tensors))):
            of_object, _, of_saver, _, _ = match.groups()
            if of_object == escaped or of_saver == flat:
                found[match[0].removesuffix("-keys")] = match
            else:
                others.add(of_object or of_saver)
        if not found:
            raise ValueError(f"{self} is not there; tables are {sorted(others)}")
        matches = found.values()
        numbers = sorted(int(m[2]) if m[2] else int(m[4]) - 1 for m in matches)
        of = {len(found) if m[2] else int(m[5]) for m in matches}
        if numbers != list(range(len(found))) or of != {len(found)}:
            raise ValueError(f"{self}: shards are {list(found)}, expected each of one table")
        return list(found)


class _named:
    """Prepends the path to errors of reading. A damaged file can raise errors of any class."""

    def __init__(self, path: str):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, MemoryError):
            return
        if isinstance(error, OSError) and self._path in str(error):
            return  # The file cannot be read. pyarrow's errors about contents have no path.
        raise ValueError(f"{self._path}: {error or kind.__name__}") from error


def _npy_header(file: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Reads the header of an array. Returns shape and dtype."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"has an array of version {version}")
    if fortran and len(shape) > 1:
        raise ValueError("has an array in Fortran's order: save a copy by numpy.ascontiguousarray")
    if dtype.hasobject:
        raise ValueError(f"has an array of {dtype}")
    return shape, dtype


def _array(file: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    size = dtype.itemsize * int(np.prod(shape))
    content = file.read(size)
    if len(content) != size:
        raise ValueError(f"ends {size - len(content)} bytes too early")
    return np.frombuffer(content, dtype).reshape(shape)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
        import pyarrow.types
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install pyarrow") from error
    return pyarrow
