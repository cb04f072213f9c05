"""Kills a worker that trains on a replica, and ends one with SIGTERM. Run by test_dense_faults.py.

Every step adds 1 to every weight. Prints as JSON, of each, what the weights and the iterations came
to, what the log said was lost, and what it said of an end.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable

import keras
import numpy as np
from absl import logging as absl_logging

import het_tf

STEPS, STALENESS = 600, 40
# The closure after which a worker goes, once it has made steps, and how many of those after it is
# started again.
AWAY, BACK = 30, 15


def main() -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    absl_logging.get_absl_logger().addHandler(Keep())
    absl_logging.set_verbosity(absl_logging.INFO)
    with het_tf.distribute.LocalCluster(num_workers=2, num_ps=2) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(
            cluster.resolver, dense_staleness=STALENESS, dense_merge="sum"
        )
        with strategy.scope():
            inputs = keras.Input((1,))
            layer = keras.layers.Dense(50, use_bias=False, kernel_initializer="zeros")
            model = het_tf.keras.Model(inputs, layer(inputs))
            model.compile(
                keras.optimizers.SGD(1.0),
                lambda y, p: -keras.ops.sum(p, axis=-1),
                steps_per_execution=6,
            )
        x = np.ones((4 * STEPS, 1), np.float32)

        def train_while(end_worker: Callable[[int], None]) -> dict:
            lines.clear()
            weights = layer.get_weights()[0] if layer.built else 0.0
            iterations = int(model.optimizer.iterations.numpy())
            finished = []
            away = None

            def on_batch_end(step, logs):
                nonlocal away
                finished.append(step)
                if away is not None and len(finished) == away + BACK:
                    cluster.restart_worker(1)
                if away is not None or len(finished) < AWAY:
                    return
                if any(report.worker == 1 for report in strategy.last_replica_reports()):
                    end_worker(1)
                    away = len(finished)
                else:  # What it is running is heard of after one of the next closures.
                    time.sleep(0.1)

            callback = keras.callbacks.LambdaCallback(on_train_batch_end=on_batch_end)
            model.fit(x, x, batch_size=4, verbose=0, callbacks=[callback])
            made = layer.get_weights()[0] - weights
            lost = [re.search(r"lost its replica .* at most (\d+) steps", line) for line in lines]
            return {
                "least": float(made.min()),
                "most": float(made.max()),
                "iterations": int(model.optimizer.iterations.numpy()) - iterations,
                "lost": [int(match.group(1)) for match in lost if match],
                "ended": [line for line in lines if "sent all steps of its replica" in line],
            }

        result = {
            "killed": train_while(cluster.kill_worker),
            "terminated": train_while(cluster.terminate_worker),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
