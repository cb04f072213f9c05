"""Messages that no cache or shard sent: truncated, altered, random, for somebody else.

They are refused as invalid, never as unavailable (tf.distribute would retry), change nothing, and
cache and shard go on as if nothing had been.
"""

import numpy as np
import pytest
import tensorflow as tf
from small_tables import INVALID, new_cache, new_table, rows, unique
from wire import PUSH_HEADER, PUSH_ROW, REPLY_HEADER, REPLY_ROW, REQUEST_HEADER, parse_request

from het_tf import ops

KEYS = (3, 5, 2**40, -7)


def tensor(message: bytes) -> tf.Tensor:
    return tf.constant(np.frombuffer(message, np.uint8))


class Pair:
    """A shard with some rows, and a cache whose next messages hold pushes, checks and the rest."""

    def __init__(self):
        self.table, self.cache = new_table(), new_cache(read_bound=0, write_bound=1)
        ops.table_apply(self.table, unique(*KEYS), -tf.ones([4, 2]), 1.0)
        self.step(3, 5)
        # One row is due, one key is known and one is not.
        self.ticket, (request,) = ops.cache_lookup(self.cache, unique(3, -7), num_shards=1)
        self.request = request.numpy().tobytes()
        parsed = parse_request(request)
        assert sorted(parsed.pushed_keys) == [3, 5]
        assert (parsed.checked_keys, parsed.queries) == ([3], [3, -7])
        self.before = rows(self.table)

    def step(self, *keys: int) -> None:
        ticket, (request,) = ops.cache_lookup(self.cache, unique(*keys), num_shards=1)
        ops.cache_install(self.cache, ticket, [ops.table_sync(self.table, request)])
        ops.cache_update(self.cache, ticket, -tf.ones([len(keys), 2]), 1.0)

    def reply(self) -> bytes:
        return ops.table_sync(self.table, tensor(self.request)).numpy().tobytes()

    def check_that_all_is_well(self) -> None:
        assert rows(self.table) == self.before
        ops.cache_install(self.cache, self.ticket, [tensor(self.reply())])
        values = ops.cache_gather(self.cache, self.ticket)
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
NOT_ANNOUNCED = "which is not what its header announces"
BAD_REQUESTS = [
    (REQUEST_HEADER, "magic", b"HTTP", 0, "request does not start with HETQ"),
    (REQUEST_HEADER, "flags", 1, 0, NOT_ANNOUNCED),
    (REQUEST_HEADER, "flags", 2, 0, "request has unknown flags 2"),
    (REQUEST_HEADER, "version", 1, 0, "request has version 1, this shard speaks 6: run one het_tf"),
    (REQUEST_HEADER, "key_bytes", 0, 0, "request has key_bytes = 0"),
    (REQUEST_HEADER, "key_bytes", 2, 0, NOT_ANNOUNCED),
    (REQUEST_HEADER, "key_bytes", 9, 0, "request has key_bytes = 9"),
    (REQUEST_HEADER, "read_bound", -5, 0, "request has read_bound = -5"),
    (REQUEST_HEADER, "incarnation", 0, 0, "pushes with incarnation = 0, session = 1, before it"),
    (REQUEST_HEADER, "session", 0, 0, "session = 0, before it heard of this shard"),
    (REQUEST_HEADER, "cut", 0, 0, "a push with sequence 1 after 0, the last cut is 0"),
    (
        REQUEST_HEADER,
        "dim",
        5,
        0,
        "dim = 5, slot_dim = 0, contribution_dim = 2; this table has dim",
    ),
    (REQUEST_HEADER, "dim", 0, 0, "request has dim = 0"),
    (REQUEST_HEADER, "dim", 2**32 - 1, 0, "request has dim = 4294967295"),
    (REQUEST_HEADER, "slot_dim", 2**32 - 1, 0, "slot_dim = 4294967295"),
    (REQUEST_HEADER, "contribution_dim", 2**32 - 1, 0, "contribution_dim = 4294967295"),
    (REQUEST_HEADER, "shard", 1, 0, "request is for shard 1, this is shard 0"),
    (REQUEST_HEADER, "num_pushes", 0, 0, NOT_ANNOUNCED),
    (REQUEST_HEADER, "num_pushes", 2**32 - 1, 0, "request ends within push"),
    (REQUEST_HEADER, "num_checks", 2**31, 0, "request has num_checks = 2147483648"),
    (REQUEST_HEADER, "num_checks", 2**30, 0, NOT_ANNOUNCED),
    (REQUEST_HEADER, "num_checks", 0, 0, NOT_ANNOUNCED),
    (REQUEST_HEADER, "num_full", 5, 0, NOT_ANNOUNCED),
    (REQUEST_HEADER, "num_values", 2**32 - 1, 0, "num_values = 4294967295"),
    (REQUEST_HEADER, "base_bytes", 0, 0, NOT_ANNOUNCED),
    (REQUEST_HEADER, "base_bytes", 8, 0, NOT_ANNOUNCED),
    (REQUEST_HEADER, "padding", 0, 0, NOT_ANNOUNCED),
    (PUSH_HEADER, "sequence", 0, PUSH_AT, "request has a push with sequence 0 after 0"),
    (PUSH_HEADER, "sequence", 7, PUSH_AT, "a push with sequence 7 after 0, the last cut is 1"),
    (PUSH_HEADER, "num_contributions", 2**32 - 1, PUSH_AT, "request ends within push 0"),
    (PUSH_ROW, "updates", 0, ROW_AT, "request pushes key [35]: a contribution of 0 updates"),
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
    (REPLY_HEADER, "version", 0, 0, "reply has version 0, this cache speaks 6: run one het_tf"),
    (REPLY_HEADER, "flags", 2, 0, NOT_ANNOUNCED),
    (REPLY_HEADER, "flags", 16, 0, "reply has unknown flags 16"),
    (REPLY_HEADER, "incarnation", 0, 0, "reply has incarnation = 0"),
    (REPLY_HEADER, "acknowledged", 2, 0, "reply acknowledges push 2, the last cut is 1"),
    (
        REPLY_HEADER,
        "num_queries",
        3,
        0,
        r"replies\[0\]: reply answers 3 queries .* not 2 with 2 and 0",
    ),
    (REPLY_HEADER, "num_queries", 0, 0, "num_queries = 0"),
    (REPLY_HEADER, "num_full", 2, 0, NOT_ANNOUNCED),
    (REPLY_HEADER, "num_full", 2**32 - 1, 0, "reply has num_full = 4294967295"),
    (REPLY_HEADER, "dim", 0, 0, "dim = 0"),
    (REPLY_HEADER, "dim", 1, 0, NOT_ANNOUNCED),
    (REPLY_HEADER, "slot_dim", 2**31, 0, "slot_dim = 2147483648"),
    (REPLY_ROW, "query", 2, REPLY_HEADER.itemsize, "reply row 0 answers query 2 of 2"),
    (REPLY_ROW, "query", -1, REPLY_HEADER.itemsize, "reply row 0 answers query -1 of 2"),
    (REPLY_ROW, "clock", 2**63 - 1, REPLY_HEADER.itemsize, "reply row 0 has clock 922337203685477"),
]


