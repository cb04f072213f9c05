"""Which servers store which table, and which rows are in memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf.planner import Constraints, EmbeddingConfig, Topology, plan, statistics
from het_tf.planner.memory_split import Curve, most_valuable
from het_tf.planner.placement import TableLoad, balanced, placements


def busiest(load, owners, servers):
    return np.bincount(owners, load, servers).max()


def test_a_placement_is_near_the_optimum():
    """Of all 3 ** 12 placements of 12 tables on 3 servers."""
    owners = np.indices((3,) * 12, np.int8).reshape(12, -1).T
    on_server = (owners[:, np.newaxis] == np.arange(3)[:, np.newaxis]).astype(np.float32)
    rng = np.random.default_rng(0)
    for _ in range(8):
        load, memory = rng.lognormal(0, 1, 12), rng.lognormal(0, 1, 12)
        room = 1.3 * max(memory.sum() / 3, memory.max())
        loads, used = on_server @ load.astype(np.float32), on_server @ memory.astype(np.float32)
        best = loads.max(1)[used.max(1) <= room].min()
        owners = balanced(load, memory, np.zeros(3), np.full(3, room))
        assert np.bincount(owners, memory, 3).max() <= room
        assert busiest(load, owners, 3) <= 1.05 * best


def greedy(load, memory, servers, room, order):
    """Tables in an order, each to the server with the least load that has room."""
    loads, left = np.zeros(servers), np.full(servers, room)
    for table in np.argsort(-order):
        fitting = np.where(memory[table] <= left, loads, np.inf)
        server = np.argmin(fitting)
        loads[server] += load[table] if fitting[server] < np.inf else np.inf
        left[server] -= memory[table]
    return loads.max()


def test_a_placement_is_never_worse_than_greedy_ones():
    rng = np.random.default_rng(1)
    for _ in range(20):
        load, memory = rng.lognormal(0, 1.5, 40), rng.lognormal(0, 1.5, 40)
        room = max(1.2 * memory.sum() / 8, 1.1 * memory.max())
        owners = balanced(load, memory, np.zeros(8), np.full(8, room))
        orders = load, memory, load * memory, load / memory
        best = min(greedy(load, memory, 8, room, order) for order in orders)
        assert np.bincount(owners, memory, 8).max() <= room
        assert busiest(load, owners, 8) <= best * (1 + 1e-9)


def test_candidates_keep_to_the_memory_and_to_given_servers():
    rng = np.random.default_rng(2)
    tables = [TableLoad(*rng.lognormal(0, 2, 2)) for _ in range(60)]
    tables[7] = TableLoad(1.0, 1.0, (2, 4))
    room = 1.2 * sum(table.num_bytes for table in tables) / 5
    first, *others = placements(tables, 5, room)
    assert all(mine == (0, 1, 2, 3, 4) for mine in [*first[:7], *first[8:]])
    assert any(len(mine) == 1 for placed in others for mine in placed)
    for placed in [first, *others]:
        assert placed[7] == (2, 4)
        used = np.zeros(5)
        for table, mine in zip(tables, placed, strict=True):
            used[list(mine)] += table.num_bytes / len(mine)
        assert used.max() <= room


def test_rows_in_memory_are_the_best_choice():
    """Of all choices of 0 to 5 parts of 4 tables. Each part of a table has fewer accesses."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        gains = -np.sort(-rng.random((4, 5)), axis=1)
        counts, sizes = rng.integers(1, 9, (4, 5)).astype(float), rng.choice([4.0, 8.0], 4)
        curves = {str(t): Curve(counts[t], gains[t], sizes[t]) for t in range(4)}
        order = np.argsort(-gains.ravel())
        costs = counts * sizes[:, np.newaxis]
        memory = np.cumsum(costs.ravel()[order])[rng.integers(20)]
        rows, _ = most_valuable(memory, curves)

        def value(parts, of_rows=counts, gains=gains, costs=costs):
            return sum((gains[t] * costs[t])[: parts[t]].sum() for t in range(4))

        chosen = [int(np.searchsorted(np.cumsum(counts[t]), rows[str(t)] + 0.5)) for t in range(4)]
        fitting = [
            parts
            for parts in itertools.product(range(6), repeat=4)
            if sum(costs[t][: parts[t]].sum() for t in range(4)) <= memory + 1e-9
        ]
        assert value(chosen) == pytest.approx(max(map(value, fitting)))


