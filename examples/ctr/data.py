"""Clicks to train on: ratings of movies, or text files in Criteo's or Avazu's format."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence

import tensorflow as tf

import het_tf
from het_tf.datasets import clicks, movielens
from het_tf.datasets.movielens import Column

FORMATS = {"criteo": clicks.CRITEO, "avazu": clicks.AVAZU}
_SHUFFLED = 20_000  # examples among which the next one is drawn
_HASH = 2**40  # hashes of a column

Data = Callable[[tf.distribute.InputContext], tf.data.Dataset]


@dataclasses.dataclass(frozen=True)
class Clicks:
    """Batches of (features by column, label), and what a model must know of them.

    Attributes:
      train: makes the batches of a worker.
      test: the same, to test with, or batches.
      columns: columns of ids.
      crosses: pairs of columns whose combinations tell something.
      integers: length of the feature "integers". 0: there is none.
    """

    train: Data
    test: Data | tf.data.Dataset
    columns: Sequence[Column]
    crosses: Sequence[tuple[str, str]] = ()
    integers: int = 0


def ratings(train: movielens.Arrays, test: movielens.Arrays, columns, batch_size: int) -> Clicks:
    """Ratings in memory. Each worker trains on its part."""

    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        worker = context.input_pipeline_id
        part = worker, context.num_input_pipelines
        return movielens.batches(train, batch_size, shuffle_seed=worker, part=part)

    item = "movie" if "movie" in train[0] else "item"
    crosses = [(left, item) for left in ("age", "gender", "occupation")]
    return Clicks(of_worker, movielens.batches(test, 2048), columns, crosses)


def planned(
    clicks: Clicks,
    ratings: movielens.Arrays,
    schedule: str,
    batch_size: int,
    capacity: int | None,
    hot_rows: int,
) -> Clicks:
    """Ratings in memory, in an order that saves traffic: "herald" or "fae" (het_tf.data).

    The plan leaves out the genres, of which there are few, and the crosses, which follow from the
    other columns.
    """

    def ids_of(features: dict[str, tf.Tensor], label: tf.Tensor) -> list[tf.Tensor]:
        return [ids for ids in features.values() if ids.shape.rank == 1]

    def all_ratings() -> tf.data.Dataset:
        return movielens.batches(ratings, batch_size, shuffle_seed=0)

    def herald(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return het_tf.data.location_aware(
            all_ratings(), ids_of, context, batch_size=batch_size, capacity=capacity
        )

    def fae(context: tf.distribute.InputContext) -> tf.data.Dataset:
        share = clicks.train(context)
        return het_tf.data.hot_batches(share, ids_of, hot, batch_size=batch_size)

    if schedule == "herald":
        return dataclasses.replace(clicks, train=herald)
    hot = het_tf.data.hot_rows(all_ratings(), ids_of, hot_rows)
    print(f"Hot rows: {hot.accesses:.0%} of the ids, {hot.examples:.0%} of the ratings.")
    return dataclasses.replace(clicks, train=fae)


def files(
    form: clicks.Format,
    train: Sequence[str],
    test: Sequence[str],
    batch_size: int,
    hash_bins: int = 0,
) -> Clicks:
    """Text files, which the workers read while they train, each its part.

    With `hash_bins`, the categories of a column share so many rows. 0: each has its own.
    """
    names = [form.columns[i].name for i in form.of_kind("category")]

    def by_column(features: dict[str, tf.Tensor], label: tf.Tensor):
        ids = features.pop("categories") % _HASH % (hash_bins or _HASH)
        return features | dict(zip(names, tf.unstack(ids, axis=1), strict=True)), label

    def train_data(context: tf.distribute.InputContext) -> tf.data.Dataset:
        data = clicks.read(train, form, batch_size, context=context, shuffle=_SHUFFLED)
        return data.map(by_column)

    def test_data(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return clicks.read(test, form, 2048, context=context).map(by_column)

    columns = [Column(name, hash_bins or _HASH) for name in names]
    return Clicks(train_data, test_data, columns, integers=len(form.of_kind("integer")))


def generated(form: clicks.Format, batch_size: int, hash_bins: int = 0) -> Clicks:
    """Clicks that are made up."""
    folder = tempfile.mkdtemp(prefix="het_tf_clicks_")
    paths = [os.path.join(folder, name) for name in ("train.txt", "test.txt")]
    for seed, (path, examples) in enumerate(zip(paths, (40_000, 8_000), strict=True)):
        clicks.generate(path, examples, seed, form)
    return files(form, paths[:1], paths[1:], batch_size, hash_bins)
