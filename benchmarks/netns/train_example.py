"""Trains a program of examples/ as the chief of TF_CONFIG's cluster, with het_tf or with tf_keras.

    python -m netns.train_example SYSTEM EXAMPLE [FLAG ...]

Prints a line of JSON: seconds of each epoch, and the program's metrics after each.

With tf_keras, the program's Keras model is a function of weights (`keras.Model.stateless_call`).
The weights belong to a tf_keras model, which `fit` trains on `tf.distribute`'s own
ParameterServerStrategy: rows in a `tf_keras.layers.Embedding`, dense variables beside them. Loss,
data and evaluation are the program's.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import sys
import time
from collections.abc import Callable
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from example_quality import Collection, layers_of, load_program

import het_tf

# Ids of a layer, as a user of Keras knows them. Of "deep" and "wide", hashes.
_ROWS = {
    "entities_rows": 14_541,
    "relations_rows": 237,
    "users": 70_679,
    "items": 24_915,
    "nodes": 47_538,
    "genres": 84,
    "deep": 1 << 20,
    "wide": 1 << 20,
}
_SYSTEMS = ("het_tf", "tf_keras")


class Epochs:
    """Seconds of each epoch, from its first step on, and metrics after it."""

    def __init__(self, evaluate: Callable[[keras.Model], dict[str, float]]) -> None:
        self._evaluate = evaluate
        self.seconds: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self.seconds.append(time.perf_counter() - self._began)

    def measure(self, model: keras.Model) -> None:
        self.metrics.append(self._evaluate(model))


class Rows(keras.layers.Layer):
    """Looks rows up in a tf_keras variable while this trains, otherwise in a copy."""

    def __init__(self, dim, *, optimizer="same", embeddings_initializer="uniform", name, **_):
        super().__init__(name=name)
        self.dim, self.rows_optimizer = dim, optimizer
        self.initializer = keras.initializers.get(embeddings_initializer)
        # No constant of the functions that Keras evaluates with.
        self.rows = tf.Variable(self.initializer((_ROWS[name], dim)), trainable=False)
        self.variable = None

    @property
    def table(self) -> Rows:
        return self

    def lookup(self, ids):
        return tf.gather(self.rows, ids % self.rows.shape[0]).numpy()

    def call(self, ids):
        source = self.rows if self.variable is None else self.variable
        # A multiple of an odd number: the ids of a column that lie side by side stay apart.
        spread = ids if self.name not in ("deep", "wide") else ids * 0x9E3779B97F4A7C1
        return tf.nn.embedding_lookup(source, tf.math.floormod(spread, self.rows.shape[0]))


class RowsOfFeatures(Collection):
    """A `Rows` for each feature of a collection."""

    layer_of_rows = Rows


def peer_of(strategy: tf.distribute.Strategy, workers: int, epochs: Epochs) -> type[keras.Model]:
    """A class in the place of het_tf.keras.Model, whose `fit` trains a tf_keras model."""
    import tf_keras

    class Weights(tf_keras.Model):
        """The weights of a Keras model, and what the model computes of them."""

        def __init__(self, model: keras.Model):
            super().__init__()
            self._model = lambda: model  # tf_keras would take an attribute's variables for its own.
            self.dense = [
                self.add_weight(
                    name=f"dense_{i}",
                    shape=v.shape,
                    initializer=tf_keras.initializers.Constant(np.array(v)),
                )
                for i, v in enumerate(model.trainable_variables)
            ]
            self.tables = []
            for layer in layers_of(model, Rows):
                start = tf_keras.initializers.RandomUniform(-0.05, 0.05)
                embedding = tf_keras.layers.Embedding(*layer.rows.shape, start)
                embedding.build(None)
                embedding.embeddings.assign(layer.rows)
                self.tables.append(embedding)

        def call(self, inputs, training=False):
            model = self._model()
            layers = layers_of(model, Rows)
            for layer, embedding in zip(layers, self.tables, strict=True):
                layer.variable = embedding.embeddings
            # Seeds of dropout: other ones in every step.
            state = [
                tf.cast(tf.random.uniform(v.shape, 0, 2**31 - 1, tf.int32), v.dtype)
                if "seed" in v.path
                else v.value
                for v in model.non_trainable_variables
            ]
            try:
                weights = [tf.convert_to_tensor(v) for v in self.dense]
                return model.stateless_call(weights, state, inputs, training=training)[0]
            finally:
                for layer in layers:
                    layer.variable = None

        def train_step(self, batch):
            if self.of_rows is None:
                return super().train_step(batch)
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            rows = [each.embeddings for each in self.tables]
            gradients = tape.gradient(loss, self.dense + rows)
            dense = len(self.dense)
            if dense:
                self.optimizer.apply_gradients(zip(gradients[:dense], self.dense, strict=True))
            self.of_rows.apply_gradients(zip(gradients[dense:], rows, strict=True))
            return {"loss": loss}

    class Peer(keras.Model):
        def fit(self, data, epochs=1, callbacks=(), **_):
            def of_worker(context):
                return data(context).repeat()

            shares = [tf.distribute.InputContext(workers, i, workers) for i in range(workers)]
            steps = sum(_batches(data(share)) for share in shares)
            with strategy.scope():
                weights = Weights(self)
                optimizers = [x.rows_optimizer for x in layers_of(self, Rows)]
                weights.of_rows = None
                if "same" not in optimizers:
                    weights.of_rows = _of_tf_keras(tf_keras, optimizers[0])
                    weights.of_rows.build([x.embeddings for x in weights.tables])
                optimizer = _of_tf_keras(tf_keras, self.optimizer)
                weights.compile(optimizer, self.loss, steps_per_execution=8)

            def epoch_ended(epoch, logs):
                recorded.end()
                for layer, embedding in zip(layers_of(self, Rows), weights.tables, strict=True):
                    layer.rows.assign(embedding.embeddings.numpy())
                for mine, trained in zip(self.trainable_variables, weights.dense, strict=True):
                    mine.assign(trained.numpy())
                # Another thread is not in the scope of the strategy, as the program's is not.
                with concurrent.futures.ThreadPoolExecutor(1) as thread:
                    thread.submit(recorded.measure, self).result()

            recorder = tf_keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: recorded.begin(), on_epoch_end=epoch_ended
            )
            weights.fit(
                tf_keras.utils.experimental.DatasetCreator(of_worker),
                epochs=epochs,
                steps_per_epoch=steps,
                callbacks=[recorder],
                verbose=0,
            )

    recorded = epochs
    return Peer


def _batches(data: tf.data.Dataset) -> int:
    """Number of batches of a pass."""
    count = int(data.cardinality())
    return count if count >= 0 else int(data.reduce(0, lambda count, _: count + 1))


def _of_tf_keras(tf_keras, optimizer):
    """The same optimizer, of tf_keras."""
    if isinstance(optimizer, het_tf.optimizers.RowWiseAdagrad):
        name, config = "Adagrad", {"learning_rate": optimizer.learning_rate}
    else:
        name = type(optimizer).__name__
        given = optimizer.get_config()
        config = {"learning_rate": float(given["learning_rate"])}
        if name == "Adagrad":
            config["initial_accumulator_value"] = given["initial_accumulator_value"]
    return getattr(tf_keras.optimizers, name)(**config)


def main(system: str, example: str, words: list[str]) -> None:
    if system not in _SYSTEMS:
        raise ValueError(f"SYSTEM must be one of {_SYSTEMS}, not {system!r}")
    program = load_program(example, words)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    # Datasets of this process must not be older than the connection to the cluster.
    data = functools.cache(program.load)
    epochs = Epochs(lambda model: program.evaluate(model, data()))
    if system == "tf_keras":
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        workers = resolver.cluster_spec().num_tasks("worker")
        patches = [
            mock.patch.object(het_tf.layers, "HetEmbedding", Rows),
            mock.patch.object(het_tf.layers, "HetEmbeddingCollection", RowsOfFeatures),
            mock.patch.object(het_tf.keras, "Model", peer_of(strategy, workers, epochs)),
        ]
        scope = tf.distribute.get_strategy()
    else:

        class Timed(het_tf.keras.Model):
            def fit(self, *args, callbacks=(), **kwargs):
                recorder = keras.callbacks.LambdaCallback(
                    on_epoch_begin=lambda epoch, logs: epochs.begin(),
                    on_epoch_end=lambda epoch, logs: (epochs.end(), epochs.measure(self)),
                )
                return super().fit(*args, callbacks=[recorder, *callbacks], **kwargs)

        scope = het_tf.distribute.HetParameterServerStrategy(resolver)
        patches = [mock.patch.object(het_tf.keras, "Model", Timed)]
    for patch in patches:
        patch.start()
    program.train(scope, data())
    print(json.dumps({"seconds": epochs.seconds, "metrics": epochs.metrics}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
