"""Text files of triples, interactions and graphs: what they hold, and lines that are wrong."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from het_tf.datasets import graphs, interactions, text, triples


def test_triples_have_numbers_by_name(tmp_path):
    triples.generate(tmp_path)
    (tmp_path / "valid.txt").write_text("a\tr\tb\nb\tr\ta\n")
    with gzip.open(tmp_path / "test.txt.gz", "wt") as file:
        file.write("b\tr\tc\n")
    (tmp_path / "test.txt").unlink()
    data = triples.load(tmp_path)
    assert data.train.shape == (7200, 3)
    named = [[data.entities[h], data.relations[r], data.entities[t]] for h, r, t in data.valid]
    assert named == [["a", "r", "b"], ["b", "r", "a"]]
    assert data.test.tolist() == [[data.entities.index("b"), len(data.relations) - 1, 1002]]
    assert data.entities[1002] == "c"


def test_interactions(tmp_path):
    path = tmp_path / "reviews.txt"
    path.write_text("3 7\n3 9\n1 7\n")
    assert [items.tolist() for items in interactions.load_sequences(path)] == [[7, 9], [7]]
    path.write_text("3 7\n1 9\n3 8\n")
    with pytest.raises(text.BadLineError, match="the lines of a user do not follow one another"):
        interactions.load_sequences(path)
    (tmp_path / "train.txt").write_text("0 5 6\n2 7\n")
    (tmp_path / "test.txt").write_text("2 5\n")
    train, test = interactions.load_lists(tmp_path)
    assert train.tolist() == [[0, 5], [0, 6], [2, 7]]
    assert test.tolist() == [[2, 5]]


def test_a_graph_has_the_neighbours_of_every_node(tmp_path):
    (tmp_path / "labels.csv").write_text("id,ml_target\n0,1\n1,0\n2,1\n")
    (tmp_path / "edges.csv").write_text("id_1,id_2\n0,2\n2,1\n")
    graph = graphs.load(tmp_path)
    around = np.split(graph.neighbors, graph.offsets[1:-1])
    assert [sorted(each.tolist()) for each in around] == [[2], [2], [0, 1]]
    assert graph.labels.tolist() == [1, 0, 1]
    (tmp_path / "edges.csv").write_text("id_1,id_2\n0,3\n")
    with pytest.raises(text.BadLineError, match=r"edge \[0, 3\] has a node that is not in"):
        graphs.load(tmp_path)
    (tmp_path / "edges.csv").write_text("a,b\n0,1\n")
    with pytest.raises(text.BadLineError, match=r"line 1 is \['a', 'b'\], not \['id_1', 'id_2'\]"):
        graphs.load(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 2 3", "line 2 has 3 columns, not 2"),
        ("1 x", "line 2, column 'item': 'x' is no integer"),
        ("1 99999999999999999999", "column 'item': '99999999999999999999' is no integer"),
        ("", "line 2 has 1 columns, not 2"),
    ],
)
def test_bad_lines_are_named_or_passed_over(tmp_path, line, message):
    path = tmp_path / "reviews.txt"
    path.write_text(f"1 5\n{line}\n1 6\n")
    with pytest.raises(text.BadLineError, match=message):
        interactions.load_sequences(path)
    assert interactions.load_sequences(path, max_bad_lines=1)[0].tolist() == [5, 6]
    path.write_bytes(b"1 \xff\n")
    with pytest.raises(text.BadLineError, match=r"reviews.txt: 'utf-8' codec can't decode"):
        interactions.load_sequences(path)
    packed = tmp_path / "reviews.txt.gz"
    packed.write_text("1 5\n")
    with pytest.raises(text.BadLineError, match=r"reviews.txt.gz: Not a gzipped file"):
        interactions.load_sequences(packed)
    with pytest.raises(ValueError, match="max_bad_lines must be an integer from 0"):
        interactions.load_sequences(path, max_bad_lines=-1)
    with pytest.raises(FileNotFoundError, match=r"has no file train.txt or train.txt.gz"):
        triples.load(tmp_path)