@pytest.fixture(scope="module")
def clicks():
    """Ids of 12 small tables and of a large one, Zipf 1.1."""
    rng = np.random.default_rng(4)
    ids = {f"t{i}": rng.zipf(1.1, (32 * 256, 1)) % 50 for i in range(12)}
    return ids | {"large": rng.zipf(1.1, (32 * 256, 40)) % 2_000}


def statistics_of(clicks):
    return statistics(tf.data.Dataset.from_tensor_slices(clicks).batch(32), lambda x: x)


@pytest.fixture(scope="module")
def found(clicks):
    return statistics_of(clicks)


def planned(clicks, found, topology, storage=None, **kwargs):
    configs = [EmbeddingConfig(name, 8) for name in clicks if name != "large"]
    configs.append(EmbeddingConfig("large", 128, storage=storage))
    return plan(configs, found, 32, topology, step_seconds=1e-3, **kwargs)


def test_small_tables_are_whole_and_large_ones_divided(clicks, found):
    topology = Topology(2, 4, bandwidth="100Mbit")
    result = planned(clicks, found, topology)
    assert result.tables["large"].servers == (0, 1, 2, 3)
    assert all(len(result.tables[f"t{i}"].servers) == 1 for i in range(12))
    every = Constraints(servers=range(4))
    divided = planned(clicks, found, topology, constraints=dict.fromkeys(clicks, every))
    assert result.step_seconds <= 1.01 * divided.step_seconds
    # Where nothing but the workers bounds the step, one server has the fewest messages.
    topology = Topology(2, 4, bandwidth=None)
    result = planned(clicks, found, topology)
    assert {table.servers for table in result.tables.values()} == {(0,)}
    divided = planned(clicks, found, topology, constraints=dict.fromkeys(clicks, every))
    assert result.step_seconds < 0.9 * divided.step_seconds


def test_a_table_is_not_on_one_server_whose_network_would_matter(clicks):
    """One server has fewer messages, and its link twice the bytes."""
    large = {"large": clicks["large"]}
    found = statistics_of(large)
    for bandwidth, servers in ("1Gbit", (0, 1)), (None, (0,)):
        topology = Topology(8, 2, bandwidth=bandwidth, shared_cores=2)
        assert planned(large, found, topology).tables["large"].servers == servers


def test_a_storage_gets_the_memory_that_is_left(clicks, found):
    storage = het_tf.Storage(path="/tmp")
    topology = Topology(2, 2, server_memory="800kB")
    result = planned(clicks, found, topology, storage)
    assert 0.98 * 8e5 < max(result.server_bytes) <= 8e5
    large = result.tables["large"]
    keys, counts = np.unique(clicks["large"], return_counts=True)
    rows = large.memory * len(large.servers) / (large.traffic.server_row_bytes - 28)
    in_memory = keys[np.argsort(-counts, kind="stable")][: int(rows)]
    missed = 1 - np.isin(clicks["large"], in_memory).mean()
    assert 0.03 < missed == pytest.approx(large.disk_share, abs=0.01)
    assert planned(clicks, found, Topology(2, 2)).tables["large"].memory is None
    # Where all rows fit, there is memory for rows that the statistics lack.
    assert planned(clicks, found, Topology(2, 2), storage).tables["large"].memory > 10e9


def test_a_storage_on_given_servers_gets_what_these_have(clicks, found):
    storage = het_tf.Storage(path="/tmp")
    given = {"large": Constraints(servers=[0])}
    topology = Topology(2, 4, server_memory="800kB")
    result = planned(clicks, found, topology, storage, constraints=given)
    assert max(result.server_bytes) <= topology.server_memory
    assert result.tables["large"].memory <= topology.server_memory
