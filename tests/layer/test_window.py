"""The queue of prepared steps, in this process."""

from __future__ import annotations

import concurrent.futures

import pytest
import tensorflow as tf

from het_tf.keras.worker_step.step_queue import Window
from het_tf.runtime.threads import call_in_daemon


@pytest.fixture
def window():
    made = Window(2)
    # One step is prepared, and a closure that failed had begun with another.
    made.reserve_op()
    made.put_op([tf.constant(7)])
    made.reserve_op()
    return made


def test_what_a_failed_closure_had_taken_is_free_again(window):
    assert window.open_op(keeps=True) == 1
    call_in_daemon(window.reserve_op).result(timeout=30)
    window.put_op([tf.constant(8)])
    for value in (7, 8):
        step, waited = window.take_op()
        (component,) = tf.raw_ops.OptionalGetValue(
            optional=step, output_types=[tf.int32], output_shapes=[[]]
        )
        assert (component, waited) == (value, 0)
    assert window.open_op(keeps=True) == 0


def test_steps_of_a_closure_that_brings_its_batches_are_for_nobody_else(window):
    assert window.open_op(keeps=False) == 0
    for _ in range(window.size):
        call_in_daemon(window.reserve_op).result(timeout=30)
    window.put_op([tf.constant(8)])
    step, waited = window.take_op()
    (component,) = tf.raw_ops.OptionalGetValue(
        optional=step, output_types=[tf.int32], output_shapes=[[]]
    )
    assert (component, waited) == (8, 0)


def test_a_window_grows_while_steps_wait():
    window = Window(3, start=1)

    def places():
        assert window.open_op(keeps=False) == 0
        return int(window.width)

    assert places() == 1
    window.reserve_op()
    waiting = call_in_daemon(window.reserve_op)
    with pytest.raises(concurrent.futures.TimeoutError):
        waiting.result(timeout=0.2)
    window.open_op(keeps=False)  # Frees the places.
    waiting.result(timeout=30)
    window.adapt_op(100, 1)
    assert places() == 1, "one step in 100"
    for _ in range(3):
        window.adapt_op(16, 1)
        places()
    assert places() == 2
    for _ in range(10):
        window.adapt_op(16, 16)
        places()
    assert places() == 3, "never beyond its size"
    for _ in range(3):
        call_in_daemon(window.reserve_op).result(timeout=30)
