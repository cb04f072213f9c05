"""The gradient of looked-up rows goes with the graph that it is in."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf.layers.row_gradients import Call
from het_tf.layers.trainable_lookup import trained


def test_rows_come_out_as_they_are_and_gradients_go_where_they_are_sent():
    rows = [tf.constant([[1.0, 2.0]]), tf.constant([3.0])]
    by, weights = tf.constant(0.0, tf.float16), tf.constant([4.0])
    seen = []

    def update(gradients):
        seen.append([gradient.numpy().tolist() for gradient in gradients])
        return [None, gradients[1] * 2.0]

    with tf.GradientTape(persistent=True) as tape:
        tape.watch([by, weights])
        by_of_call = tf.identity(by)
        out = trained(rows, [by_of_call, weights], update)
        loss = tf.reduce_sum(out[0]) + 5.0 * out[1][0]
    np.testing.assert_equal([each.numpy() for each in out], [each.numpy() for each in rows])
    of_by, of_weights = tape.gradient(loss, [by, weights])
    assert of_by.dtype == tf.float16
    assert of_by.numpy() == 0.0
    assert of_weights.numpy() == [10.0]
    assert tape.gradient(loss, rows) == [None, None]
    assert seen[0] == [[[1.0, 1.0]], [5.0]]


def graph_of_a_step(layer):
    """Trains a step; a weak reference to the graph of its function."""

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
        train_rows(tape, loss, layer)

    ids = tf.constant([[1, 2]], tf.int64)
    step(ids)
    return weakref.ref(step.get_concrete_function(ids).graph)


def test_a_graph_with_a_lookup_goes_when_its_function_does():
    for combiner in (None, "sum"):
        layer = het_tf.layers.HetEmbedding(4, optimizer="sgd", combiner=combiner)
        graph = graph_of_a_step(layer)
        gc.collect()
        assert graph() is None
        assert layer.table.size() == 2


def test_an_eager_call_is_forgotten_with_its_tape():
    layer = het_tf.layers.HetEmbedding(4, optimizer="sgd", weights=[np.ones((3, 4))])
    ids = tf.constant([1, 2], tf.int64)
    layer(ids)
    gc.collect()
    alive = len(_of_calls())
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids))
    assert len(_of_calls()) > alive
    train_rows(tape, loss, layer)
    del tape, loss
    gc.collect()
    assert len(_of_calls()) == alive


def _of_calls():
    return [each for each in gc.get_objects() if type(each) is Call]
