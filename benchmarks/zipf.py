"""Zipf-distributed ids, as benchmarks draw them."""

from __future__ import annotations

import numpy as np


def zipf_ranks(
    rng: np.random.Generator, rows: int, exponent: float, size: int | tuple[int, ...]
) -> np.ndarray:
    """Numbers below `rows` from a Zipf distribution, the most frequent first."""
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    cumulative = np.cumsum(weights)
    return np.searchsorted(cumulative, rng.random(size) * cumulative[-1])


def zipf_ids(
    rng: np.random.Generator, rows: int, exponent: float, size: int | tuple[int, ...]
) -> np.ndarray:
    """Ids from a Zipf distribution cut at `rows`, frequent ones spread over the key range."""
    ranks = zipf_ranks(rng, rows, exponent, size)
    return np.random.default_rng(7).permutation(rows)[ranks].astype(np.int64)
