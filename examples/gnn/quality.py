"""Metrics of scores that tell two kinds apart."""

import numpy as np


def area_under_curve(true: np.ndarray, false: np.ndarray) -> float:
    """Share of pairs of a true and a false one that are in the right order."""
    false = np.sort(false)
    below, upto = (np.searchsorted(false, true, side) for side in ("left", "right"))
    return float(np.mean(below + upto)) / 2 / len(false)


def metrics(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """AUC, and F1 of both labels on average, of probabilities of label 1."""
    positive = predicted > 0.5
    f1 = [
        2
        * np.sum((positive == kind) & (labels == kind))
        / max(np.sum(positive == kind) + np.sum(labels == kind), 1)
        for kind in (0, 1)
    ]
    auc = area_under_curve(predicted[labels == 1], predicted[labels == 0])
    return {"AUC": auc, "F1": float(np.mean(f1))}
