"""What a training program leaves on servers that go on after it."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
import standalone
from program_runner import Program

PROGRAM = """
import sys
import keras, numpy as np, tensorflow as tf, het_tf
from tensorflow.python.eager import context

how, keep_alive = sys.argv[1], int(sys.argv[2])
if keep_alive:  # TensorFlow's own 600 s cannot be set.
    context._KEEP_ALIVE_SECS = keep_alive
strategy = het_tf.distribute.HetParameterServerStrategy(
    tf.distribute.cluster_resolver.TFConfigClusterResolver()
)

def left():
    with tf.device("/job:ps/task:0/device:CPU:0"):
        tables = het_tf.ops.process_tables()
    with tf.device("/job:worker/task:0/device:CPU:0"):
        caches = het_tf.ops.process_caches(all=True)[:, 0]
    return [len(set(each.numpy().tolist())) for each in (tables, caches)]

def say(what):
    print(what, flush=True)

say(left())
while how == "looks":
    if not sys.stdin.readline():
        sys.exit()
    say(left())
with strategy.scope():
    embedding = het_tf.layers.HetEmbedding(2, seed=1, cache=het_tf.CacheConfig(10))
    if how in ("raises", "ends"):
        embedding.build()
        embedding.cache_stats()
        say(left())
        if how == "raises":
            raise SystemError("as asked")
        sys.exit()
    model = het_tf.keras.Sequential([embedding, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

class Trains(keras.callbacks.Callback):
    said = False

    def on_train_batch_end(self, batch, logs=None):
        if not self.said:
            say("trains")
        self.said = True

data = (np.zeros([2, 2], "int64"), np.ones([2, 1]))
if how == "trains on":
    dataset = tf.data.Dataset.from_tensors(data).repeat()
    model.fit(dataset, steps_per_epoch=10**6, verbose=0, callbacks=[Trains()])
model.fit(*data, verbose=0)
say(left())
if how == "raises when told to":
    say("told?")
    sys.stdin.readline()
    model.fit(np.zeros([40, 2], "int64"), np.ones([40, 1]), batch_size=1, verbose=0)
    raise SystemError("as asked")
while how == "waits":
    say(embedding.table.export().clocks.tolist())
    if not sys.stdin.readline():
        break
    model.fit(*data, verbose=0)
"""


@pytest.fixture(scope="module")
def servers():
    with contextlib.ExitStack() as stack:
        yield standalone.Servers(stack)


def start(servers, how: str, chief: str | None = None, keep_alive: int = 0) -> Program:
    return servers.start("-c", PROGRAM, how, keep_alive, chief=chief or servers.address())


def ask(program: Program) -> str:
    """What it says after the next line of input."""
    program.stdin.write("\n")
    program.stdin.flush()
    return program.stdout.readline()


def test_a_program_that_ends_frees_its_tables_and_caches(servers):
    for how in ("raises", "ends"):
        ended = start(servers, how)
        said, errors = ended.communicate(timeout=600)
        assert ("SystemError: as asked" in errors) == (how == "raises"), errors
        assert (ended.returncode == 0) == (how == "ends"), errors
        assert said.splitlines() == ["[0, 0]", "[1, 1]"]


def test_a_program_ends_though_a_worker_is_gone():
    with contextlib.ExitStack() as stack:
        servers = standalone.Servers(stack, num_workers=2)
        program = start(servers, "raises when told to")
        assert [program.stdout.readline() for _ in range(3)] == ["[0, 0]\n", "[1, 1]\n", "told?\n"]
        servers.processes["worker"][1].kill()
        _, errors = program.communicate("\n", timeout=120)
        assert "SystemError: as asked" in errors
        assert program.returncode == 1


@pytest.mark.exhaustive
def test_a_program_is_replaced_by_the_next_at_its_address(servers):
    chief = servers.address()
    stopped = start(servers, "trains on", chief)
    assert [stopped.stdout.readline() for _ in range(2)] == ["[0, 0]\n", "trains\n"]
    stopped.send_signal(signal.SIGSTOP)
    other = start(servers, "looks")
    assert other.stdout.readline() == "[1, 1]\n"  # A program of another address changes nothing.

    following = start(servers, "waits", chief)
    said = [following.stdout.readline() for _ in range(3)]
    assert said == ["[0, 0]\n", "[1, 1]\n", "[1]\n"]
    # One that goes on neither makes a table again nor touches the other's.
    stopped.send_signal(signal.SIGCONT)
    _, errors = stopped.communicate(timeout=600)
    assert "another one was started at its address" in errors
    assert ask(other) == "[1, 1]\n"
    assert [ask(following) for _ in range(2)] == ["[2]\n", "[3]\n"]
    following.communicate(timeout=600)
    assert ask(other) == "[0, 0]\n"


@pytest.mark.exhaustive
def test_a_killed_program_is_forgotten(servers):
    other = start(servers, "looks")
    assert other.stdout.readline() == "[0, 0]\n"
    killed = start(servers, "trains on", keep_alive=2)
    assert [killed.stdout.readline() for _ in range(2)] == ["[0, 0]\n", "trains\n"]
    assert ask(other) == "[1, 1]\n"
    killed.kill()
    while ask(other) != "[0, 0]\n":
        time.sleep(0.1)
