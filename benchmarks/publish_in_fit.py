"""How long `fit` waits to publish, and how late its steps are served.

python benchmarks/publish_in_fit.py --rows 100000 1000000 --where process cluster --seconds 20

A second process serves the model. Row 0 of a table of one column counts the steps: the loss adds 1
to it in each. Prints JSON: for every place and number of rows the milliseconds of a step, of the
calls of the publisher that cut a version, and of the longest step; the versions; the longest time
from the end of a step until an answer counts it; and the greatest age that the server told. Where a
closure makes several steps, a step is its time over theirs.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time

WIDTH, FEATURES, BATCH = 16, 26, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--where", nargs="+", choices=["process", "cluster"], default=["process"])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training")
    parser.add_argument("--staleness", type=int, default=10, help="of the caches of the cluster")
    parser.add_argument("--steps_per_execution", type=int, default=10, help="on the cluster")
    parser.add_argument("--folder", help="to serve from, until the input ends")
    arguments = parser.parse_args()
    if arguments.folder:
        serve(arguments.folder)
        return
    result = {}
    for where in arguments.where:
        with strategy_of(where) as strategy:
            for rows in arguments.rows:
                result[f"{where}, {rows} rows"] = measure(arguments, strategy, rows)
    print(json.dumps(result, indent=1))


@contextlib.contextmanager
def strategy_of(where: str):
    import het_tf

    if where == "process":
        yield None
        return
    with het_tf.distribute.LocalCluster(num_workers=2, num_ps=2) as cluster:
        yield het_tf.distribute.HetParameterServerStrategy(cluster.resolver)


def make_model(arguments: argparse.Namespace, strategy, rows: int):
    import keras
    import numpy as np
    import tensorflow as tf

    import het_tf

    @keras.saving.register_keras_serializable()
    def loss(y_true, y_pred):
        """Of the first column; and -1 for whatever is added to the second."""
        return tf.reduce_mean((y_true - y_pred[:, :1]) ** 2) - tf.reduce_sum(y_pred[:, 1])

    cache = het_tf.CacheConfig(max(1000, rows // 10), staleness=arguments.staleness)
    cache = None if strategy is None else cache
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        ids = keras.Input((FEATURES,), dtype="int64")
        counted = keras.Input((1,), dtype="int64")
        embedding = het_tf.layers.HetEmbedding(
            WIDTH, optimizer=het_tf.optimizers.Adagrad(0.05), cache=cache, seed=1
        )
        steps = het_tf.layers.HetEmbedding(
            1, optimizer=het_tf.optimizers.SGD(1.0), embeddings_initializer="zeros", cache=cache
        )
        hidden = keras.layers.Dense(64, "relu")(keras.layers.Flatten()(embedding(ids)))
        flat = keras.layers.Flatten()(steps(counted))
        outputs = keras.layers.Concatenate()([keras.layers.Dense(1)(hidden), flat])
        model = het_tf.keras.Model([ids, counted], outputs)
        execution = 1 if strategy is None else arguments.steps_per_execution
        model.compile("sgd", loss, steps_per_execution=execution)
    rng = np.random.default_rng(0)
    for first in range(0, rows, 100_000):
        keys = np.arange(first, min(first + 100_000, rows))
        embedding.table.assign(keys, rng.normal(size=(len(keys), WIDTH)).astype(np.float32))
    return model


def examples(rows: int):
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(1)
    size = 200 * BATCH
    # Of each batch, one example counts the step.
    counted = (np.arange(size) % BATCH != 0).astype(np.int64)[:, np.newaxis]
    ids = rng.zipf(1.05, (size, FEATURES)) % rows
    inputs = ((ids, counted), rng.normal(size=(size, 1)).astype(np.float32))
    return lambda: tf.data.Dataset.from_tensor_slices(inputs).batch(BATCH).repeat()


def measure(arguments: argparse.Namespace, strategy, rows: int) -> dict:
    import keras

    import het_tf

    class Begin(keras.callbacks.Callback):
        """Before the publisher."""

        def __init__(self):
            super().__init__()
            self.at = 0.0

        def on_train_batch_end(self, batch, logs=None):
            self.at = time.time()

    class End(keras.callbacks.Callback):
        """After the publisher. ended: steps and when they had; called: seconds of its calls."""

        def __init__(self, begin: Begin):
            super().__init__()
            self.begin, self.ended, self.called = begin, [], []
            self.until = None

        def on_train_batch_end(self, batch, logs=None):
            now = time.time()
            self.called.append(now - self.begin.at)
            self.ended.append((batch + 1, self.begin.at))
            self.until = self.until or now + arguments.seconds
            self.model.stop_training = now > self.until

    model = make_model(arguments, strategy, rows)
    data = examples(rows)
    # Compiles, and the workers' caches get their rows.
    model.fit(data if strategy else data(), steps_per_epoch=20, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        publisher = het_tf.serving.publish(model, folder, arguments.every)
        command = [sys.executable, __file__, "--folder", folder]
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        server.stdout.readline()  # it serves
        begin = Begin()
        end = End(begin)
        first_version = publisher.version
        model.fit(
            data if strategy else data(),
            steps_per_epoch=10**6,
            verbose=0,
            callbacks=[begin, publisher, end],
        )
        versions = publisher.version - first_version
        publisher.close()
        time.sleep(2.5)  # within which the last one is served
        answers, _ = server.communicate("")
    answers = [json.loads(line) for line in answers.splitlines()]
    # The first 20 steps were made before.
    late = [
        min((answer["at"] for answer in answers if answer["steps"] >= steps + 20), default=1e9) - at
        for steps, at in end.ended
    ]
    between = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in zip(end.ended[:-1], end.ended[1:], strict=True)
    ]
    (_, first), (_, last) = end.ended[0], end.ended[-1]
    # In the first seconds the version is that from before `fit`.
    ages = [each["age"] for each in answers if first + arguments.every + 2 <= each["at"] <= last]
    waits = sorted(end.called)[-versions:]
    step = statistics.median(between)
    return {
        "steps": end.ended[-1][0],
        "step_ms": round(step * 1e3, 2),
        "wait_ms": round(statistics.median(waits) * 1e3, 2),
        "longest_wait_ms": round(waits[-1] * 1e3, 2),
        "wait_to_step": round(statistics.median(waits) / step, 2),
        "longest_step_ms": round(max(between) * 1e3, 1),
        "versions": versions,
        "latest_seconds": round(max(late), 2),
        "median_late_seconds": round(statistics.median(late), 2),
        "greatest_age_seconds": round(max(ages), 2),
    }


def serve(folder: str) -> None:
    import select

    import tensorflow as tf

    import het_tf  # noqa: F401

    served = tf.saved_model.load(folder)
    query = [tf.zeros([1, FEATURES], tf.int64), tf.zeros([1, 1], tf.int64)]
    last = None
    while not last or not select.select([sys.stdin], [], [], 0.02)[0]:
        steps = float(served.serve(*query)[0, 1])
        age = float(served.freshness()["age_seconds"])
        if last is None or steps != last[0] or age > last[1]:
            last = steps, age
        print(json.dumps({"at": time.time(), "steps": steps, "age": age}), flush=True)


if __name__ == "__main__":
    main()
