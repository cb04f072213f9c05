"""What is said about a cache that a worker lost."""

from __future__ import annotations

import pytest

import het_tf
from het_tf.distribute.worker_state import CacheReports, report_ops, reports_size
from het_tf.tables.worker_cache import WorkerCache


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


def values_of(cache, worker, cache_id, pending, updates):
    counters = dict.fromkeys(cache.counter_names, 0) | {"pending": pending, "updates": updates}
    return [worker, cache_id, *counters.values()]


def last(reports, cache):
    """Worker -> id, pending and updates of its last report."""
    return {
        worker: (report.cache_id, report.pending, report.updates)
        for worker, report in reports.last(cache).items()
    }


def test_reports_follow_one_another():
    assert report_ops([]).shape == (0,)
    reports = CacheReports()
    caches = new_cache("a"), new_cache("b")
    for cache in (*caches, caches[0]):
        reports.register(cache)
    assert reports.caches == caches
    values = report_ops(caches).numpy()
    assert len(values) == reports_size(caches)
    reports.record_all(caches, values)
    ids = []
    for cache in caches:
        (report,) = reports.last(cache).values()
        assert report.worker == 0
        assert set(report.counters) == set(cache.stats())
        ids.append(report.cache_id)
        assert {*report.counters.values()} == {0, cache.stats()["memory_bytes"]}
    assert ids[0] != ids[1]


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
    reports.record(cache, values_of(cache, 0, 11, 5, 100))
    reports.record(cache, values_of(cache, 1, 12, 6, 200))
    reports.worker_lost(1)
    reports.worker_lost(1)
    assert len(caplog.records) == 1
    text = caplog.text
    assert "worker 1 lost its cache users/" in text
    assert "at most 6 updates that it had not sent are lost" in text
    assert last(reports, cache) == {0: (11, 5, 100)}


def test_results_may_come_in_another_order_than_the_closures_ended(users, caplog):
    reports, cache = users
    reports.record(cache, values_of(cache, 1, 12, 6, 200))
    reports.record(cache, values_of(cache, 1, 12, 5, 100))
    assert last(reports, cache) == {1: (12, 6, 200)}
    reports.record(cache, values_of(cache, 1, 13, 1, 1))
    reports.record(cache, values_of(cache, 1, 12, 5, 150))  # no more than was said
    assert [r.args[4] for r in caplog.records] == [6]
    reports.record(cache, values_of(cache, 1, 12, 9, 250))
    assert [r.args[4] for r in caplog.records] == [6, 9]
    assert last(reports, cache) == {1: (13, 1, 1)}


def test_a_late_result_of_a_lost_worker_is_told_if_it_had_more(users, caplog):
    reports, cache = users
    reports.record(cache, values_of(cache, 1, 12, 6, 200))
    reports.worker_lost(1)
    reports.record(cache, values_of(cache, 1, 12, 8, 220))
    reports.worker_lost(1)
    reports.worker_lost(1)
    assert [r.args[4] for r in caplog.records] == [6, 8]
    assert reports.last(cache) == {}


def test_warns_when_a_cache_comes_back_empty(users, caplog):
    reports, cache = users
    reports.record(cache, values_of(cache, 1, 12, 6, 200))
    reports.record(cache, values_of(cache, 1, 12, 0, 210))
    assert not caplog.records
    reports.record(cache, values_of(cache, 1, 13, 2, 2))
    assert "at most 0 updates that it had not sent are lost (of 210 it had made)" in caplog.text


@pytest.mark.parametrize("pending", [0, 6])
def test_a_worker_that_sent_its_updates_and_ended_is_no_warning(caplog, pending):
    caplog.set_level("INFO", logger="absl")
    reports, cache = CacheReports(ended=lambda: {12}), new_cache("users")
    reports.register(cache)
    reports.record(cache, values_of(cache, 1, 12, pending, 200))
    reports.worker_lost(1)
    (said,) = caplog.records
    assert said.levelname == "INFO"
    assert "worker 1 has ended, after it had sent all updates of its cache users/" in caplog.text


def test_what_was_freed_is_not_lost(users, caplog):
    reports, cache = users
    reports.record(cache, values_of(cache, 1, 12, 6, 200))
    reports.forget(cache)
    reports.worker_lost(1)
    reports.record(cache, values_of(cache, 1, 13, 1, 1))
    reports.record(cache, values_of(cache, 1, 12, 5, 190))  # of a closure that ended before
    reports.record(cache, values_of(cache, 1, 13, 2, 2))
    assert last(reports, cache) == {1: (13, 2, 2)}
    assert not caplog.records


def test_functions_that_are_made_anew_are_no_warning(strategy, caplog):
    """Each is traced for every task, and all are forgotten when a server was another process."""
    with strategy.scope():
        embedding = het_tf.layers.HetEmbedding(4, cache=het_tf.CacheConfig(10))
        embedding.build()
    for _ in range(2):
        assert embedding.cache_stats()["lookups"] == 0
        embedding.flush()
        embedding.worker_cache.forget_functions()
    assert "retracing" not in caplog.text
