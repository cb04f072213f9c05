"""Plans: where rows live, what fits, and what a step costs."""

from __future__ import annotations

import dataclasses
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf.planner import (
    Calibration,
    Constraints,
    DoesNotFitError,
    EmbeddingConfig,
    Plan,
    Topology,
    plan,
    statistics,
)
from het_tf.planner.cost import Step, response, step_time
from het_tf.planner.replay import replay

BATCH = 32


def counted(batches=64, rows=(60, 400)):
    rng = np.random.default_rng(3)
    ids = {f"t{i}": rng.zipf(1.2, (BATCH * batches, 2)) % n for i, n in enumerate(rows)}
    dataset = tf.data.Dataset.from_tensor_slices(ids).batch(BATCH)
    return statistics(dataset, lambda x: x)


@pytest.fixture(scope="module")
def found():
    return counted()


def configs(dim=8, **kwargs):
    return [EmbeddingConfig(name, dim, "adagrad", **kwargs) for name in ("t0", "t1")]


def planned(found, topology, tables=None, **kwargs):
    return plan(tables or configs(), found, BATCH, topology, step_seconds=0.01, **kwargs)


def test_a_replay_counts_what_workers_send(found):
    """Without a cache, every distinct key of a batch is fetched and pushed."""
    table = found.tables["t1"]
    config = EmbeddingConfig("t1", 8, "sgd", cache=None)
    traffic = replay(table, config, 4, None)
    keys = table.keys / found.batches
    assert traffic.rows_up == pytest.approx(keys, rel=0.1)
    assert traffic.hit_rate == 0
    for moved in (traffic.bytes_up, traffic.bytes_down):
        assert keys * 8 * 4 < moved < keys * (8 * 4 + 40)
    unbounded = dataclasses.replace(config, cache=het_tf.CacheConfig(staleness=None))
    traffic = replay(table, unbounded, 4, None)
    assert traffic.rows_up == 0
    assert traffic.hit_rate > 0.8
    # At the end of every epoch, the caches push all rows that they have updated.
    assert replay(table, unbounded, 4, None, 1, 2).rows_up > 0.3 * keys


def test_a_part_of_the_keys_predicts_the_whole():
    rng = np.random.default_rng(1)
    ids = rng.zipf(1.1, (256 * 200, 4)) % 10**6
    dataset = tf.data.Dataset.from_tensor_slices(ids).batch(256)
    config = EmbeddingConfig("t", 8, "adagrad")
    whole, part = (
        replay(statistics(dataset, lambda x: {"t": x}, memory=m).tables["t"], config, 2, 5000)
        for m in ("64MB", "800kB")
    )
    assert part.hit_rate == pytest.approx(whole.hit_rate, abs=0.02)
    assert part.bytes_up == pytest.approx(whole.bytes_up, rel=0.1)
    assert part.bytes_down == pytest.approx(whole.bytes_down, rel=0.1)
    assert part.server_row_bytes == whole.server_row_bytes < 200
    assert part.worker_row_bytes == whole.worker_row_bytes < 500


def test_caches_hold_the_rows_with_the_most_lookups_per_byte(found):
    """No other split of the memory has more lookups."""
    topology = Topology(2, 1, worker_memory=40_000)
    result = planned(found, topology)
    whole = planned(found, Topology(2, 1)).tables
    lines = {name: table.traffic.worker_row_bytes for name, table in whole.items()}
    capacities = {name: table.capacity for name, table in result.tables.items()}
    used = sum(capacities[name] * lines[name] for name in lines)
    assert 40_000 - 2 * max(lines.values()) < used <= 40_000

    def lookups(split):
        return sum(
            float(found.tables[n].coverage(rows)) * found.tables[n].ids for n, rows in split.items()
        )

    best = lookups(capacities)
    for rows in range(1, found.tables["t0"].rows + 1):
        left = int((40_000 - rows * lines["t0"]) / lines["t1"])
        assert lookups({"t0": rows, "t1": max(left, 0)}) <= best + 1


