"""A training program that servers do not reach at once, as where one before it was killed."""

from __future__ import annotations

import contextlib
import select
import socket

import standalone

PROGRAM = """
import sys
import tensorflow as tf
import het_tf
from het_tf.runtime.broadcast import cluster_devices
from het_tf.tables.table import EmbeddingTable

strategy = het_tf.distribute.HetParameterServerStrategy(
    tf.distribute.cluster_resolver.TFConfigClusterResolver()
)
table = EmbeddingTable(2, het_tf.optimizers.SGD(0.1), devices=cluster_devices("ps"))
with strategy.scope():
    variables = [tf.Variable(0.0), tf.Variable(0.0)]
rows = het_tf.checkpoint.TableState(table, lambda: None)
checkpoint = tf.train.Checkpoint(rows=rows, variables=variables)
print(checkpoint.save(sys.argv[1]))
"""
LISTENERS = 50  # Of so many connections the program gets one.


def test_a_program_saves_once_servers_reach_it(tmp_path):
    with contextlib.ExitStack() as stack:
        servers = standalone.Servers(stack, num_ps=2)
        chief = servers.address()
        with contextlib.ExitStack() as listening:
            listeners = []
            for _ in range(LISTENERS):
                listeners.append(listening.enter_context(socket.socket()))
                listeners[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listeners[-1].bind(("", int(chief.rpartition(":")[2])))
                listeners[-1].listen()
            saves = servers.start("-c", PROGRAM, tmp_path / "made", chief=chief)
            refused = False
            while not refused and saves.poll() is None:
                for each in select.select(listeners, [], [], 0.1)[0]:
                    each.accept()[0].close()
                    refused = True
        said, errors = saves.communicate(timeout=600)
        assert refused
        assert said == f"{tmp_path}/made-1\n", errors
