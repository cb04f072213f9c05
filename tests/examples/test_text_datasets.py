"""Text files of triples, interactions and graphs: what they hold, and lines that are wrong."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest

from het_tf.datasets import graphs, interactions, text, triples

DATA_DIR = os.environ.get("HET_TF_DATA_DIR")


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
    (tmp_path / "test.txt").write_text("2 5\n3 -1\n")
    with pytest.raises(text.BadLineError, match="line 2, column 2: '-1' is no integer"):
        interactions.load_lists(tmp_path)


def test_a_graph_has_the_neighbours_of_every_node(tmp_path):
    (tmp_path / "labels.csv").write_text("id,ml_target\n0,1\n1,0\n2,1\n")
    (tmp_path / "edges.csv").write_text("id_1,id_2\n0,2\n2,1\n")
    graph = graphs.load(tmp_path)
    around = np.split(graph.neighbors, graph.offsets[1:-1])
    assert [sorted(each.tolist()) for each in around] == [[2], [2], [0, 1]]
    assert graph.labels.tolist() == [1, 0, 1]
    (tmp_path / "edges.csv").write_text("id_1,id_2\n0,3\n")
    with pytest.raises(text.BadLineError, match="line 2, column 'id_2': 3 is not from 0 to 2"):
        graphs.load(tmp_path)
    (tmp_path / "edges.csv").write_text("a,b\n0,1\n")
    with pytest.raises(text.BadLineError, match="line 1 is 'a,b', not 'id_1,id_2'"):
        graphs.load(tmp_path)


def test_a_graph_has_the_genres_of_every_node(tmp_path):
    (tmp_path / "edges.csv").write_text("node_1,node_2\n0,2\n2,1\n")
    with gzip.open(tmp_path / "genres.json.gz", "wt") as file:
        file.write('{"0": ["Rock", "Jazz"], "2": [], "1": ["Rock"]}')
    graph, genres = graphs.load_genres(tmp_path)
    assert graph.degrees.tolist() == [1, 1, 2]
    assert genres == ["Jazz", "Rock"]
    assert graph.labels.tolist() == [[1, 0], [1, -1], [-1, -1]]
    assert graph.labels.dtype == np.int64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "genres.json has a list, no object"),
        ('{"0": [}', r"genres.json: Expecting value: line 1 column 8"),
        ('{"0": [], "7": []}', "genres.json: node '7' is not from 0 to 1"),
        ('{"0": "Rock"}', "genres.json: node '0' has 'Rock', which is no list of texts"),
        ('{"0": [1]}', r"genres.json: node '0' has \[1\], which is no list of texts"),
        ('{"0": ["Rock"]}', "edges.csv, line 2, column 'node_2': 1 is not from 0 to 0"),
    ],
)
def test_wrong_genres_are_named(tmp_path, content, message):
    (tmp_path / "edges.csv").write_text("node_1,node_2\n0,1\n")
    (tmp_path / "genres.json").write_text(content)
    with pytest.raises(text.BadLineError, match=message):
        graphs.load_genres(tmp_path)


def test_generated_friends_share_genres(tmp_path):
    graphs.generate_genres(tmp_path)
    graph, genres = graphs.load_genres(tmp_path)
    likes = (graph.labels[:, :, None] == np.arange(len(genres))).any(1)
    shared = likes[np.repeat(np.arange(len(likes)), graph.degrees)] & likes[graph.neighbors]
    of_friends = shared.any(1).mean()
    order = np.random.default_rng(0).permutation(len(likes))
    assert of_friends > 2 * (likes & likes[order]).any(1).mean()


def test_real_genres():
    if not DATA_DIR:
        pytest.skip("HET_TF_DATA_DIR is not set: the users of Deezer are not tested")
    graph, genres = graphs.load_genres(os.path.join(DATA_DIR, "deezer_hu"))
    assert (len(graph.degrees), len(graph.neighbors), len(genres)) == (47_538, 2 * 222_887, 84)
    counts = (graph.labels >= 0).sum(1)
    assert (counts.min(), counts.max(), graph.labels.shape[1]) == (1, 42, 42)


def test_tables_of_integers(tmp_path):
    path = tmp_path / "table.csv"
    rows = np.random.default_rng(0).integers(0, 10**12, (50_000, 2))  # more than a block of bytes
    lines = [f"{a}-{b}\r\n" for a, b in rows.tolist()]
    path.write_bytes("".join(lines).encode())
    np.testing.assert_array_equal(text.integers(path, "-", ("a", "b")), rows)
    path.write_bytes("".join(lines).encode().removesuffix(b"\n"))
    np.testing.assert_array_equal(text.integers(path, "-", ("a", "b")), rows)
    lines[49_000] = "1-2-3\n"
    path.write_text("".join(lines))
    with pytest.raises(text.BadLineError, match="line 49001 is '1-2-3', not 'a-b'"):
        text.integers(path, "-", ("a", "b"))
    path.write_text("1-2,3\n")
    assert text.integers(path, "-,", ("a", "b", "c")).tolist() == [[1, 2, 3]]
    with pytest.raises(text.BadLineError, match="line 1 is '1-2,3', not 'a,b-c'"):
        text.integers(path, ",-", ("a", "b", "c"))
    path.write_text("a\n-1\n0")
    assert text.integers(path, "", ("a",), has_header=True).tolist() == [[-1], [0]]
    with pytest.raises(text.BadLineError, match="line 2, column 'a': -1 is not from 0 to 4"):
        text.integers(path, "", ("a",), has_header=True, limits=[5])
    path.write_text("")
    assert text.integers(path, ",", ("a", "b")).shape == (0, 2)
    with pytest.raises(text.BadLineError, match="line 1 is '', not 'a,b'"):
        text.integers(path, ",", ("a", "b"), has_header=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 2 3", "line 2 is '1 2 3', not 'user item'"),
        ("1 x", "line 2, column 'item': 'x' is no integer"),
        ("1 99999999999999999999", "column 'item': '99999999999999999999' is no integer"),
        ("", "line 2 is '', not 'user item'"),
        ("1  2", "line 2 is '1  2', not 'user item'"),
        ("1 \udcff", r"line 2, column 'item': '\\\\xff' is no integer"),
    ],
)
def test_bad_lines_are_named_or_passed_over(tmp_path, line, message):
    path = tmp_path / "reviews.txt"
    path.write_text(f"1 5\n{line}\n1 6", errors="surrogateescape")
    with pytest.raises(text.BadLineError, match=message):
        interactions.load_sequences(path)
    assert interactions.load_sequences(path, max_bad_lines=1)[0].tolist() == [5, 6]
    (tmp_path / "genres.json").write_bytes(b"1 \xff\n")
    with pytest.raises(text.BadLineError, match=r"genres.json: 'utf-8' codec can't decode"):
        graphs.load_genres(tmp_path)
    packed = tmp_path / "reviews.txt.gz"
    packed.write_text("1 5\n")
    with pytest.raises(text.BadLineError, match=r"reviews.txt.gz: Not a gzipped file"):
        interactions.load_sequences(packed)
    with pytest.raises(ValueError, match="max_bad_lines must be an integer from 0"):
        interactions.load_sequences(path, max_bad_lines=-1)
    with pytest.raises(FileNotFoundError, match=r"has no file train.txt or train.txt.gz"):
        triples.load(tmp_path)
