"""How a memory is split over tables: the rows with the most gain per byte are in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Curve:
    """What the rows of a table gain in memory, from the most frequent row on.

    Attributes:
      rows: float64 [n], numbers of rows.
      gain: float64 [n], gain of a byte of each of these rows, descending.
      row_bytes: memory of a row.
    """

    rows: np.ndarray
    gain: np.ndarray
    row_bytes: float


def most_valuable(memory: float, curves: Mapping[str, Curve]) -> tuple[dict[str, float], float]:
    """Returns the number of rows of every table in a memory, and how often all rows would fit.

    Entries are taken by gain until one does not fit. No other choice of as many bytes has more
    gain, since every further row of a table gains less.

    Args:
      memory: bytes.
      curves: of the tables.
    """
    if not curves:
        return {}, 1.0
    lengths = [len(curve.rows) for curve in curves.values()]
    numbers = np.repeat(np.arange(len(curves)), lengths)
    gains = np.concatenate([curve.gain for curve in curves.values()])
    rows = np.concatenate([curve.rows for curve in curves.values()])
    costs = np.concatenate([curve.rows * curve.row_bytes for curve in curves.values()])
    order = np.argsort(-gains, kind="stable")
    used = np.cumsum(costs[order])
    taken = order[: np.count_nonzero(used <= memory)]
    each = np.bincount(numbers[taken], rows[taken], len(curves))
    times = memory / used[-1] if len(used) and used[-1] > 0 else 1.0
    return dict(zip(curves, each.tolist(), strict=True)), times
