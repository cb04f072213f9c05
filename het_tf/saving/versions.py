"""Versions of a model that is served: files that every server of a table writes for itself.

A version is a manifest, VERSION.whole or VERSION.delta (ops/core/serving/manifest.h); of every
shard of every table a file of rows (ops/core/serving/rows_file.h): all of them, or those that
changed since the version before; and what the variables are, as a tensor bundle.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf.saving import parts
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
        self._reader = f"served/{uuid.uuid4().hex}"
        # By shard, of the last cut that was published.
        self._cuts: dict[tuple[str, int], int] = {}
        tf.io.gfile.makedirs(folder)
        found = [int(match[1]) for match in map(_NAME.match, tf.io.gfile.listdir(folder)) if match]
        self.next = max(found, default=-1) + 1
        self._whole: list[int] = []
        self._rows_of_whole = self._rows_since = 0

    def write(self, *, whole: bool = False) -> int:
        """Writes the next version: what changed, or all if that is asked for or has to be.

        It has to be where there is no version yet, where rows were replaced, and when the changes
        since the last whole version have come to half of its rows.

        Returns:
          The version.

        Raises:
          tf.errors.OpError: a file cannot be written, or a parameter server is down. Then there is
            no such version, and the next one has what it would have had.
        """
        with parts.saving:
            return self._write(whole)

    def _write(self, whole: bool) -> int:
        whole = whole or not self._cuts or 2 * self._rows_since >= max(1, self._rows_of_whole)
        version, begin = self.next, f"{self.folder}/{self.next:012d}."
        shards = [(name, s) for name, each in self._tables.items() for s in range(each.num_shards)]
        cuts = {}
        try:
            # All are cut before the first one writes.
            for name, shard in shards:
                since = 0 if whole else self._cuts.get((name, shard), 0)
                handle = self._tables[name].handle(shard)
                cuts[name, shard] = ops.table_cut_changed(handle, self._reader, since)
            written = time.time()
            if not whole and any(bool(cut.whole) for cut in cuts.values()):
                parts.end_cuts(self._tables, cuts)
                return self._write(whole=True)
            values = [np.asarray(value) for value in self._variables()]
            save = self._save(begin, cuts, whole)
            rows = sum(parts.on_shards(self._tables, save).values())
            self._save_variables(f"{begin}others", values)
            lines = ["het_tf served 1", f"version {version}", f"whole {int(whole)}"]
            lines += [f"written {int(written * 1e6)}", f"others {version:012d}.others"]
            lines += [f"tables {len(self._tables)}"]
            lines += [f"rows {name} {version:012d}.{name}.{shard}.rows" for name, shard in shards]
            self._finish("\n".join(lines) + "\n", f"{begin}{'whole' if whole else 'delta'}")
        except BaseException:
            parts.end_cuts(self._tables, cuts)
            self._remove(lambda of: of == version)
            raise
        self._cuts = {shard: int(cut.number) for shard, cut in cuts.items()}
        self.next += 1
        if whole:
            self._rows_of_whole, self._rows_since = rows, 0
            self._whole.append(version)
            # Servers may be about to open the whole version before.
            if len(self._whole) > 1:
                self._remove(lambda of: of < self._whole[-2])
        else:
            self._rows_since += rows
        return version

    def close(self) -> None:
        """The tables need not note what changes any longer."""
        for table in self._tables.values():
            for shard in range(table.num_shards):
                with contextlib.suppress(tf.errors.OpError):  # its server is gone
                    ops.table_forget_reader(table.handle(shard), self._reader)

    def _save(
        self, begin: str, cuts: dict[tuple[str, int], tuple[tf.Tensor, ...]], whole: bool
    ) -> Callable[[str, int], int]:
        # What changed may have been served: it cannot be left out.
        age = {"max_age": self._selection.most_age} if whole else {}

        def save(name: str, shard: int) -> int:
            rows, _ = ops.table_save_rows(
                self._tables[name].handle(shard),
                cuts[name, shard].snapshot,
                f"{begin}{name}.{shard}.rows",
                dtype=self._selection.rows,
                min_clock=self._selection.min_updates,
                min_norm=self._selection.min_norm,
                **age,
            )
            return int(rows)

        return save

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
