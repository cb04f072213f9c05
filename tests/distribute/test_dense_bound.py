"""How many steps of the others a replica misses, counted on three workers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf.keras

STEPS = 400


class Misses(keras.metrics.Metric):
    """Steps at whose start more than `bound` steps of the others were missed."""

    def __init__(self, num_workers: int, bound: int):
        super().__init__(name="misses")
        self._bound = bound
        self._made = self.add_weight(shape=(2, num_workers), initializer="zeros", name="made")
        self._over = self.add_weight(shape=(), initializer="zeros", name="over")

    def update_state(self, me, replica, made):
        # A step may begin with what was there when the step before it began.
        missed = tf.reduce_sum((1 - me) * tf.nn.relu(self._made.value[0] - replica))
        self._over.assign_add(tf.cast(missed > self._bound, tf.float32))
        self._made.assign(tf.stack([self._made.value[1], made]))

    def result(self):
        return {"over": self._over.value}


class CountsSteps(het_tf.keras.Model):
    """A model with a variable whose element i is the number of steps of worker i."""

    def build_counts(self, num_workers):
        self.counts = self.add_weight(
            shape=(num_workers,), dtype="int64", initializer="zeros", trainable=False
        )

    def train_step(self, data):
        me = data[0][0]
        replica = tf.cast(self.counts.value, tf.float32)
        self.counts.assign_add(tf.cast(me, tf.int64))
        worker = tf.argmax(me)
        # Own steps are always there, and at the start of one those before it have ended.
        self.made[0].scatter_nd_update([[worker]], [replica[worker]])
        self.misses.update_state(me, replica, self.made[0].read_value())
        return {**super().train_step(data), **self.misses.result()}


@pytest.mark.parametrize(
    "staleness",
    [
        4,
        pytest.param(0, marks=pytest.mark.exhaustive),
        pytest.param(16, marks=pytest.mark.exhaustive),
    ],
)
def test_no_replica_misses_more_than_it_may(strategy, staleness):
    num_workers = strategy.num_workers
    strategy.dense_staleness = staleness
    try:
        with strategy.scope():
            inputs = keras.Input((num_workers,))
            model = CountsSteps(inputs, keras.layers.Dense(1)(inputs))
            model.build_counts(num_workers)
            model.made = [tf.Variable(tf.zeros(num_workers))]
            model.misses = Misses(num_workers, num_workers * staleness)
            model.compile(
                keras.optimizers.SGD(1.0), lambda y, p: -p, steps_per_execution=20, metrics=[]
            )
        logs = model.fit(
            lambda context: tf.data.Dataset.from_tensors(
                (tf.one_hot([context.input_pipeline_id], num_workers), tf.zeros([1, 1]))
            ).repeat(),
            steps_per_epoch=STEPS,
            verbose=0,
        ).history
        made = model.counts.numpy()
    finally:
        strategy.dense_staleness = None
    assert made.sum() == STEPS
    np.testing.assert_array_less(model.made[0].numpy(), made)
    assert logs["over"][0] == 0
