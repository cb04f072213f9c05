"""One closure that runs for long, on one core. Prints how often it ran, as JSON.

gRPC pings so often that a server would soon close a silent connection. Run by test_long_closure.py.
"""

from __future__ import annotations

import json
import os
import sys

# A ping every 3 s: the fourth on a silent connection is one too many.
os.environ["TF_GRPC_DEFAULT_OPTIONS"] = (
    "grpc.keepalive_time_ms=3000,grpc.http2.max_pings_without_data=0"
)

import tensorflow as tf

import het_tf
from het_tf.distribute import environment, heartbeat

SECONDS = 30.0


def main():
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # for the servers, too
    heartbeat.INTERVAL = 1.0
    cluster = het_tf.distribute.LocalCluster(
        1, 1, env={"TF_GRPC_DEFAULT_OPTIONS": environment.grpc_options("server")}
    )
    cluster.start()
    strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
    with strategy.scope():
        runs = tf.Variable(0)

    @tf.function
    def run_for_long():
        began = tf.timestamp()
        with tf.control_dependencies([runs.assign_add(1)]):
            return tf.while_loop(
                lambda now: now < began + SECONDS, lambda now: [tf.timestamp()], [began]
            )

    strategy.coordinator.schedule(run_for_long)
    strategy.coordinator.join()
    print(json.dumps({"runs": int(runs.read_value())}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
