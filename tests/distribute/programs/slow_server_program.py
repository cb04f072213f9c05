"""Trains with servers that have one core, are slow, or are silent for a while.

Run by test_slow_servers.py: without arguments, or with --loaded.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import small_models as sm
import tensorflow as tf
from faults import AtStep, Warnings

import het_tf
from het_tf.distribute.failures import probes
from het_tf.keras.data.feeds import StreamFeed
from het_tf.runtime.threads import call_apart

LOAD = 20


def stop_all_threads(process):
    """Stops a process. The signal is sent at once; threads that run stop a little later."""
    process.send_signal(signal.SIGSTOP)
    tasks = pathlib.Path(f"/proc/{process.pid}/task")
    states = {None}
    while states != {"T"}:
        texts = [(task / "stat").read_text() for task in tasks.iterdir()]
        states = {text.rpartition(")")[2].split()[0] for text in texts}


def read_beside_one_that_waits(ps, strategy):
    """Batches of this thread and of one that trains, while a third waits for a server; and is it?

    This thread and TensorFlow free what they have there meanwhile.
    """
    with strategy.scope():
        variable = tf.Variable(1.0)
    batches = iter(tf.data.Dataset.range(9))
    feed = StreamFeed(tf.data.Dataset.range(9)).start(1)
    for _ in range(2):  # TensorFlow makes the kernels of ops by themselves.
        variable.numpy()
        next(batches)
        feed.next_work(0)
    there = [variable.read_value() for _ in range(100)]
    stop_all_threads(ps)
    waiting = call_apart(variable.numpy)
    there.clear()
    time.sleep(0.5)
    found = [int(next(batches))]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        passes = pool.submit(lambda: StreamFeed(tf.data.Dataset.range(9)).start(1).next_work(0))
        found.append(passes.result().args[0].numpy().tolist())
    found.append(waiting.done())
    ps.send_signal(signal.SIGCONT)
    return [*found, float(waiting.result())]


def under_load(cluster, strategy, model, data):
    """Trains where every process has one core, and then the parameter server with 20 others."""
    model.fit(data, verbose=0)
    out = {"one core": model.counter.counts.numpy().tolist()}
    # From here on only the parameter server has one core.
    (core,) = os.sched_getaffinity(0)
    for pid in (os.getpid(), *(cluster.process("worker", i).pid for i in range(2))):
        for thread in pathlib.Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # A thread may end meanwhile.
                os.sched_setaffinity(int(thread.name), range(os.cpu_count()))
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-S", "-c", spin]) for _ in range(LOAD)]
    try:
        model.fit(data, verbose=0)
        seconds = []
        for _ in range(5):
            began = time.monotonic()
            probes.probe(cluster.addresses["ps"][0])
            seconds.append(time.monotonic() - began)
    finally:
        for process in busy:
            process.kill()
    counts = model.counter.counts.numpy().tolist()
    return out | {"slow": {"counts": counts, "seconds of a probe": seconds}}


def with_one_that_is_silent(cluster, strategy, model, data):
    """Has the parameter server answer nothing for a while."""
    model.fit(data, verbose=0)
    ps = cluster.process("ps", 0)
    out = {"beside": read_beside_one_that_waits(ps, strategy)}
    logged = Warnings()

    def stop():
        ps.send_signal(signal.SIGSTOP)
        threading.Thread(target=go_on_when_noticed).start()

    def go_on_when_noticed():
        # Not before the warning: the last steps may end before the monitor's thread looks again.
        while not any(probes.TaskState.SILENT.value in text for text in logged.texts):
            time.sleep(0.1)
        ps.send_signal(signal.SIGCONT)

    model.fit(data, callbacks=[AtStep(2, stop)], verbose=0)
    counts = model.counter.counts.numpy().tolist()
    return out | {"silent": {"counts": counts, "warnings": logged.take()}}


def main(loaded):
    if loaded:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # for the servers, too
    with het_tf.distribute.LocalCluster(num_workers=2, num_ps=1) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            model = sm.make_id_counter(het_tf.keras.Model, 40, steps_per_execution=1)
        data = sm.id_dataset(range(40), 4)
        run = under_load if loaded else with_one_that_is_silent
        out = run(cluster, strategy, model, data)
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1:] == ["--loaded"])
