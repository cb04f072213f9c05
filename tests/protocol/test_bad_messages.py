"""Messages that no cache or shard sent: truncated, altered, random, for somebody else.

They are refused as invalid, never as unavailable (tf.distribute would retry), change nothing, and
cache and shard go on as if nothing had been.
"""

import numpy as np
import pytest
import tensorflow as tf
from small_tables import INVALID, batch, new_cache, new_table, rows
from wire import PUSH_HEADER, PUSH_ROW, REPLY_HEADER, REPLY_ROW, REQUEST_HEADER, parse_request

from het_tf import ops

KEYS = (3, 5, 2**40, -7)


def tensor(message: bytes) -> tf.Tensor:
    return tf.constant(np.frombuffer(message, np.uint8))


class Pair:
    """A shard with some rows, and a cache whose next messages hold pushes, checks and the rest."""

    def __init__(self):
        self.table, self.cache = new_table(), new_cache(read_bound=0, write_bound=1)
        ops.table_apply(self.table, batch(*KEYS), -tf.ones([4, 2]), 1.0)
        self.step(3, 5)
        # One row is due, one key is known and one is not.
        self.ticket, (request,) = ops.cache_lookup(self.cache, batch(3, -7), num_shards=1)
        self.request = request.numpy().tobytes()
        parsed = parse_request(request)
        assert (parsed.pushed_keys, len(parsed.checks), len(parsed.absent)) == ([3, 5], 1, 1)
        self.before = rows(self.table)

    def step(self, *keys: int) -> None:
        ticket, (request,) = ops.cache_lookup(self.cache, batch(*keys), num_shards=1)
        ops.cache_fill(self.cache, ticket, [ops.table_sync(self.table, request)])
        ops.cache_update(self.cache, ticket, -tf.ones([len(keys), 2]), 1.0)

    def reply(self) -> bytes:
        return ops.table_sync(self.table, tensor(self.request)).numpy().tobytes()

    def check_that_all_is_well(self) -> None:
        assert rows(self.table) == self.before
        values = ops.cache_fill(self.cache, self.ticket, [tensor(self.reply())])
        assert values.numpy().tolist() == [[2, 2], [1, 1]]
        assert {key: clock for key, (_, clock) in rows(self.table).items()} == dict(
            zip(KEYS, (2, 2, 1, 1), strict=True)
        )


def altered(message: bytes, dtype: np.dtype, field: str, value, at: int = 0) -> bytes:
    """The message with a field of the record at byte `at` changed."""
    copy = np.frombuffer(message, np.uint8).copy()
    np.frombuffer(copy.data, dtype, 1, at)[field] = value
    return copy.tobytes()


PUSH_AT = REQUEST_HEADER.itemsize
ROW_AT = PUSH_AT + PUSH_HEADER.itemsize
BAD_REQUESTS = [
    (REQUEST_HEADER, "magic", b"HTTP", 0, "request does not start with HETQ"),
    (REQUEST_HEADER, "version", 2, 0, "request has version 2, this shard speaks 1: run one het_tf"),
    (REQUEST_HEADER, "flags", 6, 0, "request has unknown flags 6"),
    (REQUEST_HEADER, "read_bound", -5, 0, "request has read_bound = -5"),
    (
        REQUEST_HEADER,
        "dim",
        3,
        0,
        "which is not what its header announces",
    ),
    (REQUEST_HEADER, "dim", 0, 0, "request has dim = 0"),
    (REQUEST_HEADER, "dim", 2**32 - 1, 0, "request has dim = 4294967295"),
    (REQUEST_HEADER, "slot_dim", 2**32 - 1, 0, "slot_dim = 4294967295"),
    (REQUEST_HEADER, "shard", 1, 0, "request is for shard 1, this is shard 0"),
    (REQUEST_HEADER, "num_batches", 0, 0, "which is not what its header announces"),
    (REQUEST_HEADER, "num_batches", 2**32 - 1, 0, "request ends within push"),
    (REQUEST_HEADER, "num_checks", -1, 0, "request has num_checks = -1"),
    (REQUEST_HEADER, "num_checks", 2**62, 0, "request has num_checks = 4611686018427387904"),
    (REQUEST_HEADER, "num_checks", 2**30, 0, "which is not what its header announces"),
    (REQUEST_HEADER, "num_absent", 2, 0, "which is not what its header announces"),
    (REQUEST_HEADER, "num_absent", -(2**63), 0, "num_absent = -9223372036854775808"),
    (PUSH_HEADER, "sequence", 0, PUSH_AT, "request has a push with sequence 0"),
    (PUSH_HEADER, "learning_rate", np.nan, PUSH_AT, "learning_rate = nan must be finite"),
    (PUSH_HEADER, "learning_rate", -1, PUSH_AT, "learning_rate = -1 must be finite"),
    (PUSH_HEADER, "rows", 2**32 - 1, PUSH_AT, "request ends within push 0"),
    (PUSH_ROW, "clock", 0, ROW_AT, "request pushes key 3 with clock 0"),
    (PUSH_ROW, "clock", -(2**63), ROW_AT, "request pushes key 3 with clock -9223372036854775808"),
]


@pytest.mark.parametrize(("dtype", "field", "value", "at", "message"), BAD_REQUESTS)
def test_altered_requests(dtype, field, value, at, message):
    pair = Pair()
    request = tensor(altered(pair.request, dtype, field, value, at))
    with pytest.raises(INVALID, match=message):
        ops.table_sync(pair.table, request)
    pair.check_that_all_is_well()


