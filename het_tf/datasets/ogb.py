"""Node property prediction of the Open Graph Benchmark, in CSV files: ogbn-products, ogbn-mag.

W. Hu et al., Open Graph Benchmark: Datasets for Machine Learning on Graphs, NeurIPS 2020.
"""

from __future__ import annotations

import os

import numpy as np

from het_tf.datasets.graphs import NodeTask, from_edges
from het_tf.datasets.text import BadLineError, BadLines, find, integers, numbered, records


def load(folder: str | os.PathLike[str], *, max_bad_lines: int = 0) -> NodeTask:
    """Reads a folder with files named .csv or .csv.gz.

    These are read. Only num-node-dict has a header:

    - raw/edge: two nodes. Or, of several types of nodes, raw/triplet-type-list: head, relation and
      tail; and raw/relations/<head>___<relation>___<tail>/edge: two nodes of these types.
    - raw/num-node-list: the number of nodes. Or raw/num-node-dict: those of each type.
    - raw/node-label: the label of each node. Or raw/node-label/<type>/node-label of some types.
    - split/<name>/train, valid and test: nodes. Or split/<name>/<type>/train, ... of some types.

    An edge counts in both directions, and relations are not told apart.

    Args:
      folder: the folder, which has raw and split.
      max_bad_lines: number of bad lines of each edge.csv that are passed over.

    Returns:
      The graph and the split. Files number the nodes of each type from 0 on. Here, the types follow
      one another as in num-node-dict. The only type of raw/num-node-list has the name "".

    Raises:
      FileNotFoundError: a file is missing, `split` does not have one folder, or no type has labels
        or a split.
      BadLineError: a line is not as it must be, or there are not as many labels as nodes.
    """
    raw, splits = (os.path.join(folder, name) for name in ("raw", "split"))
    names = os.listdir(splits)
    if len(names) != 1:
        raise FileNotFoundError(f"{splits} must have one folder, not {sorted(names)}")
    split = os.path.join(splits, names[0])
    has_types = os.path.isdir(os.path.join(raw, "relations"))
    relations = [("", "", "")]
    counts = _counts(find(raw, f"num-node-{'dict' if has_types else 'list'}.csv"), has_types)
    if has_types:
        path = find(raw, "triplet-type-list.csv")
        relations = []
        for line, (head, relation, tail) in records(path, ",", 3, BadLines()):
            for name in {head, tail} - counts.keys():
                raise BadLineError(f"{path}, line {line}: num-node-dict has no {name!r}")
            relations.append((head, relation, tail))
    first_nodes = dict(zip(counts, np.cumsum([0, *counts.values()]).tolist(), strict=False))

    def edges_of(head: str, relation: str, tail: str) -> np.ndarray:
        relation = (
            os.path.join("relations", "___".join((head, relation, tail))) if has_types else ""
        )
        path = find(os.path.join(raw, relation), "edge.csv")
        limits = counts[head], counts[tail]
        edges = integers(path, ",", ("head", "tail"), limits=limits, max_bad_lines=max_bad_lines)
        edges += [first_nodes[head], first_nodes[tail]]
        return edges

    labels = np.full(sum(counts.values()), -1, np.int64)
    parts: dict[str, list[np.ndarray]] = {"train": [], "valid": [], "test": []}
    for name, first in first_nodes.items():
        place = os.path.join(raw, "node-label" if has_types else "", name)
        if os.path.isdir(place):
            path = find(place, "node-label.csv")
            found = integers(path, ",", ("label",))
            if len(found) != counts[name]:
                raise BadLineError(f"{path} has {len(found)} labels for {counts[name]} nodes")
            labels[first : first + len(found)] = found[:, 0]
        place = os.path.join(split, name)
        if os.path.isdir(place):
            for part, nodes in parts.items():
                path = find(place, f"{part}.csv")
                nodes.append(integers(path, ",", ("node",), limits=(counts[name],))[:, 0] + first)
    if not parts["test"] or labels.max(initial=-1) < 0:
        raise FileNotFoundError(f"{folder} has no labels, or no split, of the nodes {list(counts)}")
    edges = np.concatenate([edges_of(*relation) for relation in relations])
    train, valid, test = map(np.concatenate, parts.values())
    return NodeTask(from_edges(edges, labels), train, valid, test, first_nodes)


def _counts(path: str, has_types: bool) -> dict[str, int]:
    """Returns the number of nodes of each type."""
    _, line = next(numbered(path), (1, ""))
    names = line.rstrip("\r\n").split(",") if has_types else [""]
    counts = integers(path, ",", names, has_header=has_types)
    if len(counts) != 1:
        raise BadLineError(f"{path} has {len(counts)} lines of numbers, not 1")
    return dict(zip(names, counts[0].tolist(), strict=True))
