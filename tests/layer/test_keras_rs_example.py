"""keras-rs's own examples with one import changed: the calls that they make, in their order.

The first is keras.io's "DistributedEmbedding using TPU SparseCore and TensorFlow"; the others are
those in the docstring of `DistributedEmbedding` in keras-rs 0.4.0. Left out is what they do for
TPUs (a `TPUStrategy`, `placement="sparsecore"`); the data is made here. With `import keras_rs` in
the place of the changed import they run, too, on 0.4.0, where a table has an optimizer of its own
on SparseCores alone: elsewhere they learn less than is asked for here.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf as keras_rs  # was: import keras_rs

USERS, MOVIES, DIM, BATCH = 60, 40, 8, 32


def ratings(first, last):
    """Batches of (ids of users and movies, a rating from 0 to 1 that depends on both)."""
    random = np.random.default_rng(0)
    users, movies = random.integers(1, USERS, 2000), random.integers(1, MOVIES, 2000)
    features = {"user_id": users.astype(np.int32), "movie_id": movies.astype(np.int32)}
    labels = (users % 3 + movies % 2).astype(np.float32) / 3
    dataset = tf.data.Dataset.from_tensor_slices((features, labels))
    return dataset.skip(first).take(last - first).batch(BATCH, drop_remainder=True).cache()


def table(name, vocabulary_size, **arguments):
    return keras_rs.layers.TableConfig(
        name=name, vocabulary_size=vocabulary_size, embedding_dim=DIM, **arguments
    )


def feature(name, of_table, **arguments):
    return keras_rs.layers.FeatureConfig(
        name=name,
        table=of_table,
        input_shape=(BATCH,),
        output_shape=(BATCH, DIM),
        **arguments,
    )


class Ranking(keras.Model):
    def __init__(self, feature_configs):
        super().__init__()
        self.embedding = keras_rs.layers.DistributedEmbedding(feature_configs=feature_configs)
        self.tower = keras.Sequential(
            [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)]
        )

    def call(self, features):
        embedded = self.embedding(features)
        both = [embedded["user_id"], embedded["movie_id"]]
        return self.tower(keras.ops.concatenate(both, axis=1))


@pytest.mark.exhaustive
def test_the_tutorial_of_keras_io():
    keras.utils.set_random_seed(1)
    movie_table = table("movie_table", MOVIES + 1, optimizer="adam", placement="auto")
    user_table = table("user_table", USERS + 1, optimizer="adam", placement="auto")
    configs = {"movie_id": feature("movie", movie_table), "user_id": feature("user", user_table)}
    model = Ranking(configs)
    model.compile(
        loss=keras.losses.MeanSquaredError(),
        metrics=[keras.metrics.RootMeanSquaredError()],
        optimizer="adagrad",
    )
    history = model.fit(ratings(0, 1600), epochs=20, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    logs = model.evaluate(ratings(1600, 2000), return_dict=True, verbose=0)
    assert set(logs) == {"loss", "root_mean_squared_error"}
    # Of what a constant would be wrong: the standard deviation of the ratings.
    assert logs["root_mean_squared_error"] < 0.7 * np.std([0, 1, 2, 1, 2, 3]) / 3
    tables = model.embedding.get_embedding_tables()
    assert {name: tuple(rows.shape) for name, rows in tables.items()} == {
        "movie_table": (MOVIES + 1, DIM),
        "user_table": (USERS + 1, DIM),
    }


def make_layer(**arguments):
    table1 = table("table1", USERS, placement="auto", **arguments)
    table2 = table("table2", MOVIES, **arguments)
    configs = {"feature1": feature("feature1", table1), "feature2": feature("feature2", table2)}
    return keras_rs.layers.DistributedEmbedding(configs)


def features():
    random = np.random.default_rng(0)
    return {
        "feature1": random.integers(0, USERS, BATCH * 8).astype(np.int32),
        "feature2": random.integers(0, MOVIES, BATCH * 8).astype(np.int32),
    }


def test_the_docstrings_use_in_a_keras_model():
    embedding = make_layer()
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in features()}
    outputs = keras.layers.Add()(list(embedding(inputs).values()))
    model = keras_rs.keras.Model(inputs, keras.layers.Dense(1)(outputs))
    model.compile(loss=keras.losses.MeanSquaredError(), optimizer="adam")
    labels = features()["feature1"] % 2
    dataset = tf.data.Dataset.from_tensor_slices((features(), labels)).batch(BATCH)
    losses = model.fit(dataset, epochs=10, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_the_docstrings_direct_invocation():
    embedding = make_layer(optimizer="adam")  # nothing is compiled
    given = features()
    weights = {name: np.ones(len(ids), np.float32) for name, ids in given.items()}
    labels = {name: np.ones((len(ids), DIM), np.float32) for name, ids in given.items()}

    @tf.function
    def looked_up(inputs, weights=None):
        return embedding(inputs, weights)

    first = {name: ids[:BATCH] for name, ids in given.items()}
    before = looked_up(first, {name: each[:BATCH] for name, each in weights.items()})
    assert {name: tuple(rows.shape) for name, rows in before.items()} == {
        "feature1": (BATCH, DIM),
        "feature2": (BATCH, DIM),
    }
    dataset = tf.data.Dataset.from_tensor_slices(((given, weights), labels)).batch(BATCH)

    @tf.function
    def run_loop(iterator):
        losses = tf.TensorArray(tf.float32, 8)
        for i in tf.range(8):
            (inputs, weights), labels = next(iterator)
            with tf.GradientTape() as tape:
                result = embedding(inputs, weights)
                loss = tf.add_n(
                    [
                        tf.reduce_sum(keras.losses.mean_squared_error(labels[name], result[name]))
                        for name in result
                    ]
                )
            train_rows(tape, loss, embedding)
            losses = losses.write(i, loss)
        return losses.stack()

    losses = run_loop(iter(dataset))
    assert losses.shape == (8,)
    for name, rows in looked_up(first).items():
        further, nearer = (np.linalg.norm(1 - x, axis=1) for x in (before[name], rows))
        assert np.all(nearer < further)