def test_constraints_hold(found):
    topology = Topology(2, 3, worker_memory=200_000)
    limits = {"t0": Constraints(servers=[2], max_capacity=5), "t1": Constraints([0, 2, 1], 350)}
    result = planned(found, topology, constraints=limits)
    assert result.tables["t0"].servers == (2,)
    assert result.tables["t1"].servers == (0, 1, 2)
    assert result.tables["t0"].capacity <= 5
    assert result.tables["t1"].capacity >= 350
    assert result.server_bytes[2] > result.server_bytes[0] == result.server_bytes[1] > 0
    given = configs(cache=het_tf.CacheConfig(7))
    assert planned(found, topology, given).tables["t0"].capacity == 7
    assert planned(found, topology, configs(cache=None)).tables["t0"].capacity is None


def test_rows_that_do_not_fit_are_refused(found):
    used = max(planned(found, Topology(1, 2)).server_bytes)
    planned(found, Topology(1, 2, server_memory=math.ceil(used)))
    with pytest.raises(DoesNotFitError, match=r"rows of ps:0 need .* more than server_memory"):
        planned(found, Topology(1, 2, server_memory=int(used / 2)))


def test_memory_of_caches_and_of_tables_on_a_disk(found):
    with pytest.raises(DoesNotFitError, match=r"the caches of a worker need .* than worker_memory"):
        planned(found, Topology(2, 1, worker_memory="1kB"), configs(cache=het_tf.CacheConfig(400)))
    topology = Topology(2, 1, server_memory="700kB")
    with pytest.raises(DoesNotFitError, match=r"the rows of ps:0 need .* more than server_memory"):
        planned(found, topology, configs(dim=256))
    on_disk = configs(dim=256, storage=het_tf.Storage("256KiB", "/tmp"))
    assert 2**18 < sum(planned(found, topology, on_disk).server_bytes) < 2 * 2**18 + 30_000


def test_a_table_without_ids_costs_nothing(found):
    ids = tf.ragged.constant([[], []], ragged_rank=1, dtype=tf.int64)
    batches = tf.data.Dataset.from_tensors((ids, np.arange(2))).repeat(16)
    both = statistics(batches, lambda a, b: {"t0": a, "t1": b})
    result = plan(configs(), both, 2, Topology(2, 1), step_seconds=0.01)
    assert result.tables["t0"].traffic.bytes_up == 0 < result.tables["t1"].traffic.bytes_up


