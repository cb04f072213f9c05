"""NaN and infinity in gradients: refused, and nothing changed; or skipped, and counted."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_tables import INVALID, flush, installed_ticket, new_cache, new_table, rows, stats, unique

import het_tf
from het_tf import ops, optimizers

# Of ids 1, 2, 1, 3: what makes the sum of one key bad, and which key.
BAD = [
    (0, np.nan, 1),
    (1, np.inf, 2),
    (3, -np.inf, 3),
    (2, 3e38, 1),  # finite, but not together with the other occurrence
]
IDS = (1, 2, 1, 3)


def gradients(position: int, value: float) -> np.ndarray:
    made = np.full((4, 2), -1, np.float32)
    made[position, 1] = value
    if value == 3e38:
        made[0, 1] = value
    return made


def wanted_without(key: int) -> dict:
    values = {1: ([2.0, 2.0], 1), 2: ([1.0, 1.0], 1), 3: ([1.0, 1.0], 1)}
    del values[key]
    return values


@pytest.mark.parametrize("optimizer", ["sgd", "adam clipnorm=1 max_norm=1"])
def test_a_table_refuses_the_whole_update(optimizer):
    table = new_table(optimizer=optimizer)
    ops.table_apply(table, unique(1), tf.ones([1, 2]), 1.0)
    before = rows(table)
    for position, value, _ in BAD:
        with pytest.raises(INVALID, match="hold NaN or infinity for 1 of 3 keys; no row was"):
            ops.table_apply(table, unique(*IDS), gradients(position, value), 1.0)
        assert rows(table) == before
    assert stats(ops.table_stats(table))["nonfinite_skipped"] == 0


def test_a_table_skips_and_counts_the_keys_concerned():
    for position, value, key in BAD:
        table = new_table()
        ops.table_apply(table, unique(*IDS), gradients(position, value), 1.0, nonfinite="skip")
        assert rows(table) == wanted_without(key)
        assert stats(ops.table_stats(table))["nonfinite_skipped"] == 1


@pytest.mark.parametrize("capacity", [9, 0])
def test_a_cache_refuses_the_whole_update(capacity):
    table, cache = new_table(), new_cache(capacity=capacity)
    ticket = installed_ticket(cache, *IDS, table=table)
    for position, value, _ in BAD:
        with pytest.raises(INVALID, match="hold NaN or infinity for 1 of 3 keys; no row was"):
            ops.cache_update(cache, ticket, gradients(position, value), 1.0)
        counters = stats(ops.cache_stats(cache))
        assert [counters[name] for name in ("updates", "pending", "nonfinite_skipped")] == [0] * 3
    flush(cache, table)
    assert rows(table) == {}
    ops.cache_update(cache, ticket, gradients(0, -1), 1.0)  # the step can be repeated
    flush(cache, table)
    assert rows(table) == {1: ([2, 2], 1), 2: ([1, 1], 1), 3: ([1, 1], 1)}


@pytest.mark.parametrize("capacity", [9, 0])
def test_a_cache_skips_and_counts_the_keys_concerned(capacity):
    for position, value, key in BAD:
        table, cache = new_table(), new_cache(nonfinite="skip", capacity=capacity)
        ticket = installed_ticket(cache, *IDS, table=table)
        ops.cache_update(cache, ticket, gradients(position, value), 1.0)
        counters = stats(ops.cache_stats(cache))
        assert (counters["updates"], counters["nonfinite_skipped"]) == (2, 1)
        flush(cache, table)
        assert rows(table) == wanted_without(key)


def new_layer(nonfinite: str) -> het_tf.layers.HetEmbedding:
    return het_tf.layers.HetEmbedding(
        1, optimizer=optimizers.SGD(1.0), embeddings_initializer="zeros", nonfinite=nonfinite
    )


def fit(layer: het_tf.layers.HetEmbedding) -> None:
    """Ids 1 and 2, where the label of id 2 is infinite."""
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, keras.ops.squeeze(layer(inputs), -1))
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    model.fit(np.array([1, 2]), np.array([1.0, np.inf]), batch_size=2, verbose=0)


def test_fit_stops_at_a_bad_gradient_and_the_table_is_as_before():
    layer = new_layer("error")
    with pytest.raises(INVALID, match="hold NaN or infinity for 1 of 2 keys; no row was"):
        fit(layer)
    assert layer.table.size() == 0


def test_fit_skips_and_counts_bad_gradients_if_told_to():
    layer = new_layer("skip")
    fit(layer)
    assert layer.table.export().keys.tolist() == [1]
    assert layer.table.stats()["nonfinite_skipped"] == 1
