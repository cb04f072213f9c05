"""Graphs as lists of edges with a label for every node: edges.csv and labels.csv of a folder.

B. Rozemberczki, C. Allen, R. Sarkar, Multi-Scale Attributed Node Embedding, J. Complex Networks 9,
2021 (GitHub developers).
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from het_tf.datasets.text import BadLineError, find, integers


@dataclasses.dataclass(frozen=True)
class Graph:
    """An undirected graph, with the neighbours of every node side by side.

    Attributes:
      offsets: int64 [nodes + 1]. The neighbours of node i are those from offsets[i] to
        offsets[i + 1].
      neighbors: int64 [2 * edges].
      labels: int64 [nodes].
    """

    offsets: np.ndarray
    neighbors: np.ndarray
    labels: np.ndarray

    @property
    def degrees(self) -> np.ndarray:
        """Number of neighbours of every node, int64 [nodes]."""
        return np.diff(self.offsets)


def from_edges(edges: np.ndarray, labels: np.ndarray) -> Graph:
    """Makes a graph of edges, int64 [n, 2], and the labels of all nodes."""
    both = np.concatenate([edges, edges[:, ::-1]])
    both = both[np.argsort(both[:, 0], kind="stable")]
    counts = np.bincount(both[:, 0], minlength=len(labels))
    return Graph(np.concatenate([[0], np.cumsum(counts)]), both[:, 1], labels)


def load(folder: str | os.PathLike[str], *, max_bad_lines: int = 0) -> Graph:
    """Reads edges.csv with the columns id_1 and id_2, and labels.csv with id and ml_target.

    Args:
      folder: the folder.
      max_bad_lines: number of bad lines of edges.csv that are passed over.

    Raises:
      FileNotFoundError: a file is missing.
      BadLineError: a line is not as it must be, or labels.csv does not have the nodes 0, 1, 2, ...
    """
    path = find(folder, "labels.csv")
    columns = ("id", "ml_target")
    nodes = integers(path, ",", columns, has_header=True)
    if not np.array_equal(nodes[:, 0], np.arange(len(nodes))):
        raise BadLineError(f"{path}: the nodes are not 0, 1, 2, ...")
    path = find(folder, "edges.csv")
    columns = ("id_1", "id_2")
    edges = integers(path, ",", columns, has_header=True, max_bad_lines=max_bad_lines)
    unknown = np.flatnonzero((edges < 0).any(1) | (edges >= len(nodes)).any(1))
    if unknown.size:
        edge = edges[unknown[0]].tolist()
        raise BadLineError(f"{path}: edge {edge} has a node that is not in labels.csv")
    return from_edges(edges, nodes[:, 1])


def generate(folder: str | os.PathLike[str], seed: int = 0) -> None:
    """Writes a small graph for `load`: two groups of nodes, with most edges within a group."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, 4000)
    groups = [np.flatnonzero(labels == label) for label in (0, 1)]
    with open(os.path.join(folder, "labels.csv"), "w", encoding="utf-8") as file:
        file.write("id,ml_target\n")
        file.writelines(f"{node},{label}\n" for node, label in enumerate(labels))
    with open(os.path.join(folder, "edges.csv"), "w", encoding="utf-8") as file:
        file.write("id_1,id_2\n")
        for node, label in enumerate(labels):
            for _ in range(4):
                group = groups[label if rng.random() < 0.85 else 1 - label]
                file.write(f"{node},{group[rng.integers(len(group))]}\n")
