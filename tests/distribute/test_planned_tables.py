"""Tables on the servers that a plan has for them, and caches of the plan's capacity."""

from __future__ import annotations

import contextlib
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf.planner import Constraints, EmbeddingConfig, Topology, plan, statistics

BATCH = 16
COLUMNS = 16
DIM = 32
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(5)
    ids = {name: rng.zipf(1.3, (BATCH * 60, COLUMNS)) % 5000 for name in NAMES}
    return ids, tf.data.Dataset.from_tensor_slices((ids, np.ones(BATCH * 60))).batch(BATCH)


def planned(strategy, dataset, storage=None, memory="32GB", **constraints):
    configs = [
        EmbeddingConfig(name, DIM, het_tf.optimizers.SGD(1.0), storage=storage) for name in NAMES
    ]
    return plan(
        configs,
        statistics(dataset, lambda x, y: x),
        BATCH,
        Topology(strategy.num_workers, strategy.num_ps, "10MB", memory),
        step_seconds=0.01,
        constraints={name: Constraints(servers=servers) for name, servers in constraints.items()},
    )


@contextlib.contextmanager
def following(strategy, plan):
    strategy.plan = plan
    try:
        yield
    finally:
        strategy.plan = None


def model_under(strategy, plan, storage=None):
    with following(strategy, plan), strategy.scope():
        inputs = {n: keras.Input((COLUMNS,), dtype="int64", name=f"ids_{n}") for n in NAMES}
        layers = [
            het_tf.layers.HetEmbedding(
                DIM,
                embeddings_initializer="zeros",
                optimizer=het_tf.optimizers.SGD(1.0),
                storage=storage,
                name=n,
            )
            for n in NAMES
        ]
        rows = [layer(inputs[n]) for n, layer in zip(NAMES, layers, strict=True)]
        model = het_tf.keras.Model(inputs, keras.layers.Concatenate()(rows))
        # The gradient of a row is the number of its ids in the batch.
        model.compile("sgd", lambda y, rows: keras.ops.sum(rows))
    return model


def fit(model, dataset):
    model.fit(dataset, verbose=0)


def check_sums(model, ids):
    for name in NAMES:
        keys, counts = np.unique(ids[name], return_counts=True)
        expected = np.repeat(-1.0 * counts[:, np.newaxis], DIM, 1)
        np.testing.assert_array_equal(model.get_layer(name).table.lookup(keys), expected)


def test_tables_train_on_the_servers_of_the_plan(strategy, data, tmp_path):
    ids, dataset = data
    placed = planned(strategy, dataset, first=[1], second=[0])
    model = model_under(strategy, placed)
    fit(model, dataset)
    check_sums(model, ids)
    for name, server in (("first", 1), ("second", 0)):
        layer = model.get_layer(name)
        assert [device[-19:] for device in layer.table.devices] == [f"task:{server}/device:CPU:0"]
        assert layer.stored.cache.capacity == placed.tables[name].capacity
        assert layer.cache_stats()["hit_ids"] > 0
    # A checkpoint moves the rows to another placement.
    model.save_weights(tmp_path / "rows.weights.h5")
    moved = model_under(strategy, planned(strategy, dataset, second=[1]))
    moved.load_weights(tmp_path / "rows.weights.h5")
    check_sums(moved, ids)
    fit(moved, dataset)
    check_sums(moved, {name: np.concatenate([each, each]) for name, each in ids.items()})


def test_rows_on_a_disk_have_the_memory_of_the_plan(strategy, data, request):
    ids, dataset = data
    storage = het_tf.Storage(path=str(request.config.rootpath))
    placed = planned(strategy, dataset, storage, "600kB", first=[1], second=[0])
    model = model_under(strategy, placed, storage)
    fit(model, dataset)
    check_sums(model, ids)
    for name in NAMES:
        table = model.get_layer(name).table
        assert 256 << 10 < placed.tables[name].memory < 600_000
        assert f"memory={placed.tables[name].memory} " in table.storage
        assert table.stats()["disk_bytes"] > 0


def test_a_plan_is_for_a_cluster_and_a_model(strategy, data):
    _, dataset = data
    placed = planned(strategy, dataset)
    with pytest.raises(ValueError, match="plan is for 2 parameter servers, but the cluster has 9"):
        placed.check_servers(9)
    for wrong, message in (
        (dataclasses.replace(placed, topology=Topology(1, 9)), "plan is for 9 parameter servers"),
        ("plan.json", "plan must be a het_tf.planner.Plan or None, not 'plan.json'"),
    ):
        with pytest.raises(ValueError, match=message):
            strategy.plan = wrong
    other = dataclasses.replace(placed, tables={"other": placed.tables["first"]})
    with pytest.raises(ValueError, match=r"the plan has no table 'first', but \['other'\]"):
        model_under(strategy, other)


def test_the_plan_predicts_hits_and_bytes(strategy, data):
    _, dataset = data
    placed = planned(strategy, dataset)
    model = model_under(strategy, placed)
    fit(model, dataset.repeat(2))
    for name in NAMES:
        stats, traffic = model.get_layer(name).cache_stats(), placed.tables[name].traffic
        assert stats["ids"] == 2 * 60 * BATCH * COLUMNS
        steps = 2 * 60
        # The plan is of the second half of one pass, the counters are of two.
        assert stats["hit_rate"] == pytest.approx(traffic.hit_rate, abs=0.1)
        assert stats["bytes_up"] / steps == pytest.approx(traffic.bytes_up, rel=0.2)
