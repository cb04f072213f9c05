"""What a step costs on the wire (docs/protocol.md, 4), counted from the real ops' messages."""

import contextlib

import numpy as np
import pytest
from ops_system import WatchedOps, flush, step
from schedules import Setup

from het_tf import ops, optimizers

REQUEST, PUSH, PADDING, REPLY = 112, 32, 4, 64  # a message's own bytes, whatever it carries
CHECK = 16
OPTIMIZERS = {  # and their slots of a row, by its dim
    optimizers.SGD(): lambda dim: 0,
    optimizers.RowWiseAdagrad(): lambda dim: 1,
    optimizers.Momentum(): lambda dim: dim,
    optimizers.Ftrl(): lambda dim: 2 * dim,
    optimizers.Adam(): lambda dim: 2 * dim + 1,
}


def row_budget(dim: int, slots: int) -> int:
    return 16 + 4 * (dim + slots)


def one_update(system: WatchedOps, worker: int = 0) -> None:
    """Of key 0."""
    step(system, worker, (0,), -np.eye(system.setup.dim)[worker : worker + 1])


def train(system: WatchedOps, num_steps: int = 20, keys: int = 30) -> None:
    random = np.random.default_rng(7)
    for number in range(num_steps):
        ids = random.integers(0, keys, 10).tolist()
        gradients = random.normal(size=(10, system.setup.dim))
        step(system, number % system.setup.num_workers, ids, gradients)
    for worker in range(system.setup.num_workers):
        flush(system, worker)


@pytest.mark.parametrize(
    ("optimizer", "staleness", "capacity"),
    [
        *((optimizer, 2, 8) for optimizer in OPTIMIZERS),
        *((optimizers.Adam(), staleness, 8) for staleness in (0, None)),
        *((optimizers.Adam(), staleness, 0) for staleness in (0, 2, None)),
    ],
    ids=str,
)
def test_messages_keep_to_the_budget(optimizer, staleness, capacity):
    setup = Setup(2, 3, capacity=capacity, read_bound=staleness, write_bound=staleness)
    with contextlib.closing(WatchedOps(setup, optimizer=optimizer)) as system:
        train(system)
        row = row_budget(setup.dim, OPTIMIZERS[optimizer](setup.dim) if capacity else 0)
        for exchange in system.exchanges:
            request, reply = exchange.request, exchange.reply
            pushes = sum(PUSH + PADDING + len(push.keys) * row for push in request.pushes)
            checks = CHECK * len(request.queries)
            assert request.num_bytes <= REQUEST + pushes + checks
            assert reply.num_bytes <= REPLY + row * len(reply.rows)
            # A shard that watches rows of the step has to be heard.
            assert request.pushes or request.queries or request.header["watch"], "an empty message"
        pushed = sum(len(each.request.pushed_keys) for each in system.exchanges)
        assert pushed > 20


@pytest.mark.parametrize("capacity", [8, 0])
def test_counters_agree_with_what_was_sent(capacity):
    setup = Setup(2, 3, capacity=capacity, read_bound=2, write_bound=2)
    with contextlib.closing(WatchedOps(setup)) as system:
        train(system)
        caches = [system.stats(worker) for worker in range(2)]
        shards = [
            dict(zip(*(each.numpy().tolist() for each in ops.table_stats(table)), strict=True))
            for table in system.tables
        ]
        for worker, stats in enumerate(caches):
            sent = [each for each in system.exchanges if each.worker == worker]
            assert stats["messages"] == len(sent)
            assert stats["bytes_up"] == sum(each.request.num_bytes for each in sent)
            assert stats["bytes_down"] == sum(each.reply.num_bytes for each in sent)
            assert stats["rows_pushed"] <= sum(len(each.request.pushed_keys) for each in sent)
            assert stats["updates_pushed"] == stats["updates"] > 0
            assert stats["hits"] + stats["misses"] == stats["keys"]
            assert stats["pending"] == 0
        for shard, stats in enumerate(shards):
            received = [each for each in system.exchanges if each.shard == shard]
            assert stats[b"requests"] == len(received)
            assert stats[b"bytes_received"] == sum(each.request.num_bytes for each in received)
            assert stats[b"bytes_sent"] == sum(each.reply.num_bytes for each in received)
            assert stats[b"rows_sent"] == sum(len(each.reply.rows) for each in received)


def test_rows_never_updated_cost_no_payload():
    setup = Setup(1, 1, capacity=2000, read_bound=0, write_bound=0)
    with contextlib.closing(WatchedOps(setup, initializer="uniform")) as system:
        step(system, 0, range(1000))
        (exchange,) = system.exchanges
        assert exchange.request.num_bytes == REQUEST + 2 * 1000
        assert exchange.reply.num_bytes == REPLY
        assert system.table() == {}


def test_own_pushes_bring_no_row_back():
    setup = Setup(1, 2, capacity=9, read_bound=0, write_bound=0)
    with contextlib.closing(WatchedOps(setup)) as system:
        for _ in range(10):
            one_update(system)
        assert len(system.exchanges) == 20  # a check and a write-through each, to one shard alone
        assert sum(len(each.reply.rows) for each in system.exchanges) == 0


@pytest.mark.parametrize("write_bound", [1, 3])
def test_a_row_is_pushed_once_in_write_bound_updates(write_bound):
    setup = Setup(1, 1, capacity=9, read_bound=0, write_bound=write_bound)
    with contextlib.closing(WatchedOps(setup)) as system:
        for _ in range(5 * write_bound):
            one_update(system)
        step(system, 0, (0,))
        pushes = [push for each in system.exchanges for push in each.request.pushes]
        assert [push.num_updates for push in pushes] == [write_bound] * 5


def test_a_cached_row_is_not_sent_again_within_the_read_bound():
    setup = Setup(2, 1, capacity=9, read_bound=3, write_bound=0)
    with contextlib.closing(WatchedOps(setup)) as system:
        step(system, 0, (0,))
        rows = []
        for _ in range(8):
            one_update(system, worker=1)
            step(system, 0, (0,))
            rows.append(len(system.exchanges[-1].reply.rows))
        assert rows == [0, 0, 0, 1] * 2


def test_without_bounds_and_without_misses_nothing_is_sent_until_the_flush():
    setup = Setup(1, 2, capacity=9, read_bound=None, write_bound=None)
    with contextlib.closing(WatchedOps(setup)) as system:
        for _ in range(50):
            step(system, 0, range(8), np.ones((8, setup.dim)))
        assert len(system.exchanges) == 2  # the first lookup's
        assert system.stats(0)["pending"] == 400
        flush(system, 0)
        assert len(system.exchanges) == 4
        assert {row[2] for row in system.table().values()} == {50}
