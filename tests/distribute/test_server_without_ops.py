"""A parameter server that was not started with `python -m het_tf.server`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest
from standalone import free_address

SERVER = """
import tensorflow as tf
tf.distribute.Server(CLUSTER, job_name=JOB, task_index=0).join()
"""

PROGRAM = """
import tensorflow as tf, het_tf
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(CLUSTER), rpc_layer="grpc"
)
strategy = het_tf.distribute.HetParameterServerStrategy(resolver)
with strategy.scope():
    layer = het_tf.layers.HetEmbedding(4)
    try:
        layer.build()
    except tf.errors.NotFoundError as error:
        print("ERROR", error.message, flush=True)
import os
os._exit(0)
"""


@pytest.fixture
def cluster():
    """Addresses whose ports nobody else is given meanwhile."""
    with contextlib.ExitStack() as stack:
        yield {job: [free_address(stack)] for job in ("worker", "ps", "chief")}


def test_the_error_says_how_to_start_it(cluster):
    environment = {
        **os.environ,
        "GRPC_FAIL_FAST": "use_caller",
        "grpc_proxy": "",
        "TF_GRPC_REUSE_PORT": "1",
    }
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", f"CLUSTER = {json.dumps(cluster)}; JOB = {job!r}\n{SERVER}"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for job in ("worker", "ps")
    ]
    try:
        program = subprocess.run(
            [sys.executable, "-c", f"CLUSTER = {json.dumps(cluster)}\n{PROGRAM}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
    finally:
        for server in servers:
            server.kill()
            server.wait()
    assert "ERROR /job:ps/replica:0/task:0/device:CPU:0 does not know the het_tf ops" in (
        program.stdout
    ), program.stderr[-3000:]
    assert "python -m het_tf.server" in program.stdout
