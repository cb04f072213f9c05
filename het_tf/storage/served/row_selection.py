"""Selection of the rows of a table for serving, and their stored dtype."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from het_tf.runtime.validation import INT64_MAX, check_integer, check_number
from het_tf.tables.table import EmbeddingTable, TableExport

_DTYPES = {"float32": np.float32, "float16": np.float16, "int8": np.int8}


@dataclasses.dataclass(frozen=True)
class RowSelection:
    """Selection of the rows of a table for serving, and their stored dtype.

    Attributes:
      rows: stored dtype, "float32", "float16" or "int8". The error of "float16" is at most 2**-11
        of a value, or 2**-25 if that is more. "int8" has a scale per row, and its error is at most
        1 / 254 of the row's largest absolute value.
      min_updates: leaves out rows with a smaller clock.
      min_norm: leaves out rows with a smaller L2 norm.
      max_age: leaves out rows whose last update is longer ago, in the unit of `Expiry.age`.
    """

    rows: str = "float32"
    min_updates: int = 0
    min_norm: float = 0.0
    max_age: int | None = None

    def __post_init__(self) -> None:
        if self.rows not in _DTYPES:
            raise ValueError(f'rows must be "float32", "float16" or "int8", not {self.rows!r}')
        check_integer("min_updates", self.min_updates, 0, INT64_MAX)
        check_number("min_norm", self.min_norm, 0, math.inf)
        if self.max_age is not None:
            check_integer("max_age", self.max_age, 0, INT64_MAX)

    @property
    def stored_dtype(self) -> type:
        """The NumPy type of stored values."""
        return _DTYPES[self.rows]

    @property
    def most_age(self) -> int:
        """`max_age` as an attribute of ops."""
        return INT64_MAX if self.max_age is None else self.max_age

    def check_table(self, table: EmbeddingTable) -> None:
        """Raises a ValueError if the table lacks update counts or ages that the selection needs."""
        clock = table.row_attributes["clock"]
        if self.min_updates and clock != "count":
            raise ValueError(
                f"min_updates = {self.min_updates} needs a table that counts updates; this one has"
                f' clock="{clock}"'
            )
        if self.max_age is not None and table.age_time is None:
            raise ValueError(
                f"max_age = {self.max_age} needs tables whose rows have an age; that of"
                f" {table.shared_name.rpartition('/')[0]} has no expiry"
            )

    def select(self, rows: TableExport) -> TableExport:
        """Returns the selected rows. The caller has already left out rows beyond `max_age`."""
        if not self.min_updates and not self.min_norm:
            return rows
        norms = np.linalg.norm(rows.values.astype(np.float64), axis=1)
        keep = (rows.clocks >= self.min_updates) & (norms >= self.min_norm)
        return TableExport(rows.keys[keep], rows.values[keep], rows.slots[keep], rows.clocks[keep])

    def store(self, rows: TableExport) -> tuple[np.ndarray, np.ndarray]:
        """Converts values to the stored dtype.

        Returns:
          values: `stored_dtype` [rows, dim].
          scales: float32 [rows] with "int8", factors of the rows; else float32 [0].

        Raises:
          ValueError: a value is beyond the range of float16.
        """
        none = np.zeros([0], np.float32)
        if self.rows == "float32":
            return rows.values, none
        most = np.abs(rows.values).max(axis=1, initial=0)
        if self.rows == "float16":
            for row in np.flatnonzero(most >= 65520):  # These would round to infinity.
                raise ValueError(
                    f'rows = "float16" cannot hold {most[row]:g} of key {rows.keys[row]}'
                )
            return rows.values.astype(np.float16), none
        scales = (most / np.float32(127)).astype(np.float32)
        divisors = np.where(scales > 0, scales, np.float32(1))[:, np.newaxis]
        return np.clip(np.rint(rows.values / divisors), -127, 127).astype(np.int8), scales
