"""MovieLens 1M with implicit feedback: did this user rate this movie?

A folder has train.csv and test.csv, gzipped or not, without a header. A line is a positive example,
`user-gender-age-occupation,item-genre`, all of them ids. Negative examples are drawn.

Source: F. M. Harper, J. A. Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5(4),
2015, doi 10.1145/2827872. GroupLens allows research use and no redistribution.
"""

from __future__ import annotations

import os

import numpy as np

from het_tf.datasets.movielens import Arrays, Column
from het_tf.datasets.text import BadLineError, find, integers
from het_tf.runtime.validation import INT32_MAX, check_integer

NAMES = ("user", "gender", "age", "occupation", "item", "genre")


def load(
    folder: str | os.PathLike[str], negatives: int = 1, seed: int = 0, *, max_bad_lines: int = 0
) -> tuple[Arrays, Arrays, tuple[Column, ...]]:
    """Reads the positive examples of a folder, and draws negative ones.

    Args:
      folder: the folder.
      negatives: number of negative examples after each positive one. They have an item that the
        user has in neither file.
      seed: equal seeds draw equal items.
      max_bad_lines: number of bad lines of a file that are passed over.

    Returns:
      Arrays to train on and to test with, as those of `movielens.load_arrays`, and their columns:
      user, gender, age, occupation, item, genre, each int64 [n]. The ids are those of the files.
      Examples to train on are in random order, since workers take every n-th one.

    Raises:
      FileNotFoundError: a file is missing.
      BadLineError: a line is not as it must be, an item has two genres, or a user has all items.
      ValueError: an argument is out of range. The message names it.
    """
    negatives = check_integer("negatives", negatives, 0, INT32_MAX)
    rng = np.random.default_rng(check_integer("seed", seed, 0, INT32_MAX))
    train, test = (positives(folder, part, max_bad_lines) for part in ("train", "test"))
    rows = np.concatenate([train, test])
    users, user = np.unique(rows[:, 0], return_inverse=True)
    _, places, item = np.unique(rows[:, 4], return_index=True, return_inverse=True)
    items = rows[places, 4:]
    twice = np.flatnonzero(items[item, 1] != rows[:, 5])
    if twice.size:
        raise BadLineError(f"{os.fspath(folder)}: item {rows[twice[0], 4]} has two genres")
    pairs = np.unique(user * len(items) + item)  # Each of a user and an item.
    full = users[np.bincount(pairs // max(len(items), 1)) == len(items)]
    if full.size and negatives:
        raise BadLineError(f"{os.fspath(folder)}: user {full[0]} has all items")

    rows, user = (np.repeat(each, 1 + negatives, axis=0) for each in (rows, user))
    is_positive = np.arange(len(rows)) % (1 + negatives) == 0
    undrawn = np.flatnonzero(~is_positive)
    while undrawn.size:
        item = rng.integers(0, len(items), undrawn.size)
        rows[undrawn, 4:] = items[item]
        pair = user[undrawn] * len(items) + item
        undrawn = undrawn[pairs.take(np.searchsorted(pairs, pair), mode="clip") == pair]
    features = dict(zip(NAMES, rows.T.copy(), strict=True))
    columns = tuple(Column(name, int(ids.max(initial=-1)) + 1) for name, ids in features.items())
    labels, end = is_positive.astype(np.float32), len(train) * (1 + negatives)
    parts = [
        ({name: ids[part] for name, ids in features.items()}, labels[part])
        for part in (rng.permutation(end), slice(end, None))
    ]
    return parts[0], parts[1], columns


def positives(folder: str | os.PathLike[str], part: str, max_bad_lines: int = 0) -> np.ndarray:
    """Reads the positive examples of a part, "train" or "test": int64 [n, 6], columns as NAMES.

    Raises:
      FileNotFoundError: the file is missing.
      BadLineError: a line is not as it must be.
    """
    return integers(find(folder, f"{part}.csv"), "---,-", NAMES, max_bad_lines=max_bad_lines)
