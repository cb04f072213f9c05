"""MovieLens and what is generated in its place: columns, split, batches, no endless wait."""

import datetime
import http.server
import os
import socket
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from het_tf.datasets import movielens

DATA_DIR = os.environ.get("HET_TF_DATA_DIR")


def take_away(patch: pytest.MonkeyPatch) -> None:
    """No data set on this machine."""

    def load(*_, **__):
        raise OSError("no network\nand more")

    patch.setitem(sys.modules, "tensorflow_datasets", types.SimpleNamespace(load=load))
    patch.delenv("HET_TF_DATA_DIR", raising=False)


@pytest.fixture(scope="module")
def generated():
    with pytest.MonkeyPatch.context() as patch:
        take_away(patch)
        return movielens.load_arrays()


@pytest.fixture(scope="module")
def real():
    if not DATA_DIR:
        pytest.skip("HET_TF_DATA_DIR is not set: MovieLens 100K itself is not tested")
    return movielens.load_arrays()


@pytest.fixture(params=["generated", "real"])
def loaded(request):
    return request.getfixturevalue(request.param)


def test_columns_have_the_sizes_they_say(loaded):
    train, test, info = loaded
    for features, label in (train, test):
        assert list(features) == [column.name for column in movielens.COLUMNS]
        assert label.dtype == np.float32
        assert set(label) == {0.0, 1.0}
        for column in info.columns:
            ids = features[column.name]
            assert ids.dtype == np.int64
            assert ids.shape == (len(label), *([column.length] if column.length else []))
            assert ids.max() < column.size
            assert ids.min() >= (movielens.PAD if column.length else 0)


def test_split_is_a_tenth_of_the_pairs_and_the_same_every_time(loaded):
    train, test, info = loaded
    assert (info.num_train, info.num_test) == (len(train[1]), len(test[1]))
    assert info.num_train + info.num_test == 100_000
    assert info.num_test == pytest.approx(10_000, rel=0.05)
    pairs = [set(zip(part["user"], part["movie"], strict=True)) for part, _ in (train, test)]
    assert not pairs[0] & pairs[1]
    assert not set(test[0]["user"]) - set(train[0]["user"])


def test_real_ratings(real):
    train, test, info = real
    assert info.source == "movielens"
    label = np.concatenate([train[1], test[1]])
    assert label.mean() == pytest.approx(0.55375)
    users = np.concatenate([train[0]["user"], test[0]["user"]])
    assert len(np.unique(users)) == 943
    assert len(np.unique(np.concatenate([train[0]["movie"], test[0]["movie"]]))) == 1682


def test_real_columns_are_what_tfds_decodes_row_by_row(real):
    tfds = pytest.importorskip("tensorflow_datasets")
    folder = os.path.join(DATA_DIR, "tensorflow_datasets")
    rows = {}
    for features, label in real[:2]:
        for at, pair in enumerate(zip(features["user"], features["movie"], strict=True)):
            rows[pair] = {name: ids[at] for name, ids in features.items()}, label[at]
    ratings = tfds.load(movielens.NAME, split="train[:200]", data_dir=folder, download=False)
    for rating in ratings.as_numpy_iterator():
        row, label = rows[int(rating["user_id"]), int(rating["movie_id"])]
        time = datetime.datetime.fromtimestamp(rating["timestamp"], datetime.timezone.utc)
        assert label == (rating["user_rating"] >= 4)
        assert row["age"] == rating["raw_user_age"] // 10
        assert row["gender"] == rating["user_gender"]
        assert row["occupation"] == rating["user_occupation_label"]
        assert np.base_repr(row["zip"], 36).zfill(3) == rating["user_zip_code"][:3].decode()
        assert [each for each in row["genres"] if each != movielens.PAD] == [
            *rating["movie_genres"]
        ]
        assert rating["movie_title"].decode().endswith(f"({row['year']})")
        assert (row["hour"], row["weekday"]) == (time.hour, (time.weekday() - 3) % 7)


def test_generated_ratings_carry_a_signal_and_say_why_they_are_there(generated):
    train, test, info = generated
    assert (info.source, info.reason) == ("generated", "OSError: no network")
    assert auc(movie_means(*train)[test[0]["movie"]], test[1]) > 0.65


