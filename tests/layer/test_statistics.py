"""Statistics of a dataset's ids: exact where there is memory, with stated errors where not."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf

from het_tf.planner import Statistics, statistics
from het_tf.runtime.key_counts import FrequentKeys

BATCH = 64


def zipf(examples, columns=4, rows=20_000, seed=1):
    return np.random.default_rng(seed).zipf(1.2, (examples, columns)) % rows


def counted(ids, **kwargs):
    dataset = tf.data.Dataset.from_tensor_slices(ids).batch(BATCH)
    return statistics(dataset, lambda x: {"emb": x}, **kwargs)


def test_small_streams_are_counted_exactly():
    ids = zipf(BATCH * 10)
    found = counted(ids)
    table = found.tables["emb"]
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    assert (found.examples, found.batches, table.ids) == (640, 10, ids.size)
    assert table.rows == len(counts)
    assert table.keys == sum(len(np.unique(ids[b : b + BATCH])) for b in range(0, 640, BATCH))
    rows = [0, 1, 10, len(counts), 10**9]
    np.testing.assert_allclose(
        table.coverage(rows), [counts[:n].sum() / counts.sum() for n in rows], rtol=1e-12
    )


def test_little_memory_gives_estimates_within_the_stated_errors():
    ids = zipf(BATCH * 500, rows=10**7)
    exact, found = counted(ids), counted(ids, memory="600kB")
    few, all_ = found.tables["emb"], exact.tables["emb"]
    assert few.rate < 0.5
    assert all_.rate == 1
    assert (few.ids, few.keys) == (all_.ids, all_.keys)
    assert few.rows == pytest.approx(all_.rows, rel=4 * few.rows_error)
    rows = np.array([1, 10, 100, 1000, 10_000])
    np.testing.assert_allclose(few.coverage(rows), all_.coverage(rows), atol=0.02)
    assert sum(len(keys) * 12 for keys, _ in few.trace) < 600_000


def test_a_table_of_few_keys_is_traced_in_its_last_batches():
    few = counted(zipf(BATCH * 2000, columns=1, rows=3), memory="40kB").tables["emb"]
    assert (few.rows, few.rate, few.batches) == (3, 1, 2000)
    assert 10 < len(few.trace) < 1000
    assert sum(len(keys) for keys, _ in few.trace) == 3 * len(few.trace)


def test_parts_of_workers_add_up_to_the_whole(tmp_path):
    ids = zipf(BATCH * 30)
    parts = [counted(ids[worker * 640 : (worker + 1) * 640]) for worker in range(3)]
    parts[1].save(tmp_path / "part.npz")
    parts[1] = Statistics.load(tmp_path / "part.npz")
    merged, whole = Statistics.merge(parts), counted(ids)
    assert str(merged) == str(whole)
    # The workers train the batches in turn.
    for batch, (keys, counts) in enumerate(merged.tables["emb"].trace):
        first = batch % 3 * 640 + batch // 3 * BATCH
        expected = np.unique(ids[first : first + BATCH], return_counts=True)
        np.testing.assert_array_equal([keys, counts], expected)


@pytest.mark.parametrize("counters", [1, 10, 100])
def test_counts_of_frequent_keys_are_within_the_error(counters):
    rng = np.random.default_rng(counters)
    parts, exact = [], collections.Counter()
    for _ in range(3):
        part = FrequentKeys(counters)
        for _ in range(40):
            keys, counts = np.unique(rng.zipf(1.3, 50), return_counts=True)
            exact.update(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
            part.add(keys, counts)
        parts.append(part.state())
    merged = FrequentKeys.restored(counters, parts)
    found = dict(zip(*(each.tolist() for each in merged.top()), strict=True))
    assert len(found) <= counters
    assert merged.error <= 6000 / (counters + 1)
    for key, count in exact.items():
        assert count - merged.error <= found.get(key, 0) <= count


def test_ids_may_be_ragged_sparse_or_of_several_layers():
    ragged = tf.ragged.constant([[1, 2], [], [2]], dtype=tf.int64)
    dataset = tf.data.Dataset.from_tensors((ragged, ragged.to_sparse(), np.arange(3)))
    found = statistics(dataset, lambda a, b, c: {"ragged": a, "sparse": b, "dense": c})
    assert found.examples == 3
    assert {name: (t.ids, t.rows) for name, t in found.tables.items()} == {
        "ragged": (3, 2),
        "sparse": (3, 2),
        "dense": (3, 3),
    }


def test_what_has_no_ids_is_named(tmp_path):
    batches = tf.data.Dataset.from_tensor_slices(np.zeros((4, 2))).batch(2)
    for ids, message in (
        (lambda x: {"emb": x}, "ids must return integers, but 'emb' is float64"),
        (lambda x: tf.cast(x, tf.int64), "ids must return a dictionary from layer names"),
        (lambda x: {"emb": tf.constant(1)}, "'emb' is a scalar"),
        (lambda x: {"emb": tf.zeros([1, 0], tf.int64)}, "the dataset has no ids"),
    ):
        with pytest.raises(ValueError, match=message):
            statistics(batches, ids)
    with pytest.raises(ValueError, match=r"below 2\*\*63, but 'emb' has 9223372036854775813"):
        counted(np.array([2**63 + 5], np.uint64))
    with pytest.raises(ValueError, match="the dataset is infinite"):
        statistics(batches.repeat(), lambda x: {"emb": tf.cast(x, tf.int64)})
    with pytest.raises(ValueError, match=r"memory must be a positive number of bytes.*'much'"):
        counted(zipf(2), memory="much")
    np.savez(tmp_path / "other.npz", x=np.zeros(2))
    with pytest.raises(ValueError, match="has no statistics of het_tf"):
        Statistics.load(tmp_path / "other.npz")
    whole = tmp_path / "whole.npz"
    counted(zipf(2)).save(whole)
    (tmp_path / "cut.npz").write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cut.npz has no statistics of het_tf"):
        Statistics.load(tmp_path / "cut.npz")
    other = statistics(batches, lambda x: {"other": tf.cast(x, tf.int64)})
    with pytest.raises(ValueError, match=r"the tables \['emb'\] and \['other'\]"):
        Statistics.merge([counted(zipf(2)), other])
