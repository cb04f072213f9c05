"""Graphs as lists of edges in edges.csv of a folder, with labels.csv or genres.json for the nodes.

B. Rozemberczki, C. Allen, R. Sarkar, Multi-Scale Attributed Node Embedding, J. Complex Networks 9,
2021 (GitHub developers).
B. Rozemberczki, R. Davies, R. Sarkar, C. Sutton, GEMSEC: Graph Embedding with Self Clustering,
ASONAM 2019 (Deezer users).
"""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np

from het_tf.datasets.text import BadLineError, find, integers, json_object


@dataclasses.dataclass(frozen=True)
class Graph:
    """An undirected graph, with the neighbours of every node side by side.

    Attributes:
      offsets: int64 [nodes + 1]. The neighbours of node i are those from offsets[i] to
        offsets[i + 1].
      neighbors: int64 [2 * edges], in ascending order for each node.
      labels: int64 [nodes], or [nodes, most] for nodes with several labels, padded with -1.
    """

    offsets: np.ndarray
    neighbors: np.ndarray
    labels: np.ndarray

    @property
    def degrees(self) -> np.ndarray:
        """Number of neighbours of every node, int64 [nodes]."""
        return np.diff(self.offsets)


@dataclasses.dataclass(frozen=True)
class NodeTask:
    """A graph with nodes to classify.

    Attributes:
      graph: the graph. A node without a label has the label -1.
      train: int64 [n], nodes to train on.
      valid: the same, to validate with.
      test: the same, to test with.
      first_nodes: the first node of each type of nodes. The nodes of a type follow one another.
    """

    graph: Graph
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    first_nodes: dict[str, int]


def from_edges(edges: np.ndarray, labels: np.ndarray) -> Graph:
    """Makes a graph of edges, int64 [n, 2], and the labels of all nodes."""
    heads, tails = edges.T
    pairs = np.concatenate([heads << 32 | tails, tails << 32 | heads])
    pairs.sort()  # 63 million edges: 8 s, and 56 s with numpy.argsort.
    counts = np.bincount(pairs >> 32, minlength=len(labels))
    pairs &= 2**32 - 1
    return Graph(np.concatenate([[0], np.cumsum(counts)]), pairs, labels)


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
    edges = _edges(folder, ("id_1", "id_2"), len(nodes), max_bad_lines)
    return from_edges(edges, nodes[:, 1])


def load_genres(
    folder: str | os.PathLike[str], *, max_bad_lines: int = 0
) -> tuple[Graph, list[str]]:
    """Reads edges.csv with the columns node_1 and node_2, and genres.json: the genres of each node.

    genres.json is an object such as {"0": ["Pop", "Rock"], "1": []}.

    Args:
      folder: the folder.
      max_bad_lines: number of bad lines of edges.csv that are passed over.

    Returns:
      The graph, and the names of the genres in alphabetical order. The labels of a node are the
      places of its genres in the names.

    Raises:
      FileNotFoundError: a file is missing.
      BadLineError: a line is not as it must be, or genres.json does not have lists of texts for the
        nodes 0, 1, 2, ...
    """
    path = find(folder, "genres.json")
    genres = json_object(path)
    nodes = [str(node) for node in range(len(genres))]
    for node in genres.keys() - set(nodes):
        raise BadLineError(f"{path}: node {node!r} is not from 0 to {len(nodes) - 1}")
    for node, liked in genres.items():
        if not isinstance(liked, list) or not all(isinstance(name, str) for name in liked):
            raise BadLineError(f"{path}: node {node!r} has {liked!r}, which is no list of texts")
    names = sorted({name for liked in genres.values() for name in liked})
    number = {name: i for i, name in enumerate(names)}
    most = max(map(len, genres.values()), default=0)
    labels = np.full((len(nodes), most), -1, np.int64)
    for row, node in zip(labels, nodes, strict=True):
        row[: len(genres[node])] = [number[name] for name in genres[node]]
    edges = _edges(folder, ("node_1", "node_2"), len(nodes), max_bad_lines)
    return from_edges(edges, labels), names


def _edges(
    folder: str | os.PathLike[str], columns: tuple[str, str], nodes: int, max_bad_lines: int
) -> np.ndarray:
    return integers(
        find(folder, "edges.csv"),
        ",",
        columns,
        has_header=True,
        limits=(nodes, nodes),
        max_bad_lines=max_bad_lines,
    )


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


def generate_genres(folder: str | os.PathLike[str], seed: int = 0) -> None:
    """Writes a small graph for `load_genres`. Friends are mostly of a group and share its genres.

    So edges and genres can be predicted.
    """
    rng = np.random.default_rng(seed)
    users, groups, genres = 2000, 20, 40
    liked_by = [rng.choice(genres, 4, replace=False) for _ in range(groups)]
    bags = {}
    with open(os.path.join(folder, "edges.csv"), "w", encoding="utf-8") as file:
        file.write("node_1,node_2\n")
        for user in range(users):
            group = liked_by[user % groups]
            liked = rng.choice(group, rng.integers(1, 4), replace=False).tolist()
            bags[user] = [f"genre {i}" for i in {*liked, int(rng.integers(genres))}]
            for _ in range(6):
                is_inside = rng.random() < 0.85
                friend = rng.integers(users // groups) * groups + user % groups
                file.write(f"{user},{friend if is_inside else rng.integers(users)}\n")
    with open(os.path.join(folder, "genres.json"), "w", encoding="utf-8") as file:
        json.dump(bags, file)
