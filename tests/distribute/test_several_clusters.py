"""What is left of a cluster that was closed, and clusters one after another."""

from __future__ import annotations

import re

import program_runner
import pytest

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def seen():
    return program_runner.result_of("several_clusters_program.py")


CLOSED = [
    *("fit", "evaluate", "predict", "flush", "cache_stats", "call", "scope", "save"),
    *("save_weights", "checkpoint", "restore", "table.size", "table.lookup", "table.export"),
]


def test_after_the_cluster_was_closed(seen):
    assert sorted(seen["closed"]) == sorted(CLOSED)
    for method, said in seen["closed"].items():
        assert said.startswith("RuntimeError: The LocalCluster of this strategy was"), method
    assert seen["without a scope"] == []


def test_under_the_strategy_of_tensorflow(seen):
    assert len(seen["of tensorflow"]) == 3
    for method, said in seen["of tensorflow"].items():
        assert re.match(
            r"ValueError: Model 'clicks' .* tf\.distribute\.ParameterServerStrategyV2, .* make the"
            r" strategy a het_tf\.distribute\.HetParameterServerStrategy",
            said,
        ), method


def test_a_recovery_leaves_alone_what_is_left_of_another_cluster(seen):
    run = seen["of the second cluster"]
    assert run["is the latest"]
    assert run["recoveries"] == 1
    assert run["rows"] == run["rows before"]
    assert sum(run["rows"]) == 100


def test_a_later_strategy_puts_an_earlier_one_out_of_reach(seen):
    assert len(seen["another cluster"]) == 4
    for method, said in seen["another cluster"].items():
        assert "has connected this process to another cluster" in said, method
    assert seen["rows of the third cluster"] == 100


def test_datasets_and_tables_outlive_the_cluster(seen):
    assert set(seen["batches"].values()) == {8}


def test_servers_end_with_the_cluster(seen):
    assert seen["processes left"] == []


def test_logs_of_the_servers_are_kept(seen):
    assert "ps 0 serves" in seen["log"]
    assert seen["in log_dir"] == ["ps-0.log", "servers.log", "worker-0.log"]
