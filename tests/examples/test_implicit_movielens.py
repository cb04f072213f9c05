"""MovieLens 1M with implicit feedback: what is read, and which negative examples are drawn."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest

from het_tf.datasets import implicit_movielens, movielens, text

DATA_DIR = os.environ.get("HET_TF_DATA_DIR")


@pytest.fixture
def folder(tmp_path):
    """Two users; 4 of 5 items of the first, 1 of the second."""
    with gzip.open(tmp_path / "train.csv.gz", "wt") as file:
        file.write("1-6-7-8,1-10\n1-6-7-8,2-11\n1-6-7-8,3-10\n2-6-9-8,5-10\n")
    (tmp_path / "test.csv").write_text("1-6-7-8,4-11\n")
    return tmp_path


def test_negatives_have_items_that_the_user_has_in_neither_file(folder):
    train, test, columns = implicit_movielens.load(folder, negatives=20)
    assert {column.name: column.size for column in columns} == {
        "user": 3,
        "gender": 7,
        "age": 10,
        "occupation": 9,
        "item": 6,
        "genre": 12,
    }
    features, labels = train
    assert labels.dtype == np.float32
    assert all(each.dtype == np.int64 for each in features.values())
    rows = np.stack(list(features.values()), 1)
    assert np.unique(rows[labels == 1], axis=0).tolist() == [
        [1, 6, 7, 8, 1, 10],
        [1, 6, 7, 8, 2, 11],
        [1, 6, 7, 8, 3, 10],
        [2, 6, 9, 8, 5, 10],
    ]
    drawn = rows[labels == 0]
    assert np.unique(drawn[drawn[:, 0] == 1], axis=0).tolist() == [[1, 6, 7, 8, 5, 10]]
    assert np.unique(drawn[drawn[:, 0] == 2], axis=0).tolist() == [
        [2, 6, 9, 8, 1, 10],
        [2, 6, 9, 8, 2, 11],
        [2, 6, 9, 8, 3, 10],
        [2, 6, 9, 8, 4, 11],
    ]
    assert test[0]["item"].tolist() == [4] + 20 * [5]
    assert test[1].tolist() == [1.0] + 20 * [0.0]


def test_a_seed_draws_items(folder):
    drawn = [implicit_movielens.load(folder, 20, seed)[0][0]["item"].tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert implicit_movielens.load(folder, 0)[0][1].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1-6-7,8-4-11", "test.csv, line 1 is '1-6-7,8-4-11', not 'user-gender-age-occupation,"),
        ("1-6-7-8,4-x", "test.csv, line 1, column 'genre': 'x' is no integer"),
        ("1-6-7-8,1-11", ": item 1 has two genres"),
        ("1-6-7-8,4-10\n1-6-7-8,5-10", ": user 1 has all items"),
    ],
)
def test_bad_data_is_named(folder, line, message):
    (folder / "test.csv").write_text(f"{line}\n")
    with pytest.raises(text.BadLineError, match=message):
        implicit_movielens.load(folder)
    with pytest.raises(ValueError, match=r"negatives must be an integer from 0 to .* not -1"):
        implicit_movielens.load(folder, -1)


def test_real_interactions():
    if not DATA_DIR:
        pytest.skip("HET_TF_DATA_DIR is not set: MovieLens 1M itself is not tested")
    train, test, columns = implicit_movielens.load(os.path.join(DATA_DIR, "movielens_1m_implicit"))
    assert (train[1].size, test[1].size) == (2 * 994_169, 2 * 6_040)
    assert train[1].mean() == test[1].mean() == 0.5
    assert np.count_nonzero(np.bincount(test[0]["user"])) == 6040
    assert np.count_nonzero(np.bincount(train[0]["item"])) == 3706
    likes = np.bincount(train[0]["item"], train[1], minlength=columns[4].size)
    by_popularity = likes[test[0]["item"]].reshape(-1, 2)
    assert 0.7 < (by_popularity[:, 0] > by_popularity[:, 1]).mean() < 0.9
    features, _ = next(movielens.batches(test, 64, shuffle_seed=0).as_numpy_iterator())
    assert set(features) == {column.name for column in columns}
