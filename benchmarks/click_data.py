"""The two MovieLens data sets as keys of one embedding table, for benchmarks that measure AUC."""

from __future__ import annotations

import dataclasses

import numpy as np

from het_tf.datasets import implicit_movielens, movielens

# Fields of `movielens_100k`.
GENRES_100K = slice(6, 12)

PAD = -1  # fills up an example with fewer keys than the longest


@dataclasses.dataclass(frozen=True)
class Clicks:
    """Keys: int64 [examples, fields], PAD where a field is missing. Labels: float32 [examples]."""

    train_keys: np.ndarray
    train_labels: np.ndarray
    test_keys: np.ndarray
    test_labels: np.ndarray


def movielens_100k(folder: str) -> Clicks:
    """Does this user like (rate 4 or 5) this movie? 90 % of the ratings to train, 10 % to test.

    Fields: user, movie, age, gender, occupation, zip prefix, up to 6 genres, year of release.

    Args:
      folder: the data_dir of tensorflow-datasets that holds movielens/100k-ratings.
    """
    (train, train_labels), (test, test_labels), _ = movielens.load_arrays(folder)
    return Clicks(_movielens_keys(train), train_labels, _movielens_keys(test), test_labels)


def movielens_1m(folder: str, negatives: int = 1, seed: int = 0) -> Clicks:
    """Did this user rate this movie? Negatives are drawn, for train and test alike.

    Fields: user, gender, age, occupation, movie, genre. Negatives are drawn from all movies, also
    those that the user did rate (1 in 22): that costs every setting the same AUC.

    Args:
      folder: that of `implicit_movielens.load`.
      negatives: for each positive.
      seed: of the draw.
    """
    parts = [implicit_movielens.positives(folder, part) for part in ("train", "test")]
    for keys in parts:
        keys[:, 4:] += 1_000_000  # Ids of users and movies overlap.
    movies = np.unique(np.concatenate(parts)[:, 4:], axis=0)
    rng = np.random.default_rng(seed)
    arrays: list[np.ndarray] = []
    for positives in parts:
        keys = np.repeat(positives[None], 1 + negatives, axis=0)
        keys[1:, :, 4:] = movies[rng.integers(0, len(movies), keys[1:].shape[:2])]
        labels = np.zeros(keys.shape[:2], np.float32)
        labels[0] = 1
        arrays += [keys.reshape(-1, keys.shape[2]), labels.reshape(-1)]
    return Clicks(*arrays)


def movielens_in_time_order(folder: str) -> np.ndarray:
    """Keys (user, movie) of the ratings of MovieLens 100K as they were made: int64 [100000, 2]."""
    import tensorflow_datasets as tfds

    names = ("timestamp", "user_id", "movie_id")
    ratings = tfds.load(movielens.NAME, data_dir=folder, split="train")
    ratings = ratings.map(lambda rating: {name: rating[name] for name in names})
    (columns,) = ratings.batch(1_000_000).as_numpy_iterator()
    order = np.argsort(columns["timestamp"], kind="stable")
    user, movie = (columns[name].astype(np.int64)[order] for name in ("user_id", "movie_id"))
    return np.stack([user, user.max() + 1 + movie], axis=1)


def _movielens_keys(features: movielens.Features) -> np.ndarray:
    fields = []
    offset = 0
    for column in movielens.COLUMNS:
        if column.name in ("hour", "weekday"):  # nothing is learnt from them
            continue
        ids = features[column.name].reshape(len(features["user"]), -1).astype(np.int64)
        fields.append(np.where(ids == movielens.PAD, PAD, ids + offset))
        offset += column.size
    return np.concatenate(fields, axis=1)
