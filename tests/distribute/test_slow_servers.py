"""Servers that are not there yet, are slow, or are silent for a while are not given up."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import program_runner
import pytest
from standalone import free_address

from het_tf.distribute.failures import probes

PROGRAM = """
import os, sys
import tensorflow as tf, het_tf
# So that what it says of the servers comes by way of stdout.
os.dup2(1, 2)
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(CLUSTER), rpc_layer="grpc"
)
strategy = het_tf.distribute.HetParameterServerStrategy(resolver)
with strategy.scope():
    layer = het_tf.layers.HetEmbedding(2)
    layer.build()
print("rows", layer.table.size(), flush=True)
os._exit(0)
"""


@pytest.fixture
def addresses():
    """Of tasks that are not there; nobody else is given their ports meanwhile."""
    with contextlib.ExitStack() as stack:
        yield {job: [free_address(stack)] for job in ("ps", "worker")}


def test_servers_that_are_not_started_are_named_and_waited_for(addresses):
    assert 2 * probes.REPORT_INTERVAL <= 10
    program = program_runner.Program("-c", f"CLUSTER = {json.dumps(addresses)}\n{PROGRAM}")
    with contextlib.ExitStack() as stack:
        stack.callback(program.kill)
        said = ""
        while not said.endswith("is gone\n") or "worker 0" not in said:
            line = program.stdout.readline()
            assert line, said
            said += line
        assert "waiting for 2 of 2 tasks" in said
        for job in ("ps", "worker"):
            assert f"{job} 0 at {addresses[job][0]} refuses connections" in said
        environments = {
            job: {
                **os.environ,
                "TF_GRPC_REUSE_PORT": "1",
                "TF_CONFIG": json.dumps({"cluster": addresses, "task": {"type": job, "index": 0}}),
            }
            for job in ("ps", "worker")
        }
        worker = program_runner.Program("-m", "het_tf.server", env=environments["worker"])
        # As users start it.
        ps = subprocess.Popen(
            [sys.executable, "-m", "het_tf.server"],
            env=environments["ps"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for server in (worker, ps):
            stack.callback(server.wait)
            stack.callback(server.kill)
        said, _ = program.communicate()
        assert said.endswith("rows 0\n"), said


@pytest.fixture(scope="module")
def seen():
    return program_runner.result_of("slow_server_program.py")


def test_a_thread_that_waits_for_a_server_holds_up_no_other(seen):
    assert seen["beside"] == [2, [0], False, 1.0]


def test_a_server_that_is_silent_for_a_while(seen):
    assert seen["silent"]["counts"] == 40 * [1]
    assert probes.TaskState.SILENT.value in "".join(seen["silent"]["warnings"])


@pytest.mark.exhaustive
def test_servers_with_one_core_and_with_a_load_of_20_on_it():
    seen = program_runner.result_of("slow_server_program.py", "--loaded")
    assert seen["one core"] == seen["slow"]["counts"] == 40 * [1]
    assert max(seen["slow"]["seconds of a probe"]) < probes.LOST_AFTER
