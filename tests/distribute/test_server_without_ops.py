"""A parameter server that was not started with `python -m het_tf.server`."""

from __future__ import annotations

import contextlib
import json
import os

from program_runner import Program
from standalone import free_address

SERVER = """
import tensorflow as tf
tf.distribute.Server(CLUSTER, job_name=JOB, task_index=0).join()
"""

PROGRAM = """
import os, tensorflow as tf, het_tf
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(CLUSTER), rpc_layer="grpc"
)
strategy = het_tf.distribute.HetParameterServerStrategy(resolver)
with strategy.scope():
    layer = het_tf.layers.HetEmbedding(4, optimizer="sgd")
    try:
        layer.build()
    except tf.errors.NotFoundError as error:
        print("ERROR", error.message, flush=True)
os._exit(0)
"""


def test_the_error_says_how_to_start_it():
    environment = {
        **os.environ,
        "GRPC_FAIL_FAST": "use_caller",
        "grpc_proxy": "",
        "TF_GRPC_REUSE_PORT": "1",
    }
    with contextlib.ExitStack() as stack:
        # Nobody else is given their ports meanwhile.
        cluster = {job: [free_address(stack)] for job in ("worker", "ps", "chief")}
        given = f"CLUSTER = {json.dumps(cluster)}"
        for job in ("worker", "ps"):
            server = Program("-c", f"{given}; JOB = {job!r}\n{SERVER}", env=environment)
            stack.callback(server.wait)
            stack.callback(server.kill)
        said, errors = Program("-c", f"{given}\n{PROGRAM}", env=environment).communicate()
    unknown = "ERROR /job:ps/replica:0/task:0/device:CPU:0 does not know the het_tf ops"
    assert unknown in said, errors[-3000:]
    assert "python -m het_tf.server" in said
