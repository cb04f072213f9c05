"""What is said about a cache that a worker lost."""

from __future__ import annotations

import pytest

import het_tf
from het_tf.cache import WorkerCache
from het_tf.distribute.cache_reports import CacheReport, CacheReports, report_ops


def new_cache(name):
    table = het_tf.EmbeddingTable(1, het_tf.optimizers.SGD(), name=name)
    return WorkerCache(table, het_tf.CacheConfig(10))


@pytest.fixture
def users():
    """Reports of one cache, and the cache."""
    reports = CacheReports()
    cache = new_cache("users")
    reports.register(cache)
    return reports, cache


def test_report_ops_have_a_row_per_cache():
    assert report_ops([]).shape == (0, 4)
    reports = CacheReports()
    caches = new_cache("a"), new_cache("b")
    for cache in (*caches, caches[0]):
        reports.register(cache)
    assert reports.caches == caches
    values = report_ops(caches).numpy()
    assert values[0, 1] != values[1, 1]
    assert values[:, [0, 2, 3]].tolist() == 2 * [[0, 0, 0]]
    for cache, row in zip(caches, values, strict=True):
        reports.record(cache, row)
        assert reports.last(cache) == {0: CacheReport(*row)}


def test_caches_are_held_weakly():
    reports = CacheReports()
    first, second = new_cache("a"), new_cache("b")
    reports.register(first)
    reports.register(second)
    del first
    assert reports.caches == (second,)
    del second
    assert reports.caches == ()


def test_warns_once_when_a_worker_is_lost(users, caplog):
    reports, cache = users
    reports.record(cache, [0, 11, 5, 100])
    reports.record(cache, [1, 12, 6, 200])
    reports.worker_lost(1)
    reports.worker_lost(1)
    assert len(caplog.records) == 1
    text = caplog.text
    assert "worker 1 lost its cache users/" in text
    assert "at most 6 updates that it had not sent are lost" in text
    assert reports.last(cache) == {0: CacheReport(0, 11, 5, 100)}


def test_results_may_come_in_another_order_than_the_closures_ended(users, caplog):
    reports, cache = users
    reports.record(cache, [1, 12, 6, 200])
    reports.record(cache, [1, 12, 5, 100])
    assert reports.last(cache) == {1: CacheReport(1, 12, 6, 200)}
    reports.record(cache, [1, 13, 1, 1])
    reports.record(cache, [1, 12, 5, 150])  # no more than was said
    assert [r.args[4] for r in caplog.records] == [6]
    reports.record(cache, [1, 12, 9, 250])
    assert [r.args[4] for r in caplog.records] == [6, 9]
    assert reports.last(cache) == {1: CacheReport(1, 13, 1, 1)}


def test_a_late_result_of_a_lost_worker_is_told_if_it_had_more(users, caplog):
    reports, cache = users
    reports.record(cache, [1, 12, 6, 200])
    reports.worker_lost(1)
    reports.record(cache, [1, 12, 8, 220])
    reports.worker_lost(1)
    reports.worker_lost(1)
    assert [r.args[4] for r in caplog.records] == [6, 8]
    assert reports.last(cache) == {}


def test_warns_when_a_cache_comes_back_empty(users, caplog):
    reports, cache = users
    reports.record(cache, [1, 12, 6, 200])
    reports.record(cache, [1, 12, 0, 210])
    assert not caplog.records
    reports.record(cache, [1, 13, 2, 2])
    assert "at most 0 updates that it had not sent are lost (of 210 it had made)" in caplog.text
