"""MovieLens 100K as a click-through task: predict whether a user rates a movie 4 or 5.

The ratings are read through TensorFlow Datasets (`movielens/100k-ratings`). If they are not
available, `load` logs a warning and generates the same number of ratings, with the same columns and
a planted signal.

Source: F. M. Harper, J. A. Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5(4),
2015, doi 10.1145/2827872. GroupLens allows research use and no redistribution.
"""

import concurrent.futures
import dataclasses
import importlib
import logging
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from het_tf.datasets import generated_movielens
from het_tf.runtime.threads import call_in_daemon

NAME = "movielens/100k-ratings"
SOURCE = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"  # The URL that TFDS uses.
REACH_TIMEOUT_S = 3
DOWNLOAD_TIMEOUT_S = 120
LIKED = 4.0  # Smallest rating with a positive label. 55.4 % of the ratings are positive.
PAD = -1  # Pads lists to the length of their column.

Features = dict[str, np.ndarray]
Arrays = tuple[Features, np.ndarray]  # features by column, label float32 [n] in {0, 1}

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Column:
    """An int64 feature of shape [n], or [n, length] padded with PAD, with ids in [0, size).

    The ids of every column start at 0. To share a table, map the columns to disjoint keys.
    """

    name: str
    size: int
    length: int | None = None


COLUMNS = (
    Column("user", 944),
    Column("movie", 1683),
    Column("age", 8),  # decades
    Column("gender", 2),
    Column("occupation", 22),
    Column("zip", 36**3),  # first three characters, including letters (Canada)
    Column("genres", 21, length=6),
    Column("year", 2000),  # year of release, or 0 if unknown
    Column("hour", 24),  # of the rating, UTC
    Column("weekday", 7),  # 0 is Thursday, the first day of Unix time
)


@dataclasses.dataclass(frozen=True)
class Info:
    """Description of the loaded data.

    Attributes:
      source: "movielens" or "generated".
      reason: place of the data, or the error because of which ratings were generated.
      num_train: number of training examples.
      num_test: number of test examples.
      columns: the features.
    """

    source: str
    reason: str
    num_train: int
    num_test: int
    columns: tuple[Column, ...] = COLUMNS


def load(
    data_dir: str | None = None, download: bool = False
) -> tuple[tf.data.Dataset, tf.data.Dataset, Info]:
    """Returns (train, test, info): unbatched data sets of (features by column, label).

    The arguments and the split are those of `load_arrays`. `batches` is a faster way to batches.
    """
    train, test, info = load_arrays(data_dir, download)
    slices = tf.data.Dataset.from_tensor_slices
    return slices(train), slices(test), info


def load_arrays(data_dir: str | None = None, download: bool = False) -> tuple[Arrays, Arrays, Info]:
    """Returns (train, test, info), with all ratings in memory.

    A hash of the (user, movie) pair selects a tenth of the pairs for testing. The split is the same
    on every machine and for every order of the ratings. Nearly every user and movie occurs in both
    parts.

    Args:
      data_dir: folder with the prepared data set, as in `tfds.load`. None: the folder
        `tensorflow_datasets` in $HET_TF_DATA_DIR. Without this variable: the default folder of
        TFDS, or generated ratings if the folder lacks the data set.
      download: whether to download the data set (5 MB) into the default folder if it is missing.
        The attempt ends after REACH_TIMEOUT_S seconds without an answer, and after
        DOWNLOAD_TIMEOUT_S seconds of download.

    Raises:
      FileNotFoundError: `data_dir` or $HET_TF_DATA_DIR is set and lacks the data set.
      ImportError: one of the two is set, and `tensorflow_datasets` is not installed.
    """
    named = data_dir or _named_by_environment()
    try:
        ratings = _read_or_download() if named is None and download else _read(named)
        features, label = _features(ratings), ratings["user_rating"] >= LIKED
        source, reason = "movielens", f"read from {named or 'the default folder of TFDS'}"
    except (ImportError, AssertionError, OSError) as error:  # AssertionError: it is not prepared.
        if named is not None:
            if isinstance(error, ImportError):
                raise
            raise FileNotFoundError(f"{named} does not hold {NAME}: {error}") from error
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        _log.warning("No MovieLens (%s). Training on generated ratings instead.", reason)
        features, label = generated_movielens.generate(COLUMNS, PAD)
        source = "generated"
    test = _is_test(features["user"], features["movie"])
    parts = [
        ({name: column[part] for name, column in features.items()}, label[part].astype(np.float32))
        for part in (~test, test)
    ]
    info = Info(source, reason, num_train=len(parts[0][1]), num_test=len(parts[1][1]))
    return parts[0], parts[1], info


