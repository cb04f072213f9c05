"""Kills a worker that trains on a replica. Run by test_dense_faults.py.

Every step adds 1 to every weight. Prints as JSON the steps that were finished, what the weights
came to, and what the log said was lost.
"""

from __future__ import annotations

import json
import logging
import re

import keras
import numpy as np
from absl import logging as absl_logging

import het_tf

STEPS, STALENESS = 600, 40


def main() -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    absl_logging.get_absl_logger().addHandler(Keep())
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
        finished = []

        def kill(step, logs):
            finished.append(step)
            if len(finished) == 30:
                cluster.kill_worker(1)
            if len(finished) == 45:
                cluster.restart_worker(1)

        x = np.ones((4 * STEPS, 1), np.float32)
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=kill)
        model.fit(x, x, batch_size=4, verbose=0, callbacks=[callback])
        weights = model.get_weights()[0]
        iterations = int(model.optimizer.iterations.numpy())
    lost = [re.search(r"lost its replica .* at most (\d+) steps", line) for line in lines]
    print(
        json.dumps(
            {
                "least": float(weights.min()),
                "most": float(weights.max()),
                "iterations": iterations,
                "lost": [int(match.group(1)) for match in lost if match],
            }
        )
    )


if __name__ == "__main__":
    main()