@pytest.mark.parametrize(("dtype", "field", "value", "at", "message"), BAD_REPLIES)
def test_altered_replies(dtype, field, value, at, message):
    pair = Pair()
    reply = pair.reply()
    pair.before = rows(pair.table)  # the push is in
    assert np.frombuffer(reply, REPLY_HEADER, 1)[0]["num_full"] == 1
    bad = tensor(altered(reply, dtype, field, value, at))
    with pytest.raises(INVALID, match=message):
        ops.cache_install(pair.cache, pair.ticket, [bad])
    with pytest.raises(tf.errors.FailedPreconditionError, match="ticket was not installed"):
        ops.cache_update(pair.cache, pair.ticket, tf.ones([2, 2]), 1.0)
    pair.check_that_all_is_well()


def test_messages_cut_off_anywhere_or_with_more_behind():
    pair = Pair()
    assert ops.table_sync(pair.table, tensor(b"")).shape == [0]  # Nothing was asked.
    for size in range(1, len(pair.request)):
        with pytest.raises(INVALID, match=r"request (has \d+ bytes|ends within push)"):
            ops.table_sync(pair.table, tensor(pair.request[:size]))
    with pytest.raises(INVALID, match="which is not what its header announces"):
        ops.table_sync(pair.table, tensor(pair.request + b"12345678"))
    assert rows(pair.table) == pair.before

    reply = pair.reply()
    pair.before = rows(pair.table)
    for cut in [*(reply[:size] for size in range(len(reply))), reply + b"1234"]:
        with pytest.raises(INVALID, match=r"reply has \d+ bytes"):
            ops.cache_install(pair.cache, pair.ticket, [tensor(cut)])
    pair.check_that_all_is_well()


def test_random_bytes():
    pair = Pair()
    random = np.random.default_rng(1)
    for size in random.integers(0, 400, 200):
        with pytest.raises(INVALID, match=r"request (has|does not start)"):
            ops.table_sync(pair.table, tensor(random.bytes(size)))
        with pytest.raises(INVALID, match=r"reply (has|does not start)"):
            ops.cache_install(pair.cache, pair.ticket, [tensor(random.bytes(size))])
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
            lambda answer=answer: ops.cache_install(pair.cache, pair.ticket, [answer]),
        ):
            try:
                call()
            except (INVALID, tf.errors.FailedPreconditionError) as error:  # or it was taken before
                assert error.message  # noqa: PT017 (it need not fail)
    pair.step(100, 200)
    pair.step(100, 200)
    fresh = new_cache(read_bound=0)
    ticket, (request,) = ops.cache_lookup(fresh, unique(100, 200), num_shards=1)
    ops.cache_install(fresh, ticket, [ops.table_sync(pair.table, request)])
    assert np.isfinite(ops.cache_gather(fresh, ticket)).all()


def test_messages_for_another_table():
    ours = Pair()
    table = new_table(dim=3)
    with pytest.raises(INVALID, match=r"dim = 2, slot_dim = 0, .*; this table has dim = 3"):
        ops.table_sync(table, tensor(ours.request))
    table = new_table(optimizer="momentum")
    with pytest.raises(INVALID, match=r"has dim = 2, slot_dim = 2, .* \(optimizer 'momentum'"):
        ops.table_sync(table, tensor(ours.request))
    shard_of_two = new_table(num_shards=2, shard=0)
    with pytest.raises(INVALID, match=r"holds key -?\d+ of shard 1, this is shard 0 of 2"):
        ops.table_sync(shard_of_two, tensor(ours.request))
    for each in (table, shard_of_two):
        assert rows(each) == {}
    ours.check_that_all_is_well()


def test_a_reply_to_another_request():
    ours, other = Pair(), Pair()
    ticket, (request,) = ops.cache_lookup(other.cache, unique(*KEYS), num_shards=1)
    reply = ops.table_sync(other.table, request)
    with pytest.raises(
        INVALID, match=r"replies\[0\]: reply answers 4 queries .*, not 2 with 2 and 0"
    ):
        ops.cache_install(ours.cache, ours.ticket, [reply])
    ours.check_that_all_is_well()
    ops.cache_install(other.cache, ticket, [reply])
    assert ops.cache_gather(other.cache, ticket).shape == [4, 2]
