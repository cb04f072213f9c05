"""A factorization machine on rows of an embedding table, in numpy (Rendle, ICDM 2010).

A row is (weight, factors): the logit of an example is the sum of its rows' weights and of the inner
products of every two of its rows' factors.
"""

from __future__ import annotations

import numpy as np


def logits(rows: np.ndarray) -> np.ndarray:
    """rows: float32 [examples, fields, 1 + factors], zeros where a field is missing."""
    total = rows.sum(axis=1)
    factors = rows[..., 1:]
    squares = np.einsum("efk,efk->e", factors, factors)
    return total[:, 0] + 0.5 * ((total[:, 1:] ** 2).sum(axis=1) - squares)


def gradients(rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Of the mean logistic loss with respect to rows; of the same shape."""
    error = (1 / (1 + np.exp(-logits(rows))) - labels) / len(labels)
    result = rows.sum(axis=1, keepdims=True) - rows
    result[..., 0] = 1
    result *= error[:, None, None].astype(np.float32)
    return result


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Probability that a positive scores higher than a negative; ties count half."""
    values, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    del values
    rank = np.cumsum(count) - (count - 1) / 2
    positive = labels > 0.5
    pairs = positive.sum() * (~positive).sum()
    return float((rank[place[positive]].sum() - positive.sum() * (positive.sum() + 1) / 2) / pairs)
