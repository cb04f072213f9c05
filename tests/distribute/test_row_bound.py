"""How many updates of the others a row misses that `fit` reads, counted on three workers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf.keras

STEPS, CLOSURE = 400, 40
HOT = 7


class Misses(keras.metrics.Metric):
    """Steps that read too little: of the others' updates, or of their own.

    A step's rows were checked against their shard when the step `ahead` before it began, or later.
    """

    def __init__(self, num_workers: int, ahead: int, bound: int):
        super().__init__(name="misses")
        self._bound = bound
        # Of the steps of one closure.
        last = {"initializer": "zeros", "aggregation": "none"}
        self._made = self.add_variable(shape=(ahead + 2, num_workers), **last)
        self._own = self.add_variable(shape=(), **last)
        self._counts = self.add_weight(shape=(2,), initializer="zeros")

    def update_state(self, me, row, made):
        missed = tf.reduce_sum((1 - me) * tf.nn.relu(self._made.value[0] - row))
        own = tf.reduce_sum(me * row)
        is_first = tf.reduce_all(self._made.value[-1] == 0)
        lost = tf.logical_not(is_first) & (own != self._own.value + 1)
        self._counts.assign_add(tf.cast([missed > self._bound, lost], tf.float32))
        self._made.assign(tf.concat([self._made.value[1:], made[None]], 0))
        self._own.assign(own)

    def result(self):
        over, lost = tf.unstack(self._counts.value)
        return {"over": over, "lost": lost}


class CountsUpdates(het_tf.keras.Model):
    """Column i of every row is the number of updates of worker i that it has."""

    def lookahead_ids(self, batch):
        return {self.embedding: batch[0]}

    def call(self, ids):
        return self.embedding(ids)

    def train_step(self, data):
        ids, me = data
        with tf.GradientTape() as tape:
            rows = self(ids, training=True)
            loss = -tf.reduce_sum(rows * me)
        row = tf.identity(rows[0])
        worker = tf.argmax(me)
        # That a step has begun is known before it asks how many the others have made.
        self.made[0].scatter_nd_update([[worker]], [row[worker]])
        self.misses.update_state(me, row, self.made[0].read_value())
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return self.misses.result()


@pytest.mark.parametrize(
    ("lookahead", "bounds"),
    [
        (0, (0, 0)),
        (5, (3, 2)),
        pytest.param(5, (0, 0), marks=pytest.mark.exhaustive),
        pytest.param(1, (10, 0), marks=pytest.mark.exhaustive),
        pytest.param(1, (0, 4), marks=pytest.mark.exhaustive),
    ],
)
def test_no_row_misses_more_than_it_may(strategy, lookahead, bounds):
    """Tests of the protocol reach the bounds; here, what workers miss depends on their speed."""
    num_workers = strategy.num_workers
    read_bound, write_bound = bounds
    cache = het_tf.CacheConfig(
        20, read_bound=read_bound, write_bound=write_bound, lookahead=lookahead
    )
    with strategy.scope():
        model = CountsUpdates()
        model.embedding = het_tf.layers.HetEmbedding(
            num_workers,
            embeddings_initializer="zeros",
            optimizer=het_tf.optimizers.SGD(1.0),
            cache=cache,
        )
        model.made = [tf.Variable(tf.zeros(num_workers))]
        held_back = (num_workers - 1) * write_bound
        model.misses = Misses(num_workers, lookahead, read_bound + held_back)
        model.compile(keras.optimizers.SGD(0.0), steps_per_execution=CLOSURE, metrics=[])

    def dataset_fn(context):
        me = tf.one_hot(context.input_pipeline_id, num_workers)
        others = tf.data.Dataset.random(context.input_pipeline_id).map(lambda x: x % 100 + HOT + 1)
        return others.batch(15).map(lambda ids: (tf.concat([[HOT], ids], 0), me))

    logs = model.fit(dataset_fn, steps_per_epoch=STEPS, verbose=0).history
    made = model.embedding.table.lookup([HOT])[0]
    assert made.sum() == STEPS
    np.testing.assert_array_less(model.made[0].numpy(), made)
    assert logs["over"][0] == 0
    assert logs["lost"][0] == 0
