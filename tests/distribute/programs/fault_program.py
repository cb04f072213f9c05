"""Trains while servers die, and prints what happened as JSON. Run by test_faults.py."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time

import numpy as np
import small_models as sm
import tensorflow as tf
from faults import AtStep, Warnings

import het_tf
from het_tf.distribute import health

EXAMPLES = 400
BATCH = 4  # as many updates of the embedding, whose ids are all different
STEPS_A_CLOSURE = 2
STEPS = EXAMPLES // BATCH
LOST_AFTER = 12.0  # seconds
EPOCHS_WITH_A_STOPPED = 3  # worker


def train_until_error(model, data, action):
    """Fits with `action` in the middle; the error and how long it took."""
    began = time.monotonic()
    try:
        model.fit(data, epochs=50, callbacks=[AtStep(STEPS // 4, action)], verbose=0)
    except tf.errors.UnavailableError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    return {"error": None, "seconds": time.monotonic() - began}


@contextlib.contextmanager
def patient_probes(address):
    """The timeouts of probes of `address` that wait longer than those of the monitor."""
    timeouts = []
    probe = health.probe

    def noted(probed, timeout=health.PROBE_TIMEOUT):
        if probed == address and timeout > health.PROBE_TIMEOUT:
            timeouts.append(timeout)
        return probe(probed, timeout)

    health.probe = noted
    try:
        yield timeouts
    finally:
        health.probe = probe


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


def main():
    faulthandler.dump_traceback_later(1200, exit=True)  # Says where, before the test gives up.
    logged = Warnings()
    out = {}
    cluster = het_tf.distribute.LocalCluster(num_workers=2, num_ps=3)
    cluster.start()
    out["addresses"] = cluster.addresses
    out["log dir"] = str(cluster.log_dir)
    out["pids"] = [
        cluster.process(task_type, i).pid
        for task_type, addresses in cluster.addresses.items()
        for i in range(len(addresses))
    ]
    # Those that are stopped here never go on by themselves.
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

    def counts():
        return np.unique(model.counter.counts.numpy()).tolist()

    def fit(x, *callbacks, **kwargs):
        logged.take()
        before = int(model.optimizer.iterations.numpy())
        began = time.monotonic()
        history = model.fit(x, callbacks=list(callbacks), verbose=0, **kwargs).history
        return {
            "loss": history["loss"],
            "counts": counts(),
            "ids": history["ids"],
            "iterations": int(model.optimizer.iterations.numpy()) - before,
            "warnings": logged.take(),
            "seconds": time.monotonic() - began,
        }

    def fit_until_joined(worker):
        # It joins in once the coordinator has reconnected; the other one may be done before.
        for _ in range(100):
            run = fit(data)
            if worker in strategy.last_cache_reports(cache):
                return run
        raise AssertionError(f"worker {worker} did not join in: {run['warnings'][-10:]}")

    out["whole"] = fit(data, epochs=2)
    pending = {}

    def kill():
        reports = strategy.last_cache_reports(cache)
        pending.update({str(w): r.pending for w, r in reports.items()})
        cluster.kill_worker(1)

    out["worker killed"] = fit(data, AtStep(STEPS // 4, kill), epochs=2)
    out["pending when killed"] = pending
    out["without it"] = fit(data)
    out["tables without it"] = use_tables(model, embedding)
    cluster.restart_worker(1)
    out["restarted"] = fit_until_joined(1)

    def share(context):
        half = EXAMPLES // 2
        start = half * context.input_pipeline_id
        return sm.id_dataset(range(start, start + half), BATCH)

    out["shares"] = fit(share)
    out["share lost"] = fit(share, AtStep(10, lambda: cluster.kill_worker(1)))
    cluster.restart_worker(1)
    fit_until_joined(1)

    worker = cluster.process("worker", 1)
    stop = AtStep(STEPS // 4, lambda: worker.send_signal(signal.SIGSTOP))
    with patient_probes(cluster.addresses["worker"][1]) as patient:
        out["worker stopped"] = fit(data, stop, epochs=EPOCHS_WITH_A_STOPPED)
    out["worker stopped"]["patient probes"] = patient
    # A worker that was given up and goes on may have a context that TensorFlow has closed in part:
    # what it runs then fails with "ABORTED: Cleanup", so it has to be started again.
    cluster.restart_worker(1)
    fit_until_joined(1)

    ps = cluster.process("ps", 2)
    out["ps stopped"] = train_until_error(model, data, lambda: ps.send_signal(signal.SIGSTOP))
    ps.send_signal(signal.SIGCONT)
    while not strategy.idle():  # Takes the errors of the closures that waited for it.
        time.sleep(0.1)
    out["ps killed"] = train_until_error(model, data, lambda: cluster.kill_ps(0))
    cluster.process("worker", 0).send_signal(signal.SIGSTOP)  # it cannot notice by itself
    print(json.dumps(out))
    sys.stdout.flush()
    os._exit(0)  # As a crash would: the servers must notice.


if __name__ == "__main__":
    main()