def test_a_plan_is_saved_and_reported(found, tmp_path):
    topology = Topology(np.int64(2), 2, np.int64(10**9), bandwidth="1Gbit")
    result = planned(found, topology, dense_parameters=1000)
    result.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == result
    text = result.report()
    for part in ("2 workers, 2 parameter servers, 1 Gbit/s", "ps:1", "t0", "hit rate", "bound by"):
        assert part in text
    (tmp_path / "plan.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(ValueError, match=r"plan\.json has no plan of het_tf: another version"):
        Plan.load(tmp_path / "plan.json")


def test_a_model_has_what_the_planner_needs(found):
    inputs = {name: keras.Input((2,), dtype="int64", name=f"ids_{name}") for name in ("t0", "t1")}
    layers = {n: het_tf.layers.HetEmbedding(8, name=n)(x) for n, x in inputs.items()}
    flat = keras.layers.Flatten()(keras.layers.Concatenate()(list(layers.values())))
    model = het_tf.keras.Model(list(inputs.values()), keras.layers.Dense(1)(flat))
    with pytest.raises(ValueError, match="layer 't0' has no optimizer: compile the model"):
        planned(found, Topology(2, 1), model)
    model.compile("adagrad", "mse")
    of_model, of_configs = (planned(found, Topology(2, 1), each) for each in (model, configs()))
    for name, table in of_model.tables.items():
        same = dataclasses.replace(table.traffic, worker_seconds=0, server_seconds=0)
        other = of_configs.tables[name].traffic
        assert same == dataclasses.replace(other, worker_seconds=0, server_seconds=0)
    assert sum(of_model.bytes_up) - sum(of_configs.bytes_up) == pytest.approx(4 * 33 / 64)


def test_mean_value_analysis():
    assert response(1, 3.0, [1.0, 2.0]) == 6  # nobody to wait for
    assert response(7, 0.0, [2.0, 2.0, 2.0]) == pytest.approx(2 * (7 + 3 - 1))  # balanced
    assert response(2, 0.0, [1.0, 3.0]) == pytest.approx(1 * 1.25 + 3 * 1.75)
    assert response(500, 5.0, [1.0, 2.0]) == pytest.approx(1000, rel=1e-3)  # the slower one
    assert response(3, 4.0, []) == 4


def test_the_busiest_part_bounds_the_step():
    step = Step(0.01, 0.001, [0.002, 0.001], 1e-4, [8e5, 2e5], [8e5, 2e5], ahead=True)
    for workers, bandwidth, cores, expected in (
        (2, None, 16, "worker"),
        (2, 1e8, 16, "network"),
        (1000, None, 10_000, "chief"),
        (100, None, 1, "network"),
    ):
        seconds, parts = step_time(step, workers, bandwidth, server_cores=cores)
        assert seconds == max(parts.values())
        assert max(parts, key=parts.__getitem__) == expected
    seconds, shared = step_time(step, 4, None, shared_cores=2)
    assert seconds == pytest.approx(shared["cores"])
    # Messages and computing get into each other's way if they take about as long.
    seconds, even = step_time(step, 4, 1.2e9, shared_cores=2)
    assert seconds > 1.05 * max(even.values())
    assert shared["cores"] == pytest.approx(4 * (0.011 + 0.003 + 1e-4) / 2)
    _, before = step_time(dataclasses.replace(step, ahead=False), 1, 1e9, latency=0.5)
    assert before["network"] > 1.01


def test_more_of_anything_never_makes_a_plan_slower(found):
    def seconds(workers=4, servers=2, bandwidth=10**8, memory=20_000):
        topology = Topology(workers, servers, memory, bandwidth=bandwidth)
        return planned(found, topology, calibration=Calibration()).parts["network"]

    for more in ({"servers": 4}, {"bandwidth": 10**9}, {"memory": "1GB"}):
        assert seconds(**more) <= seconds() * 1.02
    assert seconds(workers=8) >= seconds() * 0.98


def test_bad_arguments_are_named(found):
    for arguments, message in (
        ({"workers": 0}, "workers must be an integer from 1"),
        ({"server_memory": "lots"}, "server_memory must be a positive number of bytes"),
        ({"bandwidth": "fast"}, "bandwidth must be a positive number of bit/s"),
        ({"latency": -1}, "latency must be a number from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Topology(**{"workers": 1, "servers": 1} | arguments)
    for constraints, message in (
        ({"t9": Constraints()}, r"constraints name \['t9'\]"),
        ({"t0": Constraints(servers=[1])}, "'t0': servers must be different integers below 1"),
        ({"t0": Constraints(servers=[0, 0])}, "'t0': servers must be different"),
        ({"t0": Constraints(servers=0)}, "'t0': servers must be different"),
    ):
        with pytest.raises(ValueError, match=message):
            planned(found, Topology(1, 1), constraints=constraints)
    with pytest.raises(ValueError, match="max_capacity = 1 is below min_capacity = 2"):
        Constraints(min_capacity=2, max_capacity=1)
    with pytest.raises(ValueError, match="batch_size = 48 is no multiple of the 32 examples"):
        plan(configs(), found, 48, Topology(1, 1), step_seconds=0.1)
    with pytest.raises(ValueError, match="64 batches of a step's size, too few for 32 workers"):
        planned(found, Topology(32, 1))
    with pytest.raises(ValueError, match=r"no ids of the tables \['t7'\]"):
        planned(found, Topology(1, 1), [EmbeddingConfig("t7", 8)])
    with pytest.raises(ValueError, match="configs must be EmbeddingConfigs or a model, not 't0'"):
        planned(found, Topology(1, 1), ["t0"])
    with pytest.raises(ValueError, match="statistics must be a Statistics, not None"):
        planned(None, Topology(1, 1))
    with pytest.raises(ValueError, match="with different names"):
        planned(found, Topology(1, 1), [EmbeddingConfig("t0", 8)] * 2)
    on_device = het_tf.CacheConfig(device_capacity=10, device="CPU")
    with pytest.raises(ValueError, match="device_capacity = 10, which the planner has no figures"):
        EmbeddingConfig("t0", 8, cache=on_device)


def test_batches_of_steps_join_batches_of_the_statistics(found):
    result = plan(configs(), found, 4 * BATCH, Topology(2, 1), step_seconds=0.1)
    single = planned(found, Topology(2, 1))
    for name, table in result.tables.items():
        assert table.traffic.rows_up < 4 * single.tables[name].traffic.rows_up
