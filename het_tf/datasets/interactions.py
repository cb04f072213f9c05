"""Items that users took: lines of "user item", or of "user item item ...".

Video games: J. McAuley et al., files as W.-C. Kang and J. McAuley have them (SASRec, ICDM 2018).
Amazon-Book: R. He and J. McAuley, WWW 2016, split as X. Wang et al. have it (KGAT, KDD 2019).
"""

from __future__ import annotations

import os

import numpy as np

from het_tf.datasets.text import BadLineError, find, integer_lists, integers


def load_sequences(path: str | os.PathLike[str], *, max_bad_lines: int = 0) -> list[np.ndarray]:
    """Reads lines of "user item", grouped by user and in the order of time.

    Returns:
      The items of every user, int64 [items].

    Raises:
      BadLineError: a line does not have two integers, and `max_bad_lines` were passed over.
    """
    pairs = integers(path, " ", ("user", "item"), max_bad_lines=max_bad_lines)
    if not len(pairs):
        return []
    ends = np.flatnonzero(np.diff(pairs[:, 0])) + 1
    users = pairs[np.concatenate([[0], ends]), 0]
    if len(np.unique(users)) < len(users):
        raise BadLineError(f"{os.fspath(path)}: the lines of a user do not follow one another")
    return np.split(pairs[:, 1], ends)


def load_lists(
    folder: str | os.PathLike[str], *, max_bad_lines: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Reads train.txt and test.txt of a folder, gzipped or not: lines of "user item item ...".

    Returns:
      The pairs of the two files, int64 [n, 2]: user and item.

    Raises:
      BadLineError: a line is empty or has no integers from 0 on, and `max_bad_lines` were passed
        over.
    """
    parts = []
    for name in ("train.txt", "test.txt"):
        lists = integer_lists(find(folder, name), max_bad_lines=max_bad_lines)
        users = np.repeat([each[0] for each in lists], [len(each) - 1 for each in lists])
        items = np.concatenate([np.zeros(0, np.int64), *(each[1:] for each in lists)])
        parts.append(np.stack([users.astype(np.int64), items], 1))
    return parts[0], parts[1]


def generate_sequences(path: str | os.PathLike[str], seed: int = 0) -> None:
    """Writes a small file for `load_sequences`. An item is mostly followed by the next number."""
    rng = np.random.default_rng(seed)
    count = 300
    with open(path, "w", encoding="utf-8") as file:
        for user in range(1, 1201):
            item = int(rng.integers(count))
            for _ in range(rng.integers(6, 30)):
                file.write(f"{user} {item + 1}\n")
                item = (item + 1) % count if rng.random() < 0.8 else int(rng.integers(count))


def generate_lists(folder: str | os.PathLike[str], seed: int = 0) -> None:
    """Writes a small folder for `load_lists`. A user takes items of one group."""
    rng = np.random.default_rng(seed)
    groups, size = 10, 20
    with (
        open(os.path.join(folder, "train.txt"), "w", encoding="utf-8") as train,
        open(os.path.join(folder, "test.txt"), "w", encoding="utf-8") as test,
    ):
        for user in range(600):
            items = rng.permutation(size)[:12] + size * (user % groups)
            train.write(f"{user} {' '.join(map(str, items[:8]))}\n")
            test.write(f"{user} {' '.join(map(str, items[8:]))}\n")
