"""Versions of a model that is served: files that every server of a table writes for itself.

A version is a manifest, VERSION.whole or VERSION.delta (ops/core/serving/manifest.h); of every
shard of every table a file of rows (ops/core/serving/rows_file.h): all of them, or those that
changed since the version before; and what the variables are, as a tensor bundle.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf._arguments import INT32_MAX
from het_tf.saving.chains import Chain
from het_tf.saving.cuts import Cut
from het_tf.saving.row_selection import RowSelection
from het_tf.table import EmbeddingTable

_NAME = re.compile(r"(\d{12})\.")


class Versions:
    """Writes the versions of a model into a folder, one after the other.

    Attributes:
      folder: of the versions. It may be moved between two of them.
    """

    def __init__(
        self,
        folder: str,
        tables: Sequence[EmbeddingTable],
        variables: Callable[[], Sequence[np.ndarray]],
        selection: RowSelection,
    ):
        """Goes on after the newest version in the folder, with a whole one.

        Args:
          folder: for the files. Parameter servers must reach it under the same path. It is made if
            it is not there.
          tables: of the model.
          variables: called for what else belongs to a version.
          selection: which rows, and as what.
        """
        self.folder = folder
        self._tables = {str(t): table for t, table in enumerate(tables)}
        self._variables = variables
        self._selection = selection
        self._chain = Chain(INT32_MAX)
        tf.io.gfile.makedirs(folder)
        found = [int(match[1]) for match in map(_NAME.match, tf.io.gfile.listdir(folder)) if match]
        self.next = max(found, default=-1) + 1
        self._whole: list[int] = []

    def begin(self) -> Callable[[], int]:
        """Cuts the rows and reads the variables of the next version.

        It has the rows that changed. It has all of them where there is no version yet, where rows
        were replaced, and when the changes since the last such one have come to half of its rows.

        Returns:
          What writes it, in any thread, before the next one is begun, and returns its number. It
          raises tf.errors.OpError if a file cannot be written, or a parameter server is down: then
          there is no such version, and the next one has what it would have had.

        Raises:
          tf.errors.OpError: a parameter server is down.
        """
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

    # Inside.

    def _write(self, cut: Cut, values: list[np.ndarray], written: float) -> int:
        version, begin = self.next, f"{self.folder}/{self.next:012d}."

        def save(shard: tuple[str, int], handle: tf.Tensor, of: Any) -> int:
            rows, _ = ops.table_save_rows(
                handle,
                of.snapshot,
                f"{begin}{shard[0]}.{shard[1]}.rows",
                dtype=self._selection.rows,
                min_clock=self._selection.min_updates,
                min_norm=self._selection.min_norm,
                # What changed may have been served: it cannot be left out.
                **({"max_age": self._selection.most_age} if cut.whole else {}),
            )
            return int(rows)

        try:
            rows = sum(cut.write(save))
            self._save_variables(f"{begin}others", values)
            lines = ["het_tf served 1", f"version {version}", f"whole {int(cut.whole)}"]
            lines += [f"written {int(written * 1e6)}", f"others {version:012d}.others"]
            lines += [f"tables {len(self._tables)}"]
            lines += [f"rows {name} {version:012d}.{name}.{s}.rows" for name, s in cut.shards]
            self._finish("\n".join(lines) + "\n", f"{begin}{'whole' if cut.whole else 'delta'}")
        except BaseException:
            self._remove(lambda of: of == version)
            raise
        self._chain.take(str(version), cut.numbers, rows, cut.whole)
        self.next += 1
        if cut.whole:
            self._whole.append(version)
            # Servers may be about to open the whole version before.
            if len(self._whole) > 1:
                self._remove(lambda of: of < self._whole[-2])
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
        temporary = f"{path}.{uuid.uuid4().hex}"
        with tf.io.gfile.GFile(temporary, "w") as file:
            file.write(f"{text}crc32 {zlib.crc32(text.encode()):08x}\n")
        tf.io.gfile.rename(temporary, path)

    def _remove(self, which: Callable[[int], bool]) -> None:
        """Removes the files of versions: those first that others are found by."""
        try:
            files = tf.io.gfile.listdir(self.folder)
        except tf.errors.OpError:
            return
        for file in sorted(files, key=lambda x: not x.endswith((".whole", ".delta"))):
            match = _NAME.match(file)
            if match and which(int(match[1])):
                with contextlib.suppress(tf.errors.OpError):
                    tf.io.gfile.remove(f"{self.folder}/{file}")
