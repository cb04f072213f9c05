"""A training program that is started again while servers have given up the one before."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time

import pytest
import standalone

PROGRAM = """
import sys
import tensorflow as tf
import het_tf
from het_tf._visits import cluster_devices
from het_tf.table import EmbeddingTable

how, folder = sys.argv[1:]
print("starts", flush=True)
sys.stdin.readline()
strategy = het_tf.distribute.HetParameterServerStrategy(
    tf.distribute.cluster_resolver.TFConfigClusterResolver()
)
HERE, SERVER = "/job:localhost/replica:0/task:0/device:CPU:0", "/job:ps/task:0/device:CPU:0"

@tf.function
def asks(start):
    # In every round the server asks this program for a number, and is busy for a while.
    def round(i, total):
        with tf.device(HERE):
            asked = start + tf.cast(i, tf.float32)
        with tf.device(SERVER):
            matrix = tf.fill([800, 800], asked)
            for _ in range(20):
                matrix = tf.linalg.matmul(matrix, matrix) / 800.0
            return i + 1, total + tf.reduce_sum(matrix)

    with tf.device(SERVER):
        return tf.while_loop(lambda i, total: i < 1_000_000, round, [0, 0.0])

if how == "asks":
    print("asks", flush=True)
    asks(tf.constant(1.0))
table = EmbeddingTable(2, het_tf.optimizers.SGD(0.1), devices=cluster_devices("ps"))
with strategy.scope():
    variables = [tf.Variable(0.0), tf.Variable(0.0)]
rows = het_tf.checkpoint.TableState(table, lambda: None)
checkpoint = tf.train.Checkpoint(rows=rows, variables=variables)
print(checkpoint.save(folder + "/made"))
"""


def tell(program: subprocess.Popen) -> None:
    """Has it connect to the cluster."""
    assert program.stdout.readline() == "starts\n"
    program.stdin.write("\n")
    program.stdin.flush()


def was_asked(address: str) -> bool:
    """Whether a server tries to reach the address, in vain: then it waits with the next time."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("", int(address.rpartition(":")[2])))
        listening.listen()
        listening.settimeout(3.0)
        with contextlib.suppress(TimeoutError):
            listening.accept()[0].close()
            return True
    return False


def test_a_program_that_is_started_again_saves_once_servers_reach_it(tmp_path):
    with contextlib.ExitStack() as stack:
        servers = standalone.Servers(stack, num_ps=2)
        chief = servers.address()
        saves = servers.start(["-c", PROGRAM, "saves", tmp_path], chief)
        for _ in range(5):
            asks = servers.start(["-c", PROGRAM, "asks", tmp_path], chief)
            tell(asks)
            assert asks.stdout.readline() == "asks\n"
            time.sleep(2)  # until it does
            asks.kill()
            asks.communicate()
            if was_asked(chief):
                break
        else:
            pytest.skip("no server asked a program that was gone, so none has to be waited for")
        tell(saves)
        said, errors = saves.communicate(timeout=600)
        assert said == f"{tmp_path}/made-1\n", errors
