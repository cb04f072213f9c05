"""ServeStep: messages of synchronous steps, and what is wrong with some."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest
import tensorflow as tf

from het_tf import initializers, ops, optimizers

ROW = {
    "dim": 256,
    "optimizer": optimizers.SGD(1.0).spec(),
    "initializer": initializers.spec("zeros"),
}


class Workers:
    """Two workers with caches, a table, and threads in which they wait for each other."""

    def __init__(self, name):
        self.table = ops.table_handle(shared_name=name, shard=0, **ROW)
        self.caches = [
            ops.cache_handle(
                shared_name=f"{name}/{i}",
                capacity=100,
                read_bound=0,
                write_bound=0,
                synchronous=True,
                **ROW,
            )
            for i in range(2)
        ]
        self.steps = ops.step_handle(shared_name=name)
        self.pool = concurrent.futures.ThreadPoolExecutor(2)

    def call(self, place, request, numbers=()):
        """Sends a message in a thread."""
        header = np.asarray(place, np.int64).view(np.uint8)
        numbers = np.asarray(numbers, np.float32).view(np.uint8)
        message = ops.pack_frames([header, request, numbers])
        return self.pool.submit(ops.serve_step, self.steps, [self.table], message)

    def look_up(self, worker, key):
        """A lookup whose request pushes what was updated before."""
        return ops.cache_lookup(
            self.caches[worker], ops.unique_ids(tf.constant([key], tf.int64)), num_shards=1
        )

    def step(self, place, worker, key):
        """A step under way: looks up a key. `end` installs the reply and updates the row."""
        ticket, (request,) = self.look_up(worker, key)
        return worker, ticket, self.call(place, request)

    def end(self, worker, ticket, reply):
        reply, _ = ops.unpack_frames(reply.result(), n=2)
        ops.cache_install(self.caches[worker], ticket, [reply])
        ops.cache_update(self.caches[worker], ticket, tf.ones([1, 256]), 1.0)

    def rows(self):
        keys, values, *_ = ops.table_export(self.table, 0, 1)
        return dict(zip(keys.numpy().tolist(), values.numpy()[:, 0].tolist(), strict=True))


@pytest.fixture
def workers(request):
    made = Workers(request.node.name)
    ops.step_begin(made.steps, 1, 2)
    return made


def test_what_a_member_sent_counts_though_its_round_was_ended(workers):
    """The message outlives its call."""
    for step in workers.step([1, 0, 0, 0], 0, 5), workers.step([1, 1, 0, 0], 1, 6):
        workers.end(*step)
    ticket, (request,) = workers.look_up(0, 7)  # pushes -1 of row 5
    waiting = workers.call([1, 0, 1, 0], request)
    del request
    with pytest.raises(concurrent.futures.TimeoutError):
        waiting.result(timeout=0.2)
    ops.step_begin(workers.steps, 2, 1)
    with pytest.raises(tf.errors.FailedPreconditionError, match="round of the step is over"):
        waiting.result()
    del waiting, ticket
    _ = [tf.fill([size], 1e30) for size in range(64, 4096, 8)]  # takes the place of what is freed
    worker, _, reply = workers.step([2, 0, 0, 1], 1, 8)
    reply.result()
    assert worker == 1
    assert workers.rows() == {5: -1, 6: -1}


def test_sums_of_an_aborted_step_are_forgotten(workers):
    none = tf.zeros([0], tf.uint8)
    aborted = workers.call([1, 0, 0, 0], none, [1000])
    with pytest.raises(concurrent.futures.TimeoutError):
        aborted.result(timeout=0.2)
    ops.step_begin(workers.steps, 2, 2)
    calls = [workers.call([2, member, 0, 0], none, [5]) for member in range(2)]
    for call in calls:
        *_, mean = ops.unpack_frames(call.result(), n=2)
        assert mean.numpy().view(np.float32).tolist() == [5]


@pytest.mark.parametrize(
    ("place", "numbers", "said"),
    [
        ([1, 0, 0], b"", "header of 24 bytes, not 32"),
        ([1, 0, 0, 0], b"12345", "5 bytes of floats"),
        ([1, 2, 0, 0], b"", "member = 2 takes no part in round 1"),
        ([1, 0, 1, 0], b"", "step = 1 of member 0, but the round is at step 0"),
        ([2, 0, 0, 0], b"", "round = 2 of the steps is over"),
    ],
)
def test_bad_messages_are_refused(workers, place, numbers, said):
    header = np.asarray(place, np.int64).view(np.uint8)
    floats = np.frombuffer(numbers, np.uint8)
    message = ops.pack_frames([header, np.zeros(0, np.uint8), floats])
    with pytest.raises(tf.errors.OpError, match=said):
        ops.serve_step(workers.steps, [workers.table], message)
    with pytest.raises(tf.errors.InvalidArgumentError):
        ops.serve_step(workers.steps, [workers.table], message[:-7])


@pytest.mark.parametrize("members", [0, -1, 2**20])
def test_rounds_need_members(workers, members):
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"num_members = {members}"):
        ops.step_begin(workers.steps, 3, members)
