"""Published versions of a model. Every parameter server writes the rows of its shards.

A version has these files:

- a manifest, VERSION.PUBLISHER.whole or .delta (ops/core/serving/manifest.h),
- a row file for every shard of every table (ops/core/serving/rows_file.h), with all rows or with
  the rows that changed since the previous version,
- a tensor bundle with the variables.

All names contain the publisher's id, so two publishers never write the same file.
"""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf.storage.checkpoints.increments import Chain
from het_tf.storage.checkpoints.snapshots import Cut
from het_tf.storage.served.row_selection import RowSelection
from het_tf.tables.table import EmbeddingTable

_MANIFEST = re.compile(r"(\d{12})\.([0-9a-f]{16})\.(whole|delta)")
_FOOTER = struct.Struct("<8s6I2Q2I")
_BLOCK = 1 << 20


def verify_versions(folder: str) -> int:
    """Reads all files of the versions in a folder and verifies their checksums.

    Args:
      folder: folder of the versions. A publisher may write into it at the same time.

    Returns:
      Number of row files.

    Raises:
      ValueError: there is no whole version, or a file is missing or damaged. The message names the
        file.
    """
    if not tf.io.gfile.isdir(folder):
        raise ValueError(f"{folder} is no folder")
    names = sorted(filter(_MANIFEST.fullmatch, tf.io.gfile.listdir(folder)))
    if not any(name.endswith(".whole") for name in names):
        raise ValueError(f"{folder}: there is no whole version")
    rows: set[str] = set()
    for name in names:
        try:
            rows.update(_verify_version(folder, name))
        except ValueError:
            # The publisher may have removed the version in the meantime.
            if tf.io.gfile.exists(f"{folder}/{name}"):
                raise
    return len(rows)


def _verify_version(folder: str, name: str) -> list[str]:
    """Verifies the files that a manifest names. Returns the names of the row files."""
    others, rows = _read_manifest(f"{folder}/{name}", name)
    for file in rows:
        path = f"{folder}/{file}"
        try:
            _verify_rows(path)
        except tf.errors.OpError as error:
            raise ValueError(f"{path} cannot be read: {error.message}") from error
    path = f"{folder}/{others}"
    try:
        reader = tf.compat.v1.train.NewCheckpointReader(path)
        for tensor in reader.get_variable_to_shape_map():
            reader.get_tensor(tensor)
    # The reader's errors have no common class.
    except Exception as error:
        raise ValueError(f"{path} is missing or damaged: {error}") from error
    return rows


def _read_manifest(path: str, name: str) -> tuple[str, list[str]]:
    """Reads a manifest (ops/core/serving/manifest.h). Returns names: variables, and row files."""
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            content = file.read()
    except tf.errors.OpError as error:
        raise ValueError(f"{path} cannot be read: {error.message}") from error
    text, _, checksum = content.rpartition(b"crc32 ")
    if checksum != b"%08x\n" % zlib.crc32(text):
        raise ValueError(f"{path} is damaged, or its end is missing")
    named = _MANIFEST.fullmatch(name)
    assert named is not None, name  # The caller has matched the name.
    version, publisher, kind = named.groups()
    begin = f"version {int(version)}\npublisher {publisher}\nwhole {int(kind == 'whole')}\n"
    text = text.decode(errors="replace")
    lines = re.fullmatch(
        rf"het_tf served 1\n{begin}written \d+\nothers (\S+)\ntables \d+\n(?:rows \d+ \S+\n)*", text
    )
    if lines is None:
        raise ValueError(f"{path} is no manifest of that version")
    return lines[1], re.findall(r"^rows \d+ (\S+)$", text, re.MULTILINE)


