"""GraphSAGE's JSON files of a graph with nodes to classify, such as the posts of Reddit.

W. Hamilton, R. Ying, J. Leskovec, Inductive Representation Learning on Large Graphs, NIPS 2017.
"""

from __future__ import annotations

import array
import os
from typing import Any

import numpy as np

from het_tf.datasets.graphs import NodeTask, from_edges
from het_tf.datasets.text import BadLineError, find, json_object


def load(folder: str | os.PathLike[str], name: str = "reddit") -> NodeTask:
    """Reads <name>-G.json, <name>-id_map.json and <name>-class_map.json of a folder.

    G.json is as networkx 1.11 writes it ("node-link"): a link has the places of its nodes in the
    list of nodes. A node has one class. Nodes have the numbers of id_map. These are also the rows
    of <name>-feats.npy, which is not read.

    Args:
      folder: the folder.
      name: of the graph.

    Returns:
      The graph and the split. A node that is not in G.json, or has not both `val` and `test` there,
      is in no part. A node without a class has the label -1. All nodes have the type "".

    Raises:
      FileNotFoundError: a file is missing.
      BadLineError: a file is not as it must be. The message has the node or the link.
    """
    paths = [find(folder, f"{name}-{kind}.json") for kind in ("id_map", "class_map", "G")]
    numbers = _numbers(paths[0])
    labels = _labels(paths[1], numbers)
    nodes, links = _nodes_and_links(paths[2], numbers)
    places = np.array([numbers[str(node["id"])] for node in nodes], np.int64)
    edges = places[links]
    has_part = np.array(["val" in node and "test" in node for node in nodes], bool)
    is_valid, is_test = (
        np.array([bool(node.get(f)) for node in nodes], bool) for f in ("val", "test")
    )
    train, valid, test = (
        places[has_part & part] for part in (~is_valid & ~is_test, is_valid & ~is_test, is_test)
    )
    return NodeTask(from_edges(edges, labels), train, valid, test, {"": 0})


def _numbers(path: str) -> dict[str, int]:
    """Returns the number of each node, by its id."""
    numbers = json_object(path)
    for node, number in numbers.items():
        if type(number) is not int or not 0 <= number < len(numbers):
            raise BadLineError(f"{path}: node {node!r} has {number!r}, not 0 to {len(numbers) - 1}")
    if len(set(numbers.values())) < len(numbers):
        raise BadLineError(f"{path}: two nodes have the same number")
    return numbers


def _labels(path: str, numbers: dict[str, int]) -> np.ndarray:
    labels = np.full(len(numbers), -1, np.int64)
    for node, label in json_object(path).items():
        if node not in numbers:
            raise BadLineError(f"{path}: node {node!r} is not in id_map")
        if type(label) is not int:
            raise BadLineError(f"{path}: node {node!r} has {label!r}, which is no integer")
        labels[numbers[node]] = label
    return labels


def _nodes_and_links(path: str, numbers: dict[str, int]) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Returns the nodes, and the places of the nodes of each link, int64 [links, 2]."""
    ends = array.array("q")  # Millions of links are too large as dictionaries.

    def pack_link(found: dict[str, Any]) -> dict[str, Any] | None:
        if "source" not in found:
            return found
        try:
            ends.extend((found["source"], found["target"]))
        except (KeyError, TypeError, OverflowError) as error:
            raise BadLineError(f"{path}: link {len(ends) // 2} is {found}") from error
        return None

    nodes = json_object(path, pack_link).get("nodes")
    if not isinstance(nodes, list):
        raise BadLineError(f"{path} has no list of nodes")
    for place, node in enumerate(nodes):
        if not isinstance(node, dict) or str(node.get("id")) not in numbers:
            raise BadLineError(f"{path}: node {place} is {node}, with no id of id_map")
    links = np.array(ends, np.int64).reshape(-1, 2)
    for link in np.flatnonzero(((links < 0) | (links >= len(nodes))).any(1)):
        raise BadLineError(f"{path}: link {link} is {links[link]}, not 0 to {len(nodes) - 1}")
    return nodes, links
