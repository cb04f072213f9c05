"""Trains with tf_keras, as the chief of TF_CONFIG's cluster: `python -m netns.train_tf_keras JOB`.

tf_keras's own way on `tf.distribute.ParameterServerStrategy`: `fit` with a `DatasetCreator`
(https://www.tensorflow.org/tutorials/distribute/parameter_server_training). Where there is a choice
it has what was the fastest at 1 Gbit/s, 2 workers, 2 servers (to measure again, change that line):

  - Of the two Adagrads the one that sums the gradients of equal ids on the worker. The legacy one
    sums on the server, with 5,660 kB up a step in place of 4,460, and 217 ms in place of 193.
  - No variable is partitioned: the table is on one server and the first dense layer on the other,
    so that both send about as much. With half of the table on each a step took 217 ms, not 186.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from netns import wide_deep
from netns.criteo_shape import KEYS
from netns.job import Job, Session


def make_model(job: Job) -> tuple[tf_keras.Model, list, tf_keras.layers.Embedding]:
    """The compiled model, its dense layers and its embedding."""
    tf_keras.utils.set_random_seed(job.seed)
    embedding = tf_keras.layers.Embedding(KEYS, job.dim)
    model, layers = wide_deep.build(
        tf_keras, embedding, lambda x: tf.reduce_sum(x, axis=1, keepdims=True), job
    )
    model.compile(
        tf_keras.optimizers.Adagrad(job.learning_rate),
        "binary_crossentropy",
        steps_per_execution=job.steps_per_execution,
    )
    return model, layers, embedding


def main(job: Job) -> None:
    session = Session()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        model, layers, embedding = make_model(job)

    def read_rows(keys: np.ndarray) -> np.ndarray:
        return tf.nn.embedding_lookup(embedding.embeddings, keys).numpy()

    def data(context: tf.distribute.InputContext) -> Any:
        return wide_deep.worker_data(job, context.input_pipeline_id)

    callback = wide_deep.epochs_callback(tf_keras, session, job, layers, read_rows, dict)
    model.fit(
        tf_keras.utils.experimental.DatasetCreator(data),
        epochs=job.epochs,
        steps_per_epoch=job.steps,
        callbacks=[callback],
        verbose=0,
    )


if __name__ == "__main__":
    main(Job.from_json(sys.argv[1]))
