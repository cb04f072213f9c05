"""Trains while workers and servers die, hang or are told to end.

Prints what happened as JSON. Run by test_faults.py.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable

import keras
import numpy as np
import small_models as sm
import tensorflow as tf
from faults import AtStep, Warnings

import het_tf
from het_tf.distribute.failures import probes

EXAMPLES = 200
BATCH = 4  # as many updates of the embedding, whose ids are all different
STEPS_A_CLOSURE = 2
STEPS = EXAMPLES // BATCH
# Two failed probes, each of which waits for `PROBE_TIMEOUT`, take longer; one takes less.
LOST_AFTER, PROBE_TIMEOUT = 5.0, 4.0  # seconds
EPOCHS_WITH_A_STOPPED = 3  # worker
DENSE_STEPS, DENSE_STEPS_A_CLOSURE, DENSE_STALENESS = 60, 6, 40


class EndWorker(keras.callbacks.Callback):
    """Ends a worker that holds something back, and stops `fit` at the end of a later epoch.

    Waits for each event, epoch after epoch, because nothing says how long it takes.

    Attributes:
      epochs: the number that were trained.
    """

    def __init__(
        self,
        holds_back: Callable[[], bool],
        end: Callable[[], None],
        restart: Callable[[], None] | None = None,
    ):
        """With `restart`, training goes on until the worker holds something back again.

        Without, until another epoch was trained.
        """
        super().__init__()
        self.epochs = 0
        self._holds_back, self._end, self._restart = holds_back, end, restart
        self._state = "to be ended"

    def on_train_batch_end(self, batch, logs=None):
        if self._state == "to be ended" and self._holds_back():
            self._end()
            self._state = "ended"
        elif self._state == "restarted" and self._holds_back():
            self._state = "back"

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        if self._state == "back":
            self.model.stop_training = True
        elif self._state == "ended":
            if self._restart is None:
                self._state = "back"
            else:
                self._restart()
                self._state = "restarted"


def train_until_error(model, data, action):
    """Fits with `action` in the middle; the error and how long it took."""
    began = time.monotonic()
    try:
        model.fit(data, epochs=50, callbacks=[AtStep(STEPS // 4, action)], verbose=0)
    except tf.errors.UnavailableError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    return {"error": None, "seconds": time.monotonic() - began}


def shorten_probes() -> list[str]:
    """Has the monitor wait less for answers.

    Returns:
      A list that gets the address of every probe that is not the monitor's.
    """
    addresses = []
    probe = probes.probe

    def noted(address, timeout=PROBE_TIMEOUT):
        addresses.append(address)
        return probe(address, timeout)

    probes.probe = noted
    probes.PROBE_INTERVAL, probes.PROBE_TIMEOUT = 1.0, PROBE_TIMEOUT
    return addresses


def use_tables(model, embedding):
    """What reads and replaces rows, while a worker is down; the rows are as before afterwards."""
    table = embedding.table
    rows = table.export()
    clocks = [int(rows.clocks.sum())]
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/model.weights.h5")
        path = tf.train.Checkpoint(model=model).write(f"{folder}/checkpoint")
        table.clear()
        clocks.append(table.size())
        model.load_weights(f"{folder}/model.weights.h5")
        clocks.append(int(table.export().clocks.sum()))
        table.clear()
        tf.train.Checkpoint(model=model).read(path).expect_partial()
        clocks.append(int(table.export().clocks.sum()))
    table.clear()
    table.import_(rows)
    clocks.append(int(table.export().clocks.sum()))
    return {"clocks": clocks, "pending": embedding.cache_stats()["pending"]}


def errors_of_what_comes_next(model, table, checkpoint, publisher, folder):
    """What calls raise, each of which needs the server that is gone."""
    x = np.arange(EXAMPLES, dtype=np.float32)[:, None]
    ids = np.arange(EXAMPLES)
    calls = {
        "call": lambda: model(x),
        "fit": lambda: model.fit(x, x, verbose=0),
        "evaluate": lambda: model.evaluate(x, x, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(x, x),
        "save": lambda: model.save(f"{folder}/model.keras"),
        "save_weights": lambda: model.save_weights(f"{folder}/model.weights.h5"),
        "export": lambda: model.export(f"{folder}/exported"),
        "export_mapped": lambda: het_tf.serving.export_mapped(model, f"{folder}/mapped"),
        "publish": lambda: het_tf.serving.publish(model, f"{folder}/published"),
        "Publisher.publish": publisher.publish,
        "interop.save": lambda: het_tf.interop.save(table, het_tf.interop.Npz(f"{folder}/a.npz")),
        "Checkpoint.save": lambda: checkpoint.save(f"{folder}/checkpoint"),
        "Checkpoint.write": lambda: checkpoint.write(f"{folder}/written"),
        "Checkpoint.read": lambda: checkpoint.read(f"{folder}/before"),
        "Manager.save": het_tf.checkpoint.Manager(checkpoint, f"{folder}/managed").save,
        "table.size": table.size,
        "table.lookup": lambda: table.lookup(ids),
        "table.export": table.export,
        "table.import_": lambda: table.assign(ids, np.ones([EXAMPLES, 2], np.float32)),
        "table.clear": table.clear,
        "table.stats": table.stats,
        "table.shard_stats": table.shard_stats,
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
            errors[name] = "nothing was raised"
        except tf.errors.UnavailableError as error:
            errors[name] = str(error)
    return errors


def train_replicas(strategy, end, restart, messages):
    """Trains dense variables on replicas while `end` ends a worker, which `restart` brings back.

    Every step adds 1 to every weight.
    """
    with strategy.scope():
        inputs = keras.Input((1,))
        layer = keras.layers.Dense(50, use_bias=False, kernel_initializer="zeros")
        model = het_tf.keras.Model(inputs, layer(inputs))
        model.compile(
            keras.optimizers.SGD(1.0),
            lambda y, p: -keras.ops.sum(p, axis=-1),
            steps_per_execution=DENSE_STEPS_A_CLOSURE,
        )
    x = np.ones((4 * DENSE_STEPS, 1), np.float32)
    result = {}

    def total():
        owed = getattr(model, "dense_owed", None)
        return layer.get_weights()[0][0] + (0.0 if owed is None else owed.numpy())

    for how, end_worker in end.items():
        messages.take()
        before = total() if layer.built else 0.0
        iterations = int(model.optimizer.iterations.numpy())

        def holds_back():
            return any(each.worker == 1 for each in strategy.held.last_replica_reports())

        callback = EndWorker(holds_back, end_worker, restart)
        model.fit(x, x, batch_size=4, epochs=1000, verbose=0, callbacks=[callback])
        made = np.round(total() - before, 1)  # what is owed is no whole number
        texts = messages.take()
        lost = [re.search(r"lost its replica .* at most (\d+) steps", text) for text in texts]
        result[how] = {
            "epochs": callback.epochs,
            "least": float(made.min()),
            "most": float(made.max()),
            "iterations": int(model.optimizer.iterations.numpy()) - iterations,
            "lost": [int(match.group(1)) for match in lost if match],
            "ended": [text for text in texts if "sent all steps of its replica" in text],
        }
    return result


def main():
    faulthandler.dump_traceback_later(600, exit=True)  # Says where, before the test gives up.
    messages = Warnings(logging.INFO)
    probed = shorten_probes()
    out = {}
    cluster = het_tf.distribute.LocalCluster(num_workers=2, num_ps=2)
    cluster.start()
    out["addresses"] = cluster.addresses
    out["log dir"] = str(cluster.log_dir)
    out["pids"] = [
        cluster.process(task_type, i).pid
        for task_type, addresses in cluster.addresses.items()
        for i in range(len(addresses))
    ]
    strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver, lost_after=LOST_AFTER)
    with strategy.scope():
        embedding = het_tf.layers.HetEmbedding(
            2, cache=het_tf.CacheConfig(EXAMPLES, staleness=None), name="ids"
        )
        model = sm.make_id_counter(
            het_tf.keras.Model, EXAMPLES, embedding, steps_per_execution=STEPS_A_CLOSURE
        )
    cache = embedding.worker_cache
    data = sm.id_dataset(range(EXAMPLES), BATCH)

    def clocks():
        return int(embedding.table.export().clocks.sum()) if embedding.built else 0

    def fit(x, *callbacks, **kwargs):
        messages.take()
        iterations, updates = int(model.optimizer.iterations.numpy()), clocks()
        history = model.fit(x, callbacks=list(callbacks), verbose=0, **kwargs).history
        return {
            "counts": np.unique(model.counter.counts.numpy()).tolist(),
            "ids": history["ids"],
            "iterations": int(model.optimizer.iterations.numpy()) - iterations,
            "updates": clocks() - updates,
            "messages": messages.take(),
        }

    def pending_of_1():
        report = strategy.held.last_cache_reports(cache).get(1)
        return 0 if report is None else report.pending

    def fit_while(end):
        callback = EndWorker(lambda: pending_of_1() > 0, end)
        return fit(data, callback, epochs=1000)

    def fit_until_joined():
        # It joins in once the coordinator has reconnected; the other one may be done before.
        for _ in range(1000):
            run = fit(data)
            if 1 in strategy.held.last_cache_reports(cache):
                return run
        raise AssertionError(f"worker 1 did not join in: {run['messages'][-10:]}")

    def restart():
        cluster.restart_worker(1)

    out["whole"] = fit(data)

    def kill():
        out["pending when killed"] = pending_of_1()
        cluster.kill_worker(1)

    out["worker killed"] = fit_while(kill)
    out["tables without it"] = use_tables(model, embedding)
    restart()
    out["restarted"] = fit_until_joined()

    out["worker told to end"] = fit_while(lambda: cluster.terminate_worker(1))
    out["log of the ended"] = cluster.log("worker", 1)
    restart()
    fit_until_joined()

    def share(context):
        half = EXAMPLES // 2
        start = half * context.input_pipeline_id
        return sm.id_dataset(range(start, start + half), BATCH)

    out["share lost"] = fit(share, AtStep(10, lambda: cluster.kill_worker(1)))
    restart()
    fit_until_joined()

    worker = cluster.process("worker", 1)
    stop = AtStep(STEPS // 4, lambda: worker.send_signal(signal.SIGSTOP))
    probed.clear()
    out["worker stopped"] = fit(data, stop, epochs=EPOCHS_WITH_A_STOPPED)
    out["probes of the stopped"] = probed.count(cluster.addresses["worker"][1])
    # A worker that was given up and goes on may have a context that TensorFlow has closed in part:
    # what it runs then fails with "ABORTED: Cleanup", so it has to be started again.
    restart()

    strategy.dense_staleness = DENSE_STALENESS
    ends = {
        "killed": lambda: cluster.kill_worker(1),
        "told to end": lambda: cluster.terminate_worker(1),
    }
    out["replicas"] = train_replicas(strategy, ends, restart, messages)
    strategy.dense_staleness = None

    folder = tempfile.mkdtemp()
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.write(f"{folder}/before")
    publisher = het_tf.serving.publish(model, f"{folder}/live", every=3600)
    ps = cluster.process("ps", 1)
    # It does not go on before training has ended.
    out["ps stopped"] = train_until_error(model, data, lambda: ps.send_signal(signal.SIGSTOP))
    ps.send_signal(signal.SIGCONT)
    while not strategy.idle():  # Takes the errors of the closures that waited for it.
        time.sleep(0.1)
    out["ps killed"] = train_until_error(model, data, lambda: cluster.kill_ps(0))
    out["errors"] = errors_of_what_comes_next(model, embedding.table, checkpoint, publisher, folder)
    cluster.process("worker", 0).send_signal(signal.SIGSTOP)  # it cannot notice by itself
    print(json.dumps(out))
    sys.stdout.flush()
    os._exit(0)  # As a crash would: the servers must notice.


if __name__ == "__main__":
    main()