def batches(
    arrays: Arrays,
    batch_size: int,
    shuffle_seed: int | None = None,
    part: tuple[int, int] = (0, 1),
) -> tf.data.Dataset:
    """Returns one pass over the rows of `load_arrays`: batches of (features by column, label).

    The data set gathers whole batches, which is many times faster than batching single rows.

    Args:
      arrays: features and labels from `load_arrays`.
      batch_size: rows in a batch.
      shuffle_seed: seed of the order, which differs in every pass. The last, shorter batch is then
        left out. None: rows are in order.
      part: (i, n) selects every n-th row, starting with row i, such as the rows of worker i of n.
    """
    index, count = part
    features, label = arrays
    rows = {name: tf.constant(column[index::count]) for name, column in features.items()}
    labels = tf.constant(label[index::count])
    order = tf.data.Dataset.range(len(label[index::count]))
    if shuffle_seed is not None:
        order = order.shuffle(order.cardinality(), seed=shuffle_seed)
    order = order.batch(batch_size, drop_remainder=shuffle_seed is not None)

    def gather(at: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        return {name: tf.gather(row, at) for name, row in rows.items()}, tf.gather(labels, at)

    return order.map(gather).prefetch(2)


def _named_by_environment() -> str | None:
    folder = os.environ.get("HET_TF_DATA_DIR")
    return os.path.join(folder, "tensorflow_datasets") if folder else None


def _read_or_download() -> Features:
    try:
        return _read(None)
    except (AssertionError, OSError):
        _check_reachable()
        _download()
        return _read(None)


def _check_reachable() -> None:
    """Raises an OSError if there is no network. TFDS would otherwise wait for minutes."""
    head = urllib.request.Request(SOURCE, method="HEAD")
    # Runs in a thread, because the lookup of a host name has no timeout.
    answer = call_in_daemon(lambda: urllib.request.urlopen(head, timeout=REACH_TIMEOUT_S).close())
    try:
        answer.result(timeout=REACH_TIMEOUT_S)
    except urllib.error.HTTPError:
        pass  # The server answers. TFDS reports the error.
    except urllib.error.URLError as error:
        raise OSError(f"no way to {SOURCE}: {error.reason}") from error
    except (TimeoutError, concurrent.futures.TimeoutError) as error:
        raise OSError(f"no answer from {SOURCE} within {REACH_TIMEOUT_S} s") from error


def _download() -> None:
    """Downloads and prepares the data set in a subprocess, because TFDS has no timeout."""
    _log.warning(
        "Fetching %s, which may take %d s. $HET_TF_DATA_DIR may name a folder that has it.",
        NAME,
        DOWNLOAD_TIMEOUT_S,
    )
    code = f"import tensorflow_datasets as tfds; tfds.builder({NAME!r}).download_and_prepare()"
    try:
        subprocess.run(
            [sys.executable, "-c", code],
            timeout=DOWNLOAD_TIMEOUT_S,
            check=True,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"no download of {NAME} within {DOWNLOAD_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"cannot download {NAME}: {last}") from error


def _read(data_dir: str | None) -> Features:
    """Reads all ratings, by TFDS's names of the features. `movie_genres` is padded."""
    tfds = importlib.import_module("tensorflow_datasets")
    # TFDS finds and checks the files. This function parses all 100,000 rows at once, which takes
    # 1 s on a 2-core machine. TFDS parses single rows, which took 20 s of CPU.
    _, info = tfds.load(NAME, data_dir=data_dir, download=False, with_info=True)
    parsers = {}
    for name, stored in info.features.get_serialized_info().items():
        dtype = tf.int64 if stored.np_dtype == np.bool_ else stored.tf_dtype
        is_list = stored.shape == (None,)
        parsers[name] = tf.io.RaggedFeature(dtype) if is_list else tf.io.FixedLenFeature((), dtype)
    records = tf.data.TFRecordDataset(info.splits["train"].filepaths)
    ratings = tf.io.parse_example(next(iter(records.batch(1 << 30))), parsers)
    ratings["movie_genres"] = ratings["movie_genres"].to_tensor(PAD)
    return {name: column.numpy() for name, column in ratings.items()}


def _features(ratings: Features) -> Features:
    number_of_rows = len(ratings["user_id"])
    genres = np.full((number_of_rows, 6), PAD, np.int64)
    genres[:, : ratings["movie_genres"].shape[1]] = ratings["movie_genres"]
    return {
        "user": ratings["user_id"].astype(np.int64),
        "movie": ratings["movie_id"].astype(np.int64),
        "age": (ratings["raw_user_age"] // 10).astype(np.int64),
        "gender": ratings["user_gender"].astype(np.int64),
        "occupation": ratings["user_occupation_label"].astype(np.int64),
        "zip": _per_distinct(ratings["user_zip_code"], lambda code: int(code[:3], 36)),
        "genres": genres,
        "year": _per_distinct(ratings["movie_title"], _release_year),
        "hour": ratings["timestamp"] // 3600 % 24,
        "weekday": ratings["timestamp"] // 86400 % 7,
    }


def _release_year(title: str) -> int:
    year = re.search(r"\((\d{4})\)\s*$", title)
    return int(year[1]) if year else 0


def _per_distinct(texts: np.ndarray, number: Callable[[str], int]) -> np.ndarray:
    """Returns `number(text)` for every text, int64 [n]. Calls it once per distinct text."""
    distinct, at = np.unique(texts.astype(bytes), return_inverse=True)
    return np.array([number(text.decode()) for text in distinct], np.int64)[at]


def _is_test(user: np.ndarray, movie: np.ndarray) -> np.ndarray:
    mixed = (user.astype(np.uint64) << np.uint64(20)) + movie.astype(np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: high bits depend on all bits.
    return (mixed >> np.uint64(32)) % np.uint64(10) == 0
