"""Calls of all parameter servers at once."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
import tensorflow as tf

from het_tf import ops
from het_tf.compat.function_graphs import run_beside
from het_tf.distribute.closure_runner import ClosureRunner
from het_tf.runtime.broadcast import cluster_devices
from het_tf.tables.exchange import Exchange

BYTES = tf.TensorSpec([None], tf.uint8)


class Echo:
    """Adds its shard and ten times its number to the bytes it is asked."""

    def __init__(self, number: int = 0, servers: slice = slice(None)):
        self._number = number
        self.devices = cluster_devices("ps")[servers]

    def serve_op(self, shard, request):
        return request + tf.cast(10 * self._number + shard, tf.uint8)


class Refuses:
    """Has an error for an answer."""

    def __init__(self):
        self.devices = cluster_devices("ps")

    def serve_op(self, shard, request):
        return tf.ensure_shape(request, [1000 + shard])


def call_on_a_worker(strategy, closure):
    with ClosureRunner(strategy) as runner:
        runner.schedule(tf.function(closure, autograph=False), (), None)
        return runner.wait()[1]


def message(*values):
    return tf.constant(values, tf.uint8)


def test_every_party_gets_what_its_shards_answered(strategy):
    # The last two have one shard each.
    exchange = Exchange([Echo(0), Echo(1), Echo(2, slice(1, 2)), Echo(3, slice(0, 1))])

    def closure():
        replies = exchange.send_op(
            [[message(5), message(6, 7)], [message(), message(8)], [message(1)], [message(2)]]
        )
        return tf.concat([tf.concat(party, 0) for party in replies], 0), tf.size(replies[1][0])

    replies, nothing = call_on_a_worker(strategy, closure)
    np.testing.assert_array_equal(replies, [5, 7, 8, 19, 21, 32])
    assert nothing == 0


@pytest.fixture
def meeting():
    """A function that returns once two calls of it are under way."""
    name = uuid.uuid4().hex

    @tf.function(input_signature=[BYTES], autograph=False)
    def meet(request):
        queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.uint8], shared_name=name)
        with tf.control_dependencies(
            [tf.raw_ops.QueueEnqueueV2(handle=queue, components=[request[0]])]
        ):
            size = tf.while_loop(
                lambda n: n < 2,
                lambda n: [tf.raw_ops.QueueSizeV2(handle=queue)],
                [tf.constant(0)],
                parallel_iterations=1,
            )[0]
        return tf.cast([size], tf.uint8)

    return meet.get_concrete_function()


def test_all_are_called_at_once(strategy, meeting):
    first = cluster_devices("ps")[0]

    def closure():
        calls = ops.call_servers(
            [message(1), message(2)], devices=[first, first], functions=[meeting, meeting]
        )
        return tf.concat(ops.await_replies(calls, n=2), 0)

    np.testing.assert_array_equal(call_on_a_worker(strategy, closure), [2, 2])


def test_calls_overlap_those_that_nobody_has_awaited_yet(strategy, meeting):
    first = cluster_devices("ps")[0]

    def closure():
        one, two = (
            ops.call_servers([message(n)], devices=[first], functions=[meeting]) for n in (1, 2)
        )
        again = ops.await_replies(two, n=1)
        with tf.control_dependencies(again):
            return tf.concat([*ops.await_replies(one, n=1), *ops.await_replies(two, n=1)], 0)

    np.testing.assert_array_equal(call_on_a_worker(strategy, closure), [2, 2])


@pytest.fixture
def silence():
    """A function that does not return."""

    @tf.function(input_signature=[BYTES], autograph=False)
    def wait(request):
        queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.uint8], shared_name="silence")
        return tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.uint8])[0]

    return wait.get_concrete_function()


def test_a_closure_may_end_before_its_calls(strategy, silence):
    def closure():
        calls = ops.call_servers(
            [message(1)], devices=cluster_devices("ps")[:1], functions=[silence]
        )
        with tf.control_dependencies([calls]):
            return tf.constant(3)

    assert call_on_a_worker(strategy, closure) == 3


def test_a_step_that_fails_does_not_wait_for_replies(strategy, silence):
    def closure():
        calls = ops.call_servers(
            [message(1)], devices=cluster_devices("ps")[:1], functions=[silence]
        )
        with tf.control_dependencies([calls]):
            wrong = tf.debugging.Assert(tf.random.uniform([]) > 2, ["no such number"])
        with tf.control_dependencies([wrong]):
            nothing = tf.zeros([], tf.uint8)
        return ops.await_replies(calls, n=1)[0] + nothing

    with pytest.raises(tf.errors.InvalidArgumentError, match="no such number"):
        call_on_a_worker(strategy, closure)


def test_what_holds_no_calls_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="calls does not hold a Het>Calls"):
        ops.await_replies(tf.raw_ops.OptionalNone(), n=1)


def test_replies_are_awaited_from_all_who_were_called(strategy):
    exchange = Exchange([Echo()])

    def closure():
        return ops.await_replies(exchange.call_op([[message(1), message(2)]]), n=3)

    with pytest.raises(tf.errors.InvalidArgumentError, match="n = 3, but there are 2 calls"):
        call_on_a_worker(strategy, closure)


def test_who_is_asked_nothing_is_not_called(strategy):
    exchange = Exchange([Refuses()])

    def closure():
        ((first, second),) = exchange.send_op([[message(), message()]])
        return tf.size(first) + tf.size(second)

    assert call_on_a_worker(strategy, closure) == 0


def test_the_error_of_a_server_is_the_error(strategy):
    exchange = Exchange([Refuses()])

    def closure():
        return exchange.send_op([[message(1), message(2, 3)]])

    with pytest.raises(tf.errors.InvalidArgumentError, match="expected shape"):
        call_on_a_worker(strategy, closure)


@pytest.mark.parametrize(
    ("devices", "count"), [([], 1), (["/job:ps/replica:0/task:0/device:CPU:0"], 2)]
)
def test_lists_of_unequal_length(strategy, devices, count):
    echo = tf.function(tf.identity, input_signature=[BYTES], autograph=False)
    functions = [echo.get_concrete_function()] * count

    def closure():
        calls = ops.call_servers([message(1)] * count, devices=devices, functions=functions)
        return ops.await_replies(calls, n=count)

    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="devices"):
        call_on_a_worker(strategy, closure)


def test_first_calls_beside_large_ones(strategy):
    """Registering a function while another call is being sent: a race in TensorFlow 2.21."""
    large, loops, rounds = 1 << 20, 4, 8

    def closure():
        def loop(number):
            exchanges = [Exchange([Echo(number)]) for _ in range(rounds)]
            wrong = tf.constant(0)

            def turn(i, wrong):
                # Every branch's functions are registered when it is first taken.
                def call(exchange):
                    request = tf.fill([large], tf.cast(number, tf.uint8))
                    ((one, two),) = exchange.send_op([[request, request]])
                    expected = 11 * number
                    return tf.math.count_nonzero(
                        tf.cast(one, tf.int32) - expected, dtype=tf.int32
                    ) + tf.math.count_nonzero(tf.cast(two, tf.int32) - expected - 1, dtype=tf.int32)

                branches = [lambda exchange=exchange: call(exchange) for exchange in exchanges]
                return i + 1, wrong + tf.switch_case(i, branches)

            return tf.while_loop(
                lambda i, _: i < rounds, turn, [tf.constant(0), wrong], parallel_iterations=1
            )[1]

        return tf.stack([run_beside(lambda number=number: loop(number)) for number in range(loops)])

    np.testing.assert_array_equal(call_on_a_worker(strategy, closure), [0] * loops)
