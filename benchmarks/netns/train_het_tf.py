"""Trains with het_tf, as the chief of TF_CONFIG's cluster: `python -m netns.train_het_tf JOB`."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf
from netns import criteo_shape, wide_deep
from netns.job import Job, Session

import het_tf

_ROW_OPTIMIZERS = {
    "adagrad": het_tf.optimizers.Adagrad,
    "rowwise_adagrad": het_tf.optimizers.RowWiseAdagrad,
}


def make_model(job: Job, model_class: type) -> tuple[keras.Model, list, het_tf.layers.HetEmbedding]:
    """The compiled model, its dense layers and its embedding."""
    keras.utils.set_random_seed(job.seed)
    embedding = het_tf.layers.HetEmbedding(
        job.dim,
        optimizer=_ROW_OPTIMIZERS[job.row_optimizer](job.learning_rate),
        embeddings_initializer="uniform",
        seed=job.seed,
        wire_dtype=job.wire_dtype,
        cache=None if job.cache is None else het_tf.CacheConfig(**job.cache),
    )
    model, layers = wide_deep.build(
        keras, embedding, lambda x: keras.ops.sum(x, axis=1, keepdims=True), job
    )
    model = model_class(model.inputs, model.outputs)
    model.compile(
        keras.optimizers.Adagrad(job.learning_rate),
        "binary_crossentropy",
        steps_per_execution=job.steps_per_execution,
    )
    return model, layers, embedding


def read_counters(
    strategy: het_tf.distribute.HetParameterServerStrategy,
    model: het_tf.keras.Model,
    embedding: het_tf.layers.HetEmbedding,
) -> dict[str, float]:
    """All that het_tf counts, by the names in `measure.Epoch`."""
    dense = {f"dense_{name}": value for name, value in strategy.dense_stats().items()}
    ahead = {f"lookahead_{name}": value for name, value in model.lookahead_stats().items()}
    ahead.pop("lookahead_lookahead", None)  # no count
    return embedding.cache_stats() | dense | ahead


def main(job: Job) -> None:
    session = Session()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = het_tf.distribute.HetParameterServerStrategy(resolver, **job.strategy)
    with strategy.scope():
        model, layers, embedding = make_model(job, het_tf.keras.Model)
    callback = wide_deep.epochs_callback(
        keras,
        session,
        job,
        layers,
        lambda keys: np.asarray(embedding.table.lookup(keys)),
        lambda: read_counters(strategy, model, embedding),
    )

    if job.hot is not None:
        percent, phase_batches = job.hot
        every = wide_deep.all_data(job).take(job.epochs * job.steps)
        budget = round(criteo_shape.KEYS * percent / 100)
        hot = het_tf.data.hot_rows(every, lambda ids, labels: ids, budget)
        print(f"hot rows: {hot.accesses:.3f} of ids, {hot.examples:.3f} of examples")

    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        mine = wide_deep.worker_data(job, context.input_pipeline_id)
        if job.hot is not None:
            return het_tf.data.hot_batches(
                mine,
                lambda ids, labels: ids,
                hot,
                batch_size=job.batch,
                phase_batches=phase_batches,
            )
        if not job.location_aware:
            return mine
        return het_tf.data.location_aware(
            wide_deep.all_data(job),
            lambda ids, labels: ids,
            context,
            batch_size=job.batch,
        )

    model.fit(
        share,
        epochs=job.epochs,
        steps_per_epoch=job.steps,
        callbacks=[callback],
        verbose=0,
    )


if __name__ == "__main__":
    main(Job.from_json(sys.argv[1]))
