"""Batches whose rows are all hot: het_tf.data.hot_batches."""

from __future__ import annotations

from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf

BATCH = 4


def examples(n, seed=0):
    rng = np.random.default_rng(seed)
    users, items = rng.zipf(1.5, n) % 50, rng.zipf(1.5, (n, 2)) % 50
    return {"user": users, "items": items}, np.arange(n, dtype=np.float32)


def ids(x, y):
    return [x["user"], x["items"]]


def test_hot_rows_are_those_of_all_layers_that_occur_most():
    x, y = examples(4000)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    hot = het_tf.data.hot_rows(dataset, ids, budget=30, sample=1)
    counts = {}
    for table, part in enumerate([x["user"], x["items"].ravel()]):
        for key in part:
            counts[table, key] = counts.get((table, key), 0) + 1
    chosen = {(table, key) for table, keys in enumerate(hot.keys) for key in keys.tolist()}
    assert len(chosen) == 30
    least = min(counts[c] for c in chosen)
    assert all(count <= least for c, count in counts.items() if c not in chosen)
    assert hot.accesses == pytest.approx(sum(counts[c] for c in chosen) / (3 * 4000))
    is_hot = np.isin(x["user"], hot.keys[0]) & np.isin(x["items"], hot.keys[1]).all(1)
    assert hot.examples == pytest.approx(is_hot.mean())
    sampled = het_tf.data.hot_rows(dataset, ids, budget=30, sample=0.05)
    seen = np.concatenate([x["user"][i : i + 10] for i in range(0, 4000, 200)])
    assert set(sampled.keys[0].tolist()) <= set(seen.tolist())
    assert all(np.all(np.diff(keys) > 0) for keys in sampled.keys)


@pytest.mark.parametrize("n", [203, 3, 0])
def test_each_example_is_in_one_batch_of_its_kind(n):
    x, y = examples(n)
    hot = het_tf.data.HotRows((np.arange(1, 4)[::-1], np.arange(1, 6)), 0.0, 0.0)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    elements = list(het_tf.data.hot_batches(dataset, ids, hot, batch_size=BATCH, phase_batches=3))
    seen, runs, open_phase = [], [], []
    for (batch_x, batch_y), (phase_x, phase_y), is_hot in elements:
        of_batch = batch_y.numpy().tolist()
        seen += of_batch
        np.testing.assert_array_equal(x["items"][np.int64(of_batch)], batch_x["items"])
        all_hot = np.isin(batch_x["user"], hot.keys[0]) & np.isin(
            batch_x["items"], hot.keys[1]
        ).all(1)
        assert np.all(all_hot == is_hot.numpy())
        if len(phase_y):
            assert not open_phase  # the phase before has ended
            open_phase = phase_y.numpy().tolist()
            assert len(phase_x["user"]) == len(open_phase)
        if is_hot:
            assert open_phase[: len(of_batch)] == of_batch
            open_phase = open_phase[len(of_batch) :]
        if not runs or runs[-1][0] != bool(is_hot) or len(runs[-1][1]) == 3:
            runs.append((bool(is_hot), []))
        runs[-1][1].append(len(of_batch))
    assert not open_phase
    assert sorted(seen) == list(range(n))
    for kind in (True, False):
        of_kind = [sizes for is_hot, sizes in runs if is_hot == kind]
        full = [size for sizes in of_kind for size in sizes]
        assert all(size == BATCH for size in full[:-1])  # the last one may have fewer
        assert all(len(sizes) == 3 for sizes in of_kind[:-1])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"phase_batches": 0}, "phase_batches must be an integer from 1 to 1048576, not 0"),
        ({"batch_size": 0}, "batch_size must be an integer from 1 to .*, not 0"),
        ({"batch_size": None}, "give hot_batches the batch_size"),
        ({"hot": [3]}, r"hot must be a het_tf.data.HotRows, not \[3\]"),
        ({"hot": het_tf.data.HotRows((np.arange(2),), 0.0, 0.0)}, "hot has rows of 1 layers"),
        (
            {
                "dataset": tf.data.Dataset.from_generator(
                    lambda: [], output_signature=tf.TensorSpec([None, None], tf.int64)
                )
            },
            r"the dataset has TensorSpec\(shape=\(None, None\)",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, said):
    x, y = examples(8)
    given = {
        "dataset": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),
        "hot": het_tf.data.HotRows((np.arange(2), np.arange(2)), 0.0, 0.0),
        "batch_size": BATCH,
        **arguments,
    }
    with pytest.raises(ValueError, match=said):
        het_tf.data.hot_batches(given.pop("dataset"), ids, **given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"budget": 0}, "budget must be an integer from 1 to .*, not 0"),
        ({"sample": 0}, "sample must be a number from 1e-06 to 1, not 0"),
        ({"ids": lambda x: tf.cast(x, tf.float32)}, "ids must return integers, not float32"),
    ],
)
def test_bad_arguments_of_hot_rows_are_named(arguments, said):
    dataset = tf.data.Dataset.range(8, output_type=tf.int32).batch(2)
    with pytest.raises(ValueError, match=said):
        het_tf.data.hot_rows(dataset, **{"ids": lambda x: x, "budget": 3, **arguments})


def test_hot_rows_need_a_finite_dataset_with_ids():
    dataset = tf.data.Dataset.range(8).batch(2)
    with pytest.raises(ValueError, match="the dataset is infinite"):
        het_tf.data.hot_rows(dataset.repeat(), lambda x: x, 3)
    for empty in dataset.take(0), dataset.map(lambda x: x[:0]):
        with pytest.raises(ValueError, match="the dataset has no ids"):
            het_tf.data.hot_rows(empty, lambda x: x, 3)


class Example(NamedTuple):
    ids: tf.Tensor
    label: tf.Tensor


def test_named_tuples_are_one_argument():
    ids = tf.constant([3, 3, 4, 3, 3])
    data = tf.data.Dataset.from_tensor_slices(Example(ids, tf.range(5))).batch(2)
    hot = het_tf.data.hot_rows(data, lambda x: x.ids, 1, sample=1)
    assert (hot.keys[0].tolist(), hot.accesses, hot.examples) == ([3], 0.8, 0.8)
    found = het_tf.data.hot_batches(data, lambda x: x.ids, hot, batch_size=2)
    assert [e.batch.label.numpy().tolist() for e in found] == [[2], [0, 1], [3, 4]]


def test_fit_without_a_cluster_says_what_it_needs():
    hot = het_tf.data.HotRows((np.arange(2),), 0.0, 0.0)
    data = tf.data.Dataset.range(8).batch(2)
    data = het_tf.data.hot_batches(data, lambda x: x, hot, batch_size=2)
    inputs = keras.Input((), dtype="int64")
    model = het_tf.keras.Model(inputs, het_tf.layers.HetEmbedding(2)(inputs))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="pass a function of a"):
        model.fit(data)
