"""Latency of lookups that are served, beside tf.gather, and how long loading and publishing take.

python benchmarks/serving.py --rows 2000000 --dim 64 --threads 1 8

Prints JSON: for every number of threads the median microseconds of a batch of ids from a mapped
file and from rows that changed since, and from a tf.Variable of as many rows by tf.gather, in runs
that alternate; the ratios of these; seconds to write and to load the model; and seconds from a
row's change to an answer that has it, with --every. Each number of threads has its own process.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

BATCHES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ids", type=int, default=1000)
    parser.add_argument("--store", default="float32", help="what rows are stored as")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--runs", type=int, default=31)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--folder", help="a model that is there already")
    arguments = parser.parse_args()
    if arguments.folder:
        print(json.dumps(measure(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = publish(arguments, folder)
        for threads in arguments.threads:
            command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
            command += ["--threads", str(threads)]
            ended = subprocess.run(command, check=True, capture_output=True, text=True)
            result[f"{threads} threads"] = json.loads(ended.stdout.splitlines()[-1])
    print(json.dumps(result, indent=1))


def make_model(arguments: argparse.Namespace):
    import keras
    import numpy as np

    import het_tf

    ids = keras.Input((arguments.ids,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(arguments.dim, seed=1)
    model = het_tf.keras.Model(ids, embedding(ids))
    rng = np.random.default_rng(0)
    for first in range(0, arguments.rows, 100_000):
        keys = np.arange(first, min(first + 100_000, arguments.rows))
        values = rng.normal(size=(len(keys), arguments.dim)).astype(np.float32)
        embedding.table.assign(keys, values)
    return model, embedding.table


def publish(arguments: argparse.Namespace, folder: str) -> dict:
    import numpy as np
    import tensorflow as tf

    import het_tf

    model, table = make_model(arguments)
    begin = time.monotonic()
    publisher = het_tf.serving.publish(model, folder, arguments.every, rows=arguments.store)
    result = {"rows": arguments.rows, "seconds_to_write": round(time.monotonic() - begin, 2)}
    served = tf.saved_model.load(folder)
    waits = []
    for number in range(1, 6):
        row = np.full((1, arguments.dim), number, np.float32)
        time.sleep(0.37 * arguments.every)  # not in step with the publisher
        begin = time.monotonic()
        table.assign(np.array([7]), row)
        query = tf.fill([1, arguments.ids], tf.constant(7, tf.int64))
        while float(served.serve(query)[0, 0, 0]) != number:
            time.sleep(0.001)
        waits.append(round(time.monotonic() - begin, 2))
    result |= {"every": arguments.every, "seconds_until_served": waits}
    # A tenth of the rows, for the next processes.
    keys = np.arange(0, arguments.rows, 10)
    table.assign(keys, table.lookup(keys))
    publisher.close()
    files = pathlib.Path(folder, "assets.extra/het_tf").glob("*.rows")
    result["bytes"] = {file.name: file.stat().st_size for file in files}
    return result


def measure(arguments: argparse.Namespace) -> dict:
    import numpy as np
    import tensorflow as tf

    import het_tf

    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads[0])
    tf.config.threading.set_inter_op_parallelism_threads(1)
    begin = time.monotonic()
    served = tf.saved_model.load(arguments.folder)
    seconds_to_load = time.monotonic() - begin
    while served.freshness()["trouble"].numpy() or not int(served.freshness()["changed_rows"]):
        time.sleep(0.01)
    lookup = het_tf.ops.served_lookup
    view, _ = het_tf.ops.served_pin(served.served.resource_handle)
    rng = np.random.default_rng(1)
    all_rows = tf.Variable(rng.normal(size=(arguments.rows, arguments.dim)).astype(np.float32))
    changed, unchanged = [], []
    for _ in range(BATCHES):
        ids = rng.integers(0, arguments.rows // 10, arguments.ids) * 10
        changed.append(tf.constant(ids))
        unchanged.append(tf.constant(ids + 1))

    @tf.function(autograph=False)
    def gather(ids):
        return tf.gather(all_rows, ids)

    @tf.function(autograph=False)
    def served_rows(ids):
        return lookup(view, ids, table=0, dim=arguments.dim)

    def run(function, batches) -> float:
        begin = time.perf_counter()
        for ids in batches:
            function(ids)
        return (time.perf_counter() - begin) / len(batches) * 1e6

    kinds = {
        "mapped": (served_rows, unchanged),
        "changed": (served_rows, changed),
        "gather": (gather, unchanged),
    }
    times = {name: [] for name in kinds}
    for _ in range(arguments.runs):
        for name, (function, batches) in kinds.items():
            times[name].append(run(function, batches))
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    return {
        "seconds_to_load": round(seconds_to_load, 3),
        **{f"{name}_us": round(median, 1) for name, median in medians.items()},
        "mapped_to_gather": round(medians["mapped"] / medians["gather"], 2),
        "changed_to_gather": round(medians["changed"] / medians["gather"], 2),
    }


if __name__ == "__main__":
    main()