def movie_means(features, label):
    likes = np.bincount(features["movie"], label, minlength=1683)
    return (likes + 1) / (np.bincount(features["movie"], minlength=1683) + 2)


def auc(score, label):
    rank = np.empty(len(score))
    rank[np.argsort(score, kind="stable")] = np.arange(1, len(score) + 1)
    positive = label.sum()
    area = rank[label == 1].sum() - positive * (positive + 1) / 2
    return area / (positive * (len(label) - positive))


def test_load_gives_rows(generated, monkeypatch):
    take_away(monkeypatch)
    train, test, info = movielens.load()
    assert (train.cardinality(), test.cardinality()) == (info.num_train, info.num_test)
    features, label = next(train.as_numpy_iterator())
    assert label == generated[0][1][0]
    assert all(features[name] is not None for name in generated[0][0])


def test_batches_cover_every_row_of_every_part_once(generated):
    arrays = generated[1]
    seen = []
    for part in range(3):
        for features, label in movielens.batches(arrays, 256, part=(part, 3)).as_numpy_iterator():
            seen += zip(features["user"], features["movie"], label, strict=True)
    expected = zip(arrays[0]["user"], arrays[0]["movie"], arrays[1], strict=True)
    assert sorted(seen) == sorted(expected)


def test_shuffled_batches_are_full_and_another_order_every_pass(generated):
    batches = movielens.batches(generated[1], 100, shuffle_seed=1)
    passes = [[label for _, label in batches.as_numpy_iterator()] for _ in range(2)]
    assert {len(label) for label in passes[0]} == {100}
    assert not all(np.array_equal(a, b) for a, b in zip(*passes, strict=True))


def test_a_named_folder_without_the_data_is_an_error(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets")
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        movielens.load(str(tmp_path))
    monkeypatch.setenv("HET_TF_DATA_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "tensorflow_datasets")):
        movielens.load()


@pytest.fixture
def nothing_there(monkeypatch):
    """No data set on this machine; returns the programs that were run to fetch it."""
    run = []

    def hangs(command, timeout, **_):
        run.append(command)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(movielens.subprocess, "run", hangs)
    take_away(monkeypatch)
    return run


def test_a_download_that_hangs_is_given_up(nothing_there, monkeypatch):
    with http.server.HTTPServer(("localhost", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(movielens, "SOURCE", f"http://localhost:{server.server_port}/")
        _, _, info = movielens.load_arrays(download=True)
    assert len(nothing_there) == 1
    assert info.source == "generated"
    assert f"within {movielens.DOWNLOAD_TIMEOUT_S} s" in info.reason


def test_nothing_is_downloaded_without_a_network(nothing_there, monkeypatch):
    monkeypatch.setattr(movielens, "SOURCE", "https://no-such-host.invalid/ml-100k.zip")
    _, _, info = movielens.load_arrays(download=True)
    assert nothing_there == []
    assert info.source == "generated"
    assert "no way to https://no-such-host.invalid" in info.reason


def test_a_host_that_says_nothing_is_not_waited_for(nothing_there, monkeypatch):
    monkeypatch.setattr(movielens, "REACH_TIMEOUT_S", 0.1)
    with socket.create_server(("localhost", 0)) as silent:
        monkeypatch.setattr(movielens, "SOURCE", f"http://localhost:{silent.getsockname()[1]}/")
        _, _, info = movielens.load_arrays(download=True)
    assert nothing_there == []
    assert info.source == "generated"


def test_what_is_there_is_not_asked_for(real, monkeypatch):
    """It is where TFDS looks by itself."""
    monkeypatch.delenv("HET_TF_DATA_DIR")
    monkeypatch.setattr(movielens, "SOURCE", "https://no-such-host.invalid/ml-100k.zip")
    tfds, there = pytest.importorskip("tensorflow_datasets"), f"{DATA_DIR}/tensorflow_datasets"
    load = tfds.load
    monkeypatch.setattr(tfds, "load", lambda name, data_dir, **o: load(name, data_dir=there, **o))
    assert movielens.load_arrays(download=True)[2].source == "movielens"
