"""Graphs in OGB's and GraphSAGE's files: what is read, and what is wrong."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from het_tf.datasets import graphsage, ogb, text


def write(folder, files):
    for name, content in files.items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as file:
            file.write(content)


def neighbors(graph):
    return [sorted(each.tolist()) for each in np.split(graph.neighbors, graph.offsets[1:-1])]


PRODUCTS = {
    "raw/edge": "0,2\n2,1\n",
    "raw/num-node-list": "4\n",
    "raw/node-label": "5\n6\n7\n5\n",
    "split/sales_ranking/train": "0\n3\n",
    "split/sales_ranking/valid": "2\n",
    "split/sales_ranking/test": "1\n",
}
MAG = {
    "raw/num-node-dict": "author,paper\n2,3\n",
    "raw/triplet-type-list": "author,writes,paper\npaper,cites,paper\n",
    "raw/relations/author___writes___paper/edge": "0,0\n1,2\n",
    "raw/relations/paper___cites___paper/edge": "0,2\n",
    "raw/node-label/paper/node-label": "5\n6\n7\n",
    "split/time/paper/train": "0\n",
    "split/time/paper/valid": "1\n",
    "split/time/paper/test": "2\n",
}


def test_one_type_of_nodes(tmp_path):
    write(tmp_path, PRODUCTS)
    task = ogb.load(tmp_path)
    assert neighbors(task.graph) == [[2], [2], [0, 1], []]
    assert task.graph.labels.tolist() == [5, 6, 7, 5]
    assert [part.tolist() for part in (task.train, task.valid, task.test)] == [[0, 3], [2], [1]]
    assert task.first_nodes == {"": 0}


def test_types_of_nodes_follow_one_another(tmp_path):
    write(tmp_path, MAG)
    task = ogb.load(tmp_path)
    assert task.first_nodes == {"author": 0, "paper": 2}
    assert neighbors(task.graph) == [[2], [4], [0, 4], [], [1, 2]]
    assert task.graph.labels.tolist() == [-1, -1, 5, 6, 7]
    assert [part.tolist() for part in (task.train, task.valid, task.test)] == [[2], [3], [4]]


@pytest.mark.parametrize(
    ("files", "change", "message"),
    [
        (PRODUCTS, {"raw/edge": "0,1\n4,1\n"}, "line 2, column 'head': 4 is not from 0 to 3"),
        (PRODUCTS, {"raw/num-node-list": "4\n4\n"}, "list.csv.gz has 2 lines of numbers, not 1"),
        (PRODUCTS, {"raw/node-label": "1\n2\n"}, "label.csv.gz has 2 labels for 4 nodes"),
        (PRODUCTS, {"split/sales_ranking/test": "9\n"}, "column 'node': 9 is not from 0 to 3"),
        (MAG, {"raw/num-node-dict": "paper\n3\n"}, "line 1: num-node-dict has no 'author'"),
        (
            MAG,
            {"raw/relations/author___writes___paper/edge": "0,1\n2,1\n"},
            "line 2, column 'head': 2 is not from 0 to 1",
        ),
    ],
)
def test_wrong_files_are_named(tmp_path, files, change, message):
    write(tmp_path, files | change)
    with pytest.raises(text.BadLineError, match=message):
        ogb.load(tmp_path)
    if "edge" in "".join(change):
        assert len(ogb.load(tmp_path, max_bad_lines=1).graph.neighbors) in (2, 4)


def test_one_split(tmp_path):
    write(tmp_path, PRODUCTS | {"split/random/train": "1\n"})
    with pytest.raises(FileNotFoundError, match=r"one folder, not \['random', 'sales_ranking'\]"):
        ogb.load(tmp_path)


def test_a_type_has_labels_and_a_split(tmp_path):
    write(tmp_path, MAG)
    (tmp_path / "split/time/paper").rename(tmp_path / "split/time/book")
    with pytest.raises(FileNotFoundError, match=r"no split, of the nodes \['author', 'paper'\]"):
        ogb.load(tmp_path)


def reddit(folder, **change):
    nodes = [
        {"id": "b", "test": False, "val": False},
        {"id": "c", "test": False, "val": True},
        {"id": "a", "test": True, "val": False},
        {"id": "d"},
    ]
    links = [{"source": 0, "target": 2, "train_removed": False}, {"source": 1, "target": 0}]
    files = {
        "G": {"directed": False, "graph": {}, "nodes": nodes, "links": links},
        "id_map": {"a": 0, "b": 1, "c": 2, "d": 3},
        "class_map": {"a": 7, "b": 8, "c": 9},
    }
    for name, content in files.items():
        content = content | change.get(name, {})
        (folder / f"reddit-{name}.json").write_text(json.dumps(content))


def test_links_have_places_of_nodes(tmp_path):
    reddit(tmp_path)
    task = graphsage.load(tmp_path)
    assert neighbors(task.graph) == [[1], [0, 2], [1], []]
    assert task.graph.labels.tolist() == [7, 8, 9, -1]
    assert [part.tolist() for part in (task.train, task.valid, task.test)] == [[1], [2], [0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id_map": {"a": 4}}, "id_map.json: node 'a' has 4, not 0 to 3"),
        ({"id_map": {"a": 1}}, "id_map.json: two nodes have the same number"),
        ({"class_map": {"x": 1}}, "class_map.json: node 'x' is not in id_map"),
        ({"class_map": {"a": [1]}}, r"class_map.json: node 'a' has \[1\], which is no integer"),
        ({"G": {"nodes": {}}}, "G.json has no list of nodes"),
        ({"G": {"nodes": [{"id": "x"}]}}, "G.json: node 0 is {'id': 'x'}, with no id of id_map"),
        ({"G": {"links": [{"source": "a", "target": 1}]}}, "G.json: link 0 is {'source': 'a'"),
        ({"G": {"links": [{"source": 1}]}}, "G.json: link 0 is {'source': 1}"),
        ({"G": {"links": [{"source": 1, "target": 4}]}}, r"link 0 is \[1 4\], not 0 to 3"),
    ],
)
def test_wrong_json_is_named(tmp_path, change, message):
    reddit(tmp_path, **change)
    with pytest.raises(text.BadLineError, match=message):
        graphsage.load(tmp_path)