def _verify_rows(path: str) -> None:
    size = tf.io.gfile.stat(path).length
    with tf.io.gfile.GFile(path, "rb") as file:
        file.seek(max(0, size - _FOOTER.size))
        footer = file.read()
        if len(footer) != _FOOTER.size or not footer.startswith(b"HETROWS\n"):
            raise ValueError(f"{path} is no file of rows, or its end is missing")
        *_, expected = _FOOTER.unpack(footer)
        if zlib.crc32(footer[:-4]) != expected:
            raise ValueError(f"{path}: its footer is damaged")
        # Every block has one checksum of four bytes.
        blocks = -(-(size - _FOOTER.size) // (_BLOCK + 4))
        end = size - _FOOTER.size - 4 * blocks
        file.seek(end)
        checksums = struct.unpack(f"<{blocks}I", file.read(4 * blocks))
        file.seek(0)
        for block, expected in enumerate(checksums):
            first = block * _BLOCK
            if zlib.crc32(file.read(min(_BLOCK, end - first))) != expected:
                raise ValueError(f"{path}: damaged between bytes {first} and {first + _BLOCK}")


_NAME = re.compile(r"(\d{12})\.")
# A manifest, or this marker of a publisher that has no version yet, announces a publisher.
_BEGUN = "begun"
_COMING = re.compile(rf"(\d{{12}})\.(\w+)\.(?:whole|delta|{_BEGUN})")


class SupersededError(RuntimeError):
    """A newer publisher writes into the folder, or the folder was emptied."""


class Versions:
    """Publisher of a model. It writes one version after the other into a folder.

    If several publishers use a folder, the newest continues, and the others raise
    `SupersededError`.

    Attributes:
      folder: folder of the versions. It may be moved between two versions.
      publisher: random id of this publisher in file names.
      next: number of the next version.
    """

    def __init__(
        self,
        folder: str,
        tables: Sequence[EmbeddingTable],
        variables: Callable[[], Sequence[np.ndarray]],
        selection: RowSelection,
        full_every: int,
    ):
        """Registers the publisher. Its first version is whole and follows the newest in the folder.

        Args:
          folder: folder of the files. Parameter servers must reach it under the same path. It is
            created if it does not exist.
          tables: tables of the model.
          variables: returns the values of the model's variables.
          selection: rows to write, and their dtype.
          full_every: one of `full_every` versions has all rows.
        """
        self.folder = folder
        self.publisher = secrets.token_hex(8)
        self._tables = {str(t): table for t, table in enumerate(tables)}
        self._variables = variables
        self._selection = selection
        self._chain = Chain(full_every)
        self._whole: list[int] = []
        # Name of the last version's manifest.
        self._last: str | None = None
        self._superseded: str | None = None
        tf.io.gfile.makedirs(folder)
        self.next = self._newest() + 1
        self._come()

    @property
    def superseded(self) -> bool:
        """Whether `SupersededError` was raised. Every later `begin` raises it again."""
        return self._superseded is not None

    def begin(self) -> Callable[[], int]:
        """Takes a snapshot of the rows and reads the variables, for the next version.

        The version has the rows that changed since the previous version. It has all rows if there
        is no previous version, if rows were replaced, if the versions since the last whole one have
        half of its rows or more, and after `full_every - 1` versions with changes.

        Returns:
          A function that writes the version and returns its number. It may be called in any thread,
          before the next `begin`. It raises tf.errors.OpError if a file cannot be written, or a
          parameter server is down. The version then does not exist, and the next version also has
          its changes.

        Raises:
          SupersededError: a newer publisher uses the folder, or the folder was emptied. The
            returned function and all later calls raise this error, too.
          tf.errors.OpError: a parameter server is down, or the folder cannot be read.
        """
        self._check()
        cut = Cut(self._tables, self._chain)
        try:
            written = time.time()
            values = [np.asarray(value) for value in self._variables()]
        except BaseException:
            cut.drop()
            raise
        return functools.partial(self._write, cut, values, written)

    def close(self) -> None:
        """Ends the tracking of changed rows in the tables. Removes this publisher's marker."""
        self._chain.end()
        if self._last is None:
            self._remove(self._is_own)

    def _newest(self, others: bool = False) -> int:
        """Returns the largest version number in the folder, or -1 if there is none.

        Args:
          others: whether to skip this publisher's files.
        """
        files = tf.io.gfile.listdir(self.folder)
        numbers = [
            int(match[1])
            for file in files
            if (match := _NAME.match(file)) and not (others and self._is_own(file))
        ]
        return max(numbers, default=-1)

    def _come(self) -> None:
        """Writes this publisher's marker, with a number above all versions of other publishers.

        No other publisher can write a version of this number later. A version of another publisher
        either is in the folder when this function lists it, or its publisher checks for markers
        after this marker was written, and ends.
        """
        while True:
            begun = f"{self.folder}/{self._name(_BEGUN)}"
            with tf.io.gfile.GFile(begun, "w") as file:
                file.write("")
            if (newest := self._newest(others=True)) < self.next:
                return
            self.next = newest + 1
            tf.io.gfile.remove(begun)

    def _check(self) -> None:
        """Raises a SupersededError if a newer publisher uses the folder."""
        if self._superseded is None:
            files = tf.io.gfile.listdir(self.folder)
            # A newer publisher has a larger number, or the same number if two publishers began in
            # an empty folder at once.
            newest = self.next - (self._last is not None)
            for match in filter(None, map(_COMING.fullmatch, files)):
                if match[2] != self.publisher and int(match[1]) >= newest:
                    self._superseded = f"another publisher writes into it: {match[0]}"
            gone = self._last is not None and self._last not in files
            if gone and self._superseded is None:
                self._superseded = f"it was begun anew, or emptied: {self._last} is gone"
        if self._superseded is not None:
            raise SupersededError(f"{self.folder}: {self._superseded}")

    def _name(self, what: str) -> str:
        return f"{self.next:012d}.{self.publisher}.{what}"

    def _is_own(self, file: str) -> bool:
        return file[12:].startswith(f".{self.publisher}.")

    def _write(self, cut: Cut, values: list[np.ndarray], written: float) -> int:
        version = self.next

        def save(shard: tuple[str, int], handle: tf.Tensor, of: Any) -> int:
            rows, _ = ops.table_save_rows(
                handle,
                of.snapshot,
                f"{self.folder}/{self._name(f'{shard[0]}.{shard[1]}.rows')}",
                dtype=self._selection.rows,
                min_clock=self._selection.min_updates,
                min_norm=self._selection.min_norm,
                # A delta ignores max_age: servers may serve earlier values of its rows.
                **({"max_age": self._selection.most_age} if cut.whole else {}),
            )
            return int(rows)

        try:
            rows = sum(cut.write(save))
            others, manifest = self._name("others"), self._name("whole" if cut.whole else "delta")
            self._save_variables(f"{self.folder}/{others}", values)
            lines = ["het_tf served 1", f"version {version}", f"publisher {self.publisher}"]
            lines += [f"whole {int(cut.whole)}", f"written {int(written * 1e6)}"]
            lines += [f"others {others}", f"tables {len(self._tables)}"]
            lines += [f"rows {name} {self._name(f'{name}.{s}.rows')}" for name, s in cut.shards]
            self._check()
            self._finish("\n".join(lines) + "\n", f"{self.folder}/{manifest}")
        except BaseException:
            self._remove(
                lambda file: (
                    self._is_own(file) and int(file[:12]) == version and not file.endswith(_BEGUN)
                )
            )
            raise
        self._chain.take(str(version), cut.numbers, rows, cut.whole)
        self.next += 1
        if self._last is None:
            self._remove(lambda file: self._is_own(file) and file.endswith(_BEGUN))
        self._last = manifest
        if cut.whole:
            self._whole.append(version)
            # The previous whole version stays, because servers may be about to open it. Older files
            # of other publishers go, too: these publishers are superseded.
            if len(self._whole) > 1:
                self._remove(lambda file: int(file[:12]) < self._whole[-2])
        return version

    def _save_variables(self, prefix: str, values: list[np.ndarray]) -> None:
        with tf.device("/device:CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=prefix,
                tensor_names=[str(i) for i in range(len(values))] + ["end"],
                shape_and_slices=[""] * (len(values) + 1),
                tensors=[*values, 0],  # A bundle needs at least one tensor.
            )

    def _finish(self, text: str, path: str) -> None:
        temporary = f"{path}.temporary"
        with tf.io.gfile.GFile(temporary, "w") as file:
            file.write(f"{text}crc32 {zlib.crc32(text.encode()):08x}\n")
        try:
            tf.io.gfile.rename(temporary, path, overwrite=False)
        except tf.errors.AlreadyExistsError as error:
            raise tf.errors.AlreadyExistsError(None, None, f"{path}: {error.message}") from error

    def _remove(self, which: Callable[[str], bool]) -> None:
        """Removes the files whose names `which` selects, manifests first."""
        try:
            files = tf.io.gfile.listdir(self.folder)
        except tf.errors.OpError:
            return
        for file in sorted(files, key=lambda x: not x.endswith((".whole", ".delta"))):
            if _NAME.match(file) and which(file):
                with contextlib.suppress(tf.errors.OpError):
                    tf.io.gfile.remove(f"{self.folder}/{file}")
