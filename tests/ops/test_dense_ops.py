"""The ops of the dense variables, one by one, in this process."""

from __future__ import annotations

import json
import pathlib
import uuid

import numpy as np
import program_runner
import pytest
import tensorflow as tf

from het_tf import ops

REFUSED = tf.errors.InvalidArgumentError
ATTRIBUTES = {
    "dtypes": [tf.float32, tf.int64, tf.float32, tf.int64],
    "shapes": [[3], [], [2, 2], [2]],
    "kinds": ["float", "counter", "own", "seed"],
}


class Training:
    """A replica and its one server."""

    def __init__(self, num_workers=1, staleness=0, **attributes):
        name = uuid.uuid4().hex
        self.replica = ops.replica_handle(
            shared_name=name,
            num_shards=1,
            num_workers=num_workers,
            staleness=staleness,
            **{**ATTRIBUTES, **attributes},
        )
        self.shard = ops.dense_handle(shared_name=f"{name}/0")
        rest = np.arange(4, dtype=np.float32).tobytes() + np.array([7, 8], np.int64).tobytes()
        self.set([1.0, 2.0, 3.0], [5], np.frombuffer(rest, np.uint8))

    def set(self, floats, counters, rest):
        owed = np.zeros(len(floats), np.float32)
        counters = np.array(counters, np.int64)
        ops.dense_set(
            self.shard,
            np.array(floats, np.float32),
            owed,
            counters,
            rest,
            np.int64(0),
            num_workers=1,
        )

    @property
    def variables(self):
        return ops.replica_variables(
            self.replica, n=4, dtypes=ATTRIBUTES["dtypes"], shapes=ATTRIBUTES["shapes"]
        )

    def read(self, i):
        return tf.raw_ops.ReadVariableOp(
            resource=self.variables[i], dtype=ATTRIBUTES["dtypes"][i]
        ).numpy()

    def exchange(self):
        ticket, requests = ops.replica_request(self.replica, num_shards=1)
        replies = [ops.dense_sync(self.shard, requests[0])]
        ops.replica_receive(self.replica, ticket, replies)

    def settle(self, steps, reads=True):
        steps = tf.constant(steps, tf.int64)
        while bool(ops.replica_settle(self.replica, self.variables, steps, reads=reads)):
            self.exchange()
            steps, reads = tf.constant(0, tf.int64), False


def test_a_step_comes_to_the_server():
    training = Training()
    training.settle(0)
    assert training.read(0).tolist() == [1, 2, 3]
    assert training.read(2).tolist() == [[0, 1], [2, 3]]
    assert training.read(3).tolist() == [7, 8], "the first worker's seeds are those of one process"
    variables = training.variables
    tf.raw_ops.AssignAddVariableOp(resource=variables[0], value=tf.constant([1.0, 0.0, -1.0]))
    tf.raw_ops.AssignVariableOp(resource=variables[1], value=tf.constant(6, tf.int64))
    training.settle(1, reads=False)
    floats, _, counters = ops.dense_get(training.shard)
    assert floats.numpy().tolist() == [2, 2, 2]
    assert counters.numpy().tolist() == [6]
    names, values = ops.replica_stats(training.replica)
    stats = dict(zip(names.numpy().tolist(), values.numpy().tolist(), strict=True))
    assert stats[b"steps"] == stats[b"steps_sent"] == 1
    assert ops.replica_report(training.replica).numpy()[2:].tolist() == values.numpy().tolist()
    assert ops.replica_counter_names().numpy().tolist() == names.numpy().tolist()


def replicas_to_push():
    return {tuple(row) for row in ops.process_replicas().numpy().tolist()}


def test_a_replica_is_found_by_its_number_while_it_holds_steps():
    before = replicas_to_push()
    training = Training(staleness=9)
    training.settle(0)
    assert replicas_to_push() == before
    tf.raw_ops.AssignAddVariableOp(resource=training.variables[0], value=tf.constant([1.0, 0, -1]))
    training.settle(1, reads=False)
    ((replica_id, incarnation),) = replicas_to_push() - before
    assert incarnation in ops.process_dense_shards().numpy()
    assert replica_id in ops.process_replicas(all=True).numpy()[:, 0]

    replica, shard = ops.process_replica(replica_id), ops.process_dense_shard(incarnation)
    assert ops.replica_settle(replica, [], tf.constant(0, tf.int64), reads=False, all=True)
    ticket, (request,) = ops.replica_request(replica, num_shards=1)
    ops.replica_receive(replica, ticket, [ops.dense_sync(shard, request)])
    assert replicas_to_push() == before
    assert ops.dense_get(training.shard).floats.numpy().tolist() == [2, 2, 2]


def test_what_was_read_before_stays():
    training = Training()
    training.settle(0)
    before = tf.raw_ops.ReadVariableOp(resource=training.variables[0], dtype=tf.float32)
    training.set([9.0, 9.0, 9.0], [0], np.zeros(32, np.uint8))
    tf.raw_ops.AssignAddVariableOp(resource=training.variables[0], value=tf.ones(3))
    training.settle(1)
    training.settle(0)
    assert training.read(0).tolist() == [9, 9, 9]
    assert before.numpy().tolist() == [1, 2, 3]


