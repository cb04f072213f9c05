"""Versions of a model that is served: files that every server of a table writes for itself.

A version is a manifest, VERSION.PUBLISHER.whole or .delta (ops/core/serving/manifest.h); of every
shard of every table a file of rows (ops/core/serving/rows_file.h): all of them, or those that
changed since the version before; and what the variables are, as a tensor bundle. All their names
have that of the publisher, so that nobody writes where another one does, or did.
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
    """Reads what the manifests in a folder name, and compares checksums.

    Args:
      folder: of the versions, into which more may be written meanwhile.

    Returns:
      How many files of rows there are.

    Raises:
      ValueError: there is no whole version, or a file is missing or damaged. The message names it.
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
            # Unless its publisher removed it meanwhile.
            if tf.io.gfile.exists(f"{folder}/{name}"):
                raise
    return len(rows)


def _verify_version(folder: str, name: str) -> list[str]:
    """Verifies what a manifest names; returns the files of rows."""
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
    """What a manifest (ops/core/serving/manifest.h) names: the variables, and the files of rows."""
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            content = file.read()
    except tf.errors.OpError as error:
        raise ValueError(f"{path} cannot be read: {error.message}") from error
    text, _, checksum = content.rpartition(b"crc32 ")
    if checksum != b"%08x\n" % zlib.crc32(text):
        raise ValueError(f"{path} is damaged, or its end is missing")
    named = _MANIFEST.fullmatch(name)
    assert named is not None, name  # as it was listed
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
        # One checksum of four bytes for each block.
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
# What says that a publisher has come: a version, or that it is about to write its first one.
_BEGUN = "begun"
_COMING = re.compile(rf"(\d{{12}})\.(\w+)\.(?:whole|delta|{_BEGUN})")


class SupersededError(RuntimeError):
    """Another publisher writes into the folder."""


class Versions:
    """Writes the versions of a model into a folder, one after the other.

    Of those who write into a folder the one that came last goes on, and the others end.

    Attributes:
      folder: of the versions. It may be moved between two of them.
      publisher: what the names of the files have that are written here.
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
        """Goes on after the newest version in the folder, with a whole one.

        Args:
          folder: for the files. Parameter servers must reach it under the same path. It is made if
            it is not there.
          tables: of the model.
          variables: called for what else belongs to a version.
          selection: which rows, and as what.
          full_every: one in so many versions has all rows.
        """
        self.folder = folder
        self.publisher = secrets.token_hex(8)
        self._tables = {str(t): table for t, table in enumerate(tables)}
        self._variables = variables
        self._selection = selection
        self._chain = Chain(full_every)
        self._whole: list[int] = []
        # The manifest of the last version.
        self._last: str | None = None
        self._superseded: str | None = None
        tf.io.gfile.makedirs(folder)
        self.next = self._newest() + 1
        self._come()

    @property
    def superseded(self) -> bool:
        """Whether `SupersededError` was raised, as it will be by every call."""
        return self._superseded is not None

    def begin(self) -> Callable[[], int]:
        """Cuts the rows and reads the variables of the next version.

        It has the rows that changed. It has all of them where there is no version yet, where rows
        were replaced, when the changes since the last such one have come to half of its rows, and
        after `full_every - 1` others.

        Returns:
          What writes it, in any thread, before the next one is begun, and returns its number. It
          raises tf.errors.OpError if a file cannot be written, or a parameter server is down: then
          there is no such version, and the next one has what it would have had.

        Raises:
          SupersededError: another publisher has come, or the folder was begun anew. What writes the
            version raises it, too, and so does every later call.
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
        """The tables need not note what changes any longer."""
        self._chain.end()
        if self._last is None:
            self._remove(self._is_own)

    # Inside.

    def _newest(self, others: bool = False) -> int:
        """The largest number of a file, or of those of others; -1: there is none."""
        files = tf.io.gfile.listdir(self.folder)
        found = [
            int(match[1])
            for file in files
            if (match := _NAME.match(file)) and not (others and self._is_own(file))
        ]
        return max(found, default=-1)

    def _come(self) -> None:
        """Says so, with a number that no version of another one has, nor will have.

        Another one's version is either among the files that are looked at here, or it looks for who
        has come when that is said already, and ends.
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
        """That nobody came after this one."""
        if self._superseded is None:
            files = tf.io.gfile.listdir(self.folder)
            # Whoever comes takes a larger number; but two may have made one folder together.
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
                # What changed may have been served: it cannot be left out.
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
            # Servers may be about to open the whole version before. Others who wrote what is older
            # have ended, or are about to.
            if len(self._whole) > 1:
                self._remove(lambda file: int(file[:12]) < self._whole[-2])
        return version

    def _save_variables(self, prefix: str, values: list[np.ndarray]) -> None:
        with tf.device("/device:CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=prefix,
                tensor_names=[str(i) for i in range(len(values))] + ["end"],
                shape_and_slices=[""] * (len(values) + 1),
                tensors=[*values, 0],  # a bundle has at least one tensor
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
        """Removes files of versions, given their names: those first that others are found by."""
        try:
            files = tf.io.gfile.listdir(self.folder)
        except tf.errors.OpError:
            return
        for file in sorted(files, key=lambda x: not x.endswith((".whole", ".delta"))):
            if _NAME.match(file) and which(file):
                with contextlib.suppress(tf.errors.OpError):
                    tf.io.gfile.remove(f"{self.folder}/{file}")
