"""What is said about a cache that a worker lost."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tensorflow as tf

from het_tf.distribute.cache_reports import CacheReport, CacheReports


class FakeCache:
    def __init__(self, name, row):
        self.name = name
        self.row = row
        self.flushed = 0

    def flush_op(self):
        self.flushed += 1
        return tf.constant(0)

    def report_op(self):
        return tf.constant(self.row, tf.int64)


@pytest.fixture
def users():
    """Reports of one cache, and the cache."""
    reports = CacheReports()
    cache = FakeCache("users", [0] * 4)
    reports.register(cache)
    return reports, cache


def test_report_ops_have_a_row_per_cache():
    reports = CacheReports()
    assert reports.report_ops().shape == (0, 5)
    first, second = FakeCache("a", [0, 7, 1, 2]), FakeCache("b", [0, 8, 3, 4])
    for cache in (first, second, first):
        reports.register(cache)
    np.testing.assert_array_equal(reports.report_ops(), [[0, 0, 7, 1, 2], [1, 0, 8, 3, 4]])
    reports.note(reports.report_ops().numpy())
    assert reports.last(second) == {0: CacheReport(0, 8, 3, 4)}


def test_caches_are_held_weakly():
    reports = CacheReports()
    first, second = FakeCache("a", [0, 7, 1, 2]), FakeCache("b", [0, 8, 3, 4])
    reports.register(first)
    reports.register(second)
    del first
    gc.collect()
    assert reports.caches == (second,)
    np.testing.assert_array_equal(reports.report_ops(), [[1, 0, 8, 3, 4]])
    assert [f().numpy().tolist() for f in reports.flush_functions()] == [[1, 0, 8, 3, 4]]
    assert second.flushed == 1
    del second
    gc.collect()
    assert reports.caches == ()


def test_warns_once_when_a_worker_is_lost(users, caplog):
    reports, cache = users
    reports.note([[0, 0, 11, 5, 100]])
    reports.note([[0, 1, 12, 6, 200]])
    reports.worker_lost(1)
    reports.worker_lost(1)
    assert len(caplog.records) == 1
    text = caplog.text
    assert "worker 1 lost its cache users" in text
    assert "at most 6 updates that it had not sent are lost" in text
    assert reports.last(cache) == {0: CacheReport(0, 11, 5, 100)}


def test_results_may_come_in_another_order_than_the_closures_ended(users, caplog):
    reports, cache = users
    reports.note([[0, 1, 12, 6, 200]])
    reports.note([[0, 1, 12, 5, 100]])
    assert reports.last(cache) == {1: CacheReport(1, 12, 6, 200)}
    reports.note([[0, 1, 13, 1, 1]])
    reports.note([[0, 1, 12, 5, 150]])  # no more than was said
    assert [r.args[3] for r in caplog.records] == [6]
    reports.note([[0, 1, 12, 9, 250]])
    assert [r.args[3] for r in caplog.records] == [6, 9]
    assert reports.last(cache) == {1: CacheReport(1, 13, 1, 1)}


def test_a_late_result_of_a_lost_worker_is_told_if_it_had_more(users, caplog):
    reports, cache = users
    reports.note([[0, 1, 12, 6, 200]])
    reports.worker_lost(1)
    reports.note([[0, 1, 12, 8, 220]])
    reports.worker_lost(1)
    reports.worker_lost(1)
    assert [r.args[3] for r in caplog.records] == [6, 8]
    assert reports.last(cache) == {}


def test_warns_when_a_cache_comes_back_empty(users, caplog):
    reports, _ = users
    reports.note([[0, 1, 12, 6, 200]])
    reports.note([[0, 1, 12, 0, 210]])
    assert not caplog.records
    reports.note([[0, 1, 13, 2, 2]])
    assert "at most 0 updates that it had not sent are lost (of 210 it had made)" in caplog.text
