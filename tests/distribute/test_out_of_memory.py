"""A parameter server that has not the memory for a request: it lives, and says so."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import small_models as sm
import tensorflow as tf

import het_tf
from het_tf import ops
from het_tf.distribute.closure_runner import ClosureRunner
from het_tf.distribute.failures import probes

FLOATS = 2**45  # more than any machine has


@tf.function(input_signature=[tf.TensorSpec([8], tf.uint8)], autograph=False)
def allocate(request):
    count = tf.bitcast(request, tf.int64)
    return tf.cast([tf.reduce_sum(tf.fill([count], 1.0))], tf.uint8)


def allocate_on_ps(index: int, count: tf.Tensor) -> tf.Tensor:
    """In the way in which a cache reaches a table."""
    calls = ops.call_servers(
        [tf.bitcast(count, tf.uint8)],
        devices=[f"/job:ps/replica:0/task:{index}/device:CPU:0"],
        functions=[allocate.get_concrete_function()],
    )
    (reply,) = ops.await_replies(calls, n=1)
    return reply[0]


def test_a_closure_raises_what_the_server_said(strategy):
    closure = tf.function(lambda count: allocate_on_ps(1, count), autograph=False)

    def run(count):
        with ClosureRunner(strategy) as runner:
            runner.schedule(closure, (tf.constant(count, tf.int64),), None)
            return runner.wait()[1]

    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating tensor"):
        run(FLOATS)
    assert run(10) == 10  # the server goes on


def test_fit_raises_what_the_server_said_and_does_not_try_again(strategy):
    class Allocating(het_tf.keras.Model):
        def train_step(self, data):
            with tf.control_dependencies([tries.assign_add(1)]):
                count = tf.where(self.optimizer.iterations >= 3, tf.constant(FLOATS, tf.int64), 10)
            with tf.control_dependencies([allocate_on_ps(0, count)]):
                return super().train_step(data)

    with strategy.scope():
        tries = tf.Variable(0)
        model = sm.make_classifier(Allocating)
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", steps_per_execution=1)
    x, y = sm.make_data(400)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating tensor"):
        model.fit(x, y, batch_size=4, verbose=0)
    assert 3 < tries.numpy() <= 3 + 2 * 2 * strategy.num_workers
    assert np.isfinite(model.evaluate(x, y, batch_size=40, verbose=0))


def test_a_server_that_answers_so_is_not_asked_whether_it_lives(strategy, monkeypatch):
    text = "no memory for 512 bytes [/job:ps/replica:0/task:1]"
    error = tf.errors.ResourceExhaustedError(None, None, text)
    monkeypatch.setattr(probes, "probe", lambda *_: probes.TaskState.SILENT)
    assert strategy.explain(error) is error
