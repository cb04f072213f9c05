"""Tables in `tf.train.Checkpoint`."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from het_tf.table import TableExport


class TableState(tf.train.experimental.PythonState):
    """The rows of a table as a part of a checkpoint.

    All rows pass through this process, as one string.
    """

    def __init__(self, read: Callable[[], TableExport], write: Callable[[TableExport], None]):
        """Ties a table to checkpoints.

        Args:
          read: gives all rows, after the workers' caches were flushed.
          write: replaces all rows.
        """
        self._read = read
        self._write = write

    def serialize(self) -> bytes:
        """The rows, when a checkpoint is saved."""
        rows = self._read()
        buffer = io.BytesIO()
        np.savez(buffer, keys=rows.keys, values=rows.values, slots=rows.slots, clocks=rows.clocks)
        return buffer.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Sets the rows, when a checkpoint is restored."""
        with np.load(io.BytesIO(string_value)) as arrays:
            self._write(TableExport(*(arrays[n] for n in ("keys", "values", "slots", "clocks"))))