def test_a_destroyed_replica_is_gone():
    training = Training()
    training.settle(0)
    variable = training.variables[0]
    ops.replica_destroy(training.replica)
    with pytest.raises(tf.errors.OpError):
        tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.float32)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"kinds": ["float"]}, "4 dtypes, 4 shapes and 1 kinds"),
        ({"kinds": ["counter", "counter", "own", "seed"]}, "float cannot be of the kind 'counter'"),
        ({"kinds": ["float", "float", "own", "seed"]}, "int64 cannot be of the kind 'float'"),
        ({"kinds": ["float", "counter", "seed", "seed"]}, "float cannot be of the kind 'seed'"),
        ({"kinds": ["float", "counter", "mine", "seed"]}, "of the kind 'mine'"),
    ],
)
def test_bad_attributes(attributes, message):
    with pytest.raises(REFUSED, match=message):
        Training(**attributes)


def test_bad_inputs():
    training = Training()
    with pytest.raises(REFUSED, match="dense request has 3 bytes"):
        ops.dense_sync(training.shard, np.zeros(3, np.uint8))
    with pytest.raises(REFUSED, match="does not start with HETD"):
        ops.dense_sync(training.shard, np.zeros(800, np.uint8))
    assert ops.dense_sync(training.shard, np.zeros(0, np.uint8)).shape == [0]
    _, requests = ops.replica_request(Training().replica, num_shards=1)
    empty = ops.dense_handle(shared_name=uuid.uuid4().hex)
    with pytest.raises(tf.errors.FailedPreconditionError, match="not set"):
        ops.dense_sync(empty, requests[0])
    with pytest.raises(REFUSED, match="num_shards = 2, but the replica has 1"):
        ops.replica_request(training.replica, num_shards=2)
    ticket, _ = ops.replica_request(training.replica, num_shards=1)
    with pytest.raises(REFUSED, match=r"replies\[0\]: dense reply has 5 bytes"):
        ops.replica_receive(training.replica, ticket, [np.zeros(5, np.uint8)])
    with pytest.raises(REFUSED, match="another replica"):
        ops.replica_receive(Training().replica, ticket, [np.zeros(0, np.uint8)])
    with pytest.raises(REFUSED, match="steps = -1"):
        ops.replica_settle(training.replica, training.variables, np.int64(-1))
    with pytest.raises(REFUSED, match="owed holds 9 numbers"):
        ops.dense_set(
            training.shard,
            np.zeros(3, np.float32),
            np.zeros(9, np.float32),
            np.zeros(1, np.int64),
            np.zeros(0, np.uint8),
            np.int64(0),
            num_workers=1,
        )
    del ticket  # A request that may still be answered is waited for.
    training.settle(0)
    assert training.read(0).tolist() == [1, 2, 3]


def test_mutated_requests_are_refused_or_taken_whole():
    training = Training(num_workers=2, staleness=0)  # which always has a request to make
    training.settle(0)
    rng = np.random.default_rng(1)
    for _ in range(2000):
        _, requests = ops.replica_request(training.replica, num_shards=1)
        request = requests[0].numpy()
        for at in rng.integers(0, len(request), rng.integers(1, 4)):
            request[at] = rng.integers(0, 256)
        request = request[: rng.choice([len(request), rng.integers(1, len(request))], p=[0.8, 0.2])]
        try:
            ops.dense_sync(training.shard, request)
        except REFUSED:
            continue
    floats, *_ = ops.dense_get(training.shard)
    assert floats.numpy().tolist() == [1, 2, 3], "none of them pushed"


def test_frames():
    frames = [np.frombuffer(text, np.uint8) for text in (b"abc", b"", b"0123456789")]
    message = ops.pack_frames(frames)
    unpacked = ops.unpack_frames(message, n=3)
    assert [bytes(frame.numpy()) for frame in unpacked] == [b"abc", b"", b"0123456789"]
    assert ops.pack_frames([np.zeros(0, np.uint8)] * 2).shape == [0]
    with pytest.raises(REFUSED, match="3 frames, expected 2"):
        ops.unpack_frames(message, n=2)


def test_check_ids():
    unique = ops.unique_ids(np.array([5, 3, 5], np.int64))
    ops.check_ids(unique, np.array([[5, 3, 5]], np.int64))
    with pytest.raises(REFUSED, match=r"ids\[1\] = 4, looked ahead for was 3"):
        ops.check_ids(unique, np.array([5, 4, 5], np.int64))
    with pytest.raises(REFUSED, match="ids holds 2 ids, looked ahead for were 3"):
        ops.check_ids(unique, np.array([5, 3], np.int64))


ENDING_PROGRAM = """
import json
import sys

import numpy as np
import tensorflow as tf

sys.path.append(sys.argv[1])
from test_dense_ops import Training

from het_tf import ops

training = Training(staleness=10)
training.settle(0)
for variable in training.variables[:1]:
    tf.raw_ops.AssignAddVariableOp(resource=variable, value=tf.ones([3]))
no_steps = tf.constant(0, tf.int64)
one_step = tf.constant(1, tf.int64)
ops.replica_settle(training.replica, training.variables, one_step, reads=False, all=True)
ops.process_ends()
prepared = ops.replica_request(training.replica, num_shards=1)
sent = int(tf.size(prepared[1][0]))
exchanges = 0
while ops.replica_settle(training.replica, training.variables, no_steps, reads=False, all=True):
    training.exchange()
    exchanges += 1
floats = ops.dense_get(training.shard)[0]
print(json.dumps([sent > 0, exchanges, floats.numpy().tolist()]))
"""


def test_a_process_that_ends_waits_for_no_reply_to_its_steps(tmp_path):
    """A step after `process_ends` opens a request, and nobody receives its reply."""
    (tmp_path / "ending.py").write_text(ENDING_PROGRAM)
    folder = str(pathlib.Path(__file__).parent)
    ended = program_runner.run(tmp_path / "ending.py", folder, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [True, 1, [2, 3, 4]]
