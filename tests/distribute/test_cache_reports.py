"""What is said about a cache that a worker lost."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from het_tf.distribute.cache_reports import CacheReport, CacheReports


class FakeCache:
    def __init__(self, name, row):
        self.name = name
        self.row = row

    def report_op(self):
        return tf.constant(self.row, tf.int64)


def test_report_ops_have_a_row_per_cache():
    reports = CacheReports()
    assert reports.report_ops().shape == (0, 4)
    first, second = FakeCache("a", [0, 7, 1, 2]), FakeCache("b", [0, 8, 3, 4])
    for cache in (first, second, first):
        reports.register(cache)
    np.testing.assert_array_equal(reports.report_ops(), [[0, 7, 1, 2], [0, 8, 3, 4]])
    reports.note(reports.report_ops().numpy())
    assert reports.last(second) == {0: CacheReport(0, 8, 3, 4)}


def test_warns_once_when_a_worker_is_lost(caplog):
    reports = CacheReports()
    reports.register(FakeCache("users", [0] * 4))
    reports.note([[0, 11, 5, 100]])
    reports.note([[1, 12, 6, 200]])
    reports.worker_lost(1)
    reports.worker_lost(1)
    assert len(caplog.records) == 1
    text = caplog.text
    assert "worker 1 lost its cache users" in text
    assert "at most 6 updates that it had not sent are lost" in text
    assert reports.last(reports.caches[0]) == {0: CacheReport(0, 11, 5, 100)}


def test_warns_when_a_cache_comes_back_empty(caplog):
    reports = CacheReports()
    reports.register(FakeCache("users", [0] * 4))
    reports.note([[1, 12, 6, 200]])
    reports.note([[1, 12, 0, 210]])
    assert not caplog.records
    reports.note([[1, 13, 2, 2]])
    assert "at most 0 updates that it had not sent are lost (of 210 it had made)" in caplog.text
