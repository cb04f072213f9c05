"""Trains where every process has one core. Prints what came of it, as JSON. Run by the test."""

from __future__ import annotations

import json
import os
import sys

import small_models as sm
import tensorflow as tf

import het_tf


def main():
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # for the servers, too
    cluster = het_tf.distribute.LocalCluster(num_workers=2, num_ps=1)
    cluster.start()
    strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
    with strategy.scope():
        model = sm.make_id_counter(het_tf.keras.Model, 40, steps_per_execution=2)
    model.fit(sm.id_dataset(range(40), 4), epochs=2, verbose=0)
    print(json.dumps({"counts": tf.unique(model.counter.counts.value)[0].numpy().tolist()}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
