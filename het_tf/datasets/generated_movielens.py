"""Generated ratings in the shape of MovieLens 100K, for machines without the data and a network.

The signal is planted: users and movies have a bias and a few latent factors, and every age prefers
some genres. A model that finds the whole signal reaches an AUC of 0.86. A model that ignores its
input reaches 0.5.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

NUM_RATINGS = 100_000
NUM_USERS = 943
NUM_MOVIES = 1682
NUM_FACTORS = 4


def generate(
    columns: Sequence[Any], pad: int, seed: int = 2022
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Generates ratings. Equal seeds give equal ratings.

    Args:
      columns: `movielens.COLUMNS`, with the sizes and lengths of the features.
      pad: value that pads lists to the length of their column.
      seed: seed of the random generator.

    Returns:
      The features by column name, and the labels, bool [n].
    """
    size = {column.name: column.size for column in columns}
    (max_genres,) = (column.length for column in columns if column.length)
    random = np.random.default_rng(seed)

    user, movie = _pairs(random)
    age = random.integers(1, size["age"], NUM_USERS + 1)
    genres = random.integers(0, size["genres"], (NUM_MOVIES + 1, max_genres))
    genres[np.arange(max_genres) >= random.geometric(0.5, NUM_MOVIES + 1)[:, None]] = pad
    taste = random.normal(0, 1, (size["age"], size["genres"]))
    factors = [random.normal(0, 1, (n + 1, NUM_FACTORS)) for n in (NUM_USERS, NUM_MOVIES)]
    user_bias = random.normal(0, 0.8, NUM_USERS + 1)
    movie_bias = random.normal(0, 1.0, NUM_MOVIES + 1)

    logit = user_bias[user] + movie_bias[movie] + taste[age[user], genres[movie, 0]]
    logit += (factors[0][user] * factors[1][movie]).sum(axis=1) * 0.6
    label = random.random(len(user)) < 1 / (1 + np.exp(-logit))

    gender = random.integers(0, size["gender"], NUM_USERS + 1)
    occupation = random.integers(0, size["occupation"], NUM_USERS + 1)
    zip_prefix = random.integers(0, 1000, NUM_USERS + 1)
    features = {
        "user": user,
        "movie": movie,
        "age": age[user],
        "gender": gender[user],
        "occupation": occupation[user],
        "zip": zip_prefix[user],
        "genres": genres[movie],
        "year": random.integers(1922, 1999, NUM_MOVIES + 1)[movie],
        "hour": random.integers(0, 24, len(user)),
        "weekday": random.integers(0, 7, len(user)),
    }
    return features, label


def _pairs(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws distinct (user, movie) pairs. A few users and a few movies have most of the ratings."""
    activity = random.lognormal(0, 1, NUM_USERS)
    popularity = 1 / (np.arange(NUM_MOVIES) + 30.0)
    drawn = 4 * NUM_RATINGS
    user = random.choice(NUM_USERS, drawn, p=activity / activity.sum())
    movie = random.choice(NUM_MOVIES, drawn, p=popularity / popularity.sum())
    distinct = random.permutation(np.unique(user * (NUM_MOVIES + 1) + movie))[:NUM_RATINGS]
    user, movie = np.divmod(distinct, NUM_MOVIES + 1)
    return user + 1, movie + 1
