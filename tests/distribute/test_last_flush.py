"""What a worker sends before it ends."""

from __future__ import annotations

import contextlib
import json
import os

import standalone
from program_runner import Program

# A worker and a parameter server in one process, which has a cache and its table.
PROGRAM = """
import json, sys
import tensorflow as tf
from het_tf import ops
from het_tf.distribute.shutdown_flush import send_all
from het_tf.distribute.cluster.tf_config import TaskConfig
from het_tf.server import start_server

cluster = json.loads(sys.argv[1])
servers = {job: start_server(TaskConfig(cluster, job, 0)) for job in ("ps", "worker")}
rows = {"dim": 2, "optimizer": "sgd", "initializer": "zeros"}
table = ops.table_handle(shared_name="table", **rows)
cache = ops.cache_handle(shared_name="cache", capacity=9, **rows)
ticket, requests = ops.cache_lookup(cache, ops.unique_ids([1]), num_shards=1)
ops.cache_install(cache, ticket, [ops.table_sync(table, requests[0])])
ops.cache_update(cache, ticket, tf.ones([1, 2]), 1.0)
tf.raw_ops.DestroyResourceOp(resource=table)
sent = send_all(servers["worker"].target, TaskConfig(cluster, "worker", 0), 60.0)
print(json.dumps([sent, ops.process_ended().numpy().tolist()]), flush=True)
"""


def test_a_worker_that_could_not_send_all_does_not_say_that_nothing_was_lost():
    with contextlib.ExitStack() as stack:
        cluster = {job: [standalone.free_address(stack)] for job in ("ps", "worker")}
        env = os.environ | {"TF_GRPC_REUSE_PORT": "1"}
        said, errors = Program("-c", PROGRAM, json.dumps(cluster), env=env).communicate()
    (reached, down), ended = json.loads(said or errors)
    assert (reached, down) == (0, 1)
    assert ended == []