BAD_REPLIES = [
    (REPLY_HEADER, "magic", b"HETQ", 0, "reply does not start with HETR"),
    (REPLY_HEADER, "version", 0, 0, "reply has version 0, this cache speaks 1: run one het_tf"),
    (REPLY_HEADER, "num_queries", 3, 0, r"replies\[0\] answers 3 queries .* not 2 with width 2"),
    (REPLY_HEADER, "num_queries", -1, 0, "reply has num_rows = 1, num_queries = -1"),
    (REPLY_HEADER, "num_rows", -1, 0, "reply has num_rows = -1"),
    (REPLY_HEADER, "num_rows", 2, 0, "which is not what its header announces"),
    (REPLY_HEADER, "num_rows", 2**62, 0, "reply has num_rows = 4611686018427387904"),
    (REPLY_HEADER, "width", 0, 0, "width = 0"),
    (REPLY_HEADER, "width", 1, 0, "which is not what its header announces"),
    (REPLY_HEADER, "width", 2**40, 0, "width = 1099511627776"),
    (REPLY_ROW, "query", 2, REPLY_HEADER.itemsize, "reply row 0 answers query 2 of 2"),
    (REPLY_ROW, "query", -1, REPLY_HEADER.itemsize, "reply row 0 answers query -1 of 2"),
]


@pytest.mark.parametrize(("dtype", "field", "value", "at", "message"), BAD_REPLIES)
def test_altered_replies(dtype, field, value, at, message):
    pair = Pair()
    reply = pair.reply()
    pair.before = rows(pair.table)  # the push is in
    assert np.frombuffer(reply, REPLY_HEADER, 1)[0]["num_rows"] == 1
    with pytest.raises(INVALID, match=message):
        ops.cache_fill(pair.cache, pair.ticket, [tensor(altered(reply, dtype, field, value, at))])
    with pytest.raises(tf.errors.FailedPreconditionError, match="ticket was not filled"):
        ops.cache_update(pair.cache, pair.ticket, tf.ones([2, 2]), 1.0)
    pair.check_that_all_is_well()


def test_messages_cut_off_anywhere_or_with_more_behind():
    pair = Pair()
    for size in range(len(pair.request)):
        with pytest.raises(INVALID, match=r"request (has \d+ bytes|ends within push)"):
            ops.table_sync(pair.table, tensor(pair.request[:size]))
    with pytest.raises(INVALID, match="which is not what its header announces"):
        ops.table_sync(pair.table, tensor(pair.request + b"12345678"))
    assert rows(pair.table) == pair.before

    reply = pair.reply()
    pair.before = rows(pair.table)
    for cut in [*(reply[:size] for size in range(len(reply))), reply + b"1234"]:
        with pytest.raises(INVALID, match=r"reply has \d+ bytes"):
            ops.cache_fill(pair.cache, pair.ticket, [tensor(cut)])
    pair.check_that_all_is_well()


def test_random_bytes():
    pair = Pair()
    random = np.random.default_rng(1)
    for size in random.integers(0, 400, 200):
        with pytest.raises(INVALID, match=r"request (has|does not start)"):
            ops.table_sync(pair.table, tensor(random.bytes(size)))
        with pytest.raises(INVALID, match=r"reply (has|does not start)"):
            ops.cache_fill(pair.cache, pair.ticket, [tensor(random.bytes(size))])
    pair.check_that_all_is_well()


def test_random_bytes_behind_a_good_start_do_no_harm():
    """Some of these are valid, and merged: the shard must still be one, and answer as before."""
    random = np.random.default_rng(2)
    pair = Pair()
    reply = pair.reply()
    for _ in range(400):
        request, answer = (np.frombuffer(m, np.uint8).copy() for m in (pair.request, reply))
        for message in (request, answer):
            at = random.integers(8, len(message), random.integers(1, 4))
            message[at] = random.integers(0, 256, len(at))
        for call in (
            lambda request=request: ops.table_sync(pair.table, request),
            lambda answer=answer: ops.cache_fill(pair.cache, pair.ticket, [answer]),
        ):
            try:
                call()
            except INVALID as error:
                assert error.message  # noqa: PT017 (it need not fail)
    pair.step(100, 200)
    pair.step(100, 200)
    fresh = new_cache(read_bound=0)
    ticket, (request,) = ops.cache_lookup(fresh, batch(100, 200), num_shards=1)
    values = ops.cache_fill(fresh, ticket, [ops.table_sync(pair.table, request)])
    assert np.isfinite(values).all()


def test_messages_for_another_table():
    ours = Pair()
    table = new_table(dim=3)
    with pytest.raises(INVALID, match="dim = 2, slot_dim = 0; this table has dim = 3"):
        ops.table_sync(table, tensor(ours.request))
    table = new_table(optimizer="momentum")
    with pytest.raises(INVALID, match=r"has dim = 2, slot_dim = 2 \(optimizer 'momentum'"):
        ops.table_sync(table, tensor(ours.request))
    shard_of_two = new_table(num_shards=2, shard=0)
    with pytest.raises(INVALID, match=r"holds key -?\d+ of shard 1, this is shard 0 of 2"):
        ops.table_sync(shard_of_two, tensor(ours.request))
    for each in (table, shard_of_two):
        assert rows(each) == {}
    ours.check_that_all_is_well()


def test_a_reply_to_another_request():
    ours, other = Pair(), Pair()
    ticket, (request,) = ops.cache_lookup(other.cache, batch(*KEYS), num_shards=1)
    reply = ops.table_sync(other.table, request)
    with pytest.raises(INVALID, match=r"replies\[0\] answers 4 queries .*, not 2 with width 2"):
        ops.cache_fill(ours.cache, ours.ticket, [reply])
    ours.check_that_all_is_well()
    assert ops.cache_fill(other.cache, ticket, [reply]).shape == [4, 2]
