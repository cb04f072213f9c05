"""What a training program leaves on servers that go on after it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import keras, numpy as np, tensorflow as tf, het_tf
strategy = het_tf.distribute.HetParameterServerStrategy(
    tf.distribute.cluster_resolver.TFConfigClusterResolver()
)

def left():
    with tf.device("/job:ps/task:0/device:CPU:0"):
        tables = het_tf.ops.process_tables()
    with tf.device("/job:worker/task:0/device:CPU:0"):
        caches = het_tf.ops.process_caches(all=True)[:, 0]
    return [len(set(each.numpy().tolist())) for each in (tables, caches)]

before = left()
with strategy.scope():
    embedding = het_tf.layers.HetEmbedding(2, seed=1, cache=het_tf.CacheConfig(10))
    model = het_tf.keras.Sequential([embedding, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.zeros([4, 2], "int64"), np.ones([4, 1]), batch_size=2, verbose=0)
print(before, left(), flush=True)
if sys.argv[1] == "raises":
    raise SystemError("as asked")
"""


@pytest.fixture
def servers():
    """Runs a ps and a worker; the environment of their training program."""
    with contextlib.ExitStack() as stack:
        cluster = {}
        for job in ("ps", "worker", "chief"):
            # Nobody else is given the port meanwhile.
            port = stack.enter_context(socket.socket())
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port.bind(("", 0))
            cluster[job] = [f"localhost:{port.getsockname()[1]}"]

        def environment(job):
            task = {"cluster": cluster, "task": {"type": job, "index": 0}}
            return {**os.environ, "TF_GRPC_REUSE_PORT": "1", "TF_CONFIG": json.dumps(task)}

        for job in ("ps", "worker"):
            server = subprocess.Popen(
                [sys.executable, "-m", "het_tf.server"],
                env=environment(job),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(server.wait)
            stack.callback(server.kill)
        yield environment("chief")


def test_a_program_that_ends_frees_its_tables_and_caches(servers):
    for how in ("raises", "ends"):
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, how],
            env=servers,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert ("SystemError: as asked" in ended.stderr) == (how == "raises"), ended.stderr
        assert (ended.returncode == 0) == (how == "ends"), ended.stderr
        before, after = map(json.loads, ended.stdout.replace("] [", "]\n[").splitlines())
        assert (before, after) == ([0, 0], [1, 1])
