"""Scores of nodes and edges without a trained vector."""

import numpy as np

from het_tf.datasets import graphs


def votes(graph: graphs.Graph, train_nodes: np.ndarray) -> np.ndarray:
    """Shares of the neighbours in `train_nodes` that have label 1, [nodes].

    One more vote is the mean of the nodes in `train_nodes`.
    """
    is_known = np.zeros(len(graph.labels), bool)
    is_known[train_nodes] = True
    of_edge = np.repeat(np.arange(len(graph.labels)), graph.degrees)
    for_1, voters = (
        np.bincount(of_edge, values[graph.neighbors], len(graph.labels))
        for values in (is_known * graph.labels, is_known)
    )
    return (for_1 + graph.labels[train_nodes].mean()) / (voters + 1)


def by_degree(graph: graphs.Graph, train_nodes: np.ndarray) -> np.ndarray:
    """Logistic regression on the logarithm of the number of neighbours, by Newton's method."""
    x = np.stack([np.ones(len(graph.labels)), np.log1p(graph.degrees)], axis=1)
    weights = np.zeros(2)
    for _ in range(20):
        chance = 1 / (1 + np.exp(-x[train_nodes] @ weights))
        slope = x[train_nodes].T @ (graph.labels[train_nodes] - chance)
        weights += np.linalg.solve(
            (x[train_nodes].T * (chance * (1 - chance))) @ x[train_nodes], slope
        )
    return 1 / (1 + np.exp(-x @ weights))


def common_neighbors(graph: graphs.Graph, edges: np.ndarray) -> np.ndarray:
    """How many neighbours the two ends of an edge have in common, [n]."""
    of = np.split(graph.neighbors, graph.offsets[1:-1])
    return np.array([np.intersect1d(of[left], of[right]).size for left, right in edges])
