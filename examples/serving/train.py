"""Trains on a stream of made-up clicks and publishes the model while it does.

python train.py /tmp/het_tf_live --every 2s --steps 2000

What people click drifts: which of the ids are liked moves on with every step, so that a model that
is served has to follow. See serve.py.
"""

import argparse

import keras
import tensorflow as tf

import het_tf

IDS = 10_000


def batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """128 pairs of ids, and whether their sum is near to what is liked now."""
    ids = tf.random.stateless_uniform([128, 2], [step, 0], 0, IDS, tf.int64)
    liked = (tf.reduce_sum(ids, 1, keepdims=True) + 10 * step) % 100 < 50
    return ids, tf.cast(liked, tf.float32)


def make_model() -> keras.Model:
    ids = keras.Input((2,), dtype="int64", name="ids")
    rows = het_tf.layers.HetEmbedding(
        16, optimizer=het_tf.optimizers.RowWiseAdagrad(0.05), cache=het_tf.CacheConfig(IDS)
    )(ids)
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Flatten()(rows))
    model = het_tf.keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"], steps_per_execution=10)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="for the SavedModel")
    parser.add_argument("--every", default="2s", help="how often it is published")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    with het_tf.distribute.LocalCluster(num_workers=2, num_ps=2) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            model = make_model()
        with het_tf.serving.publish(model, arguments.folder, arguments.every) as publisher:
            print(f"published in {arguments.folder}", flush=True)
            model.fit(
                lambda: tf.data.Dataset.range(arguments.steps).map(batch),
                steps_per_epoch=arguments.steps,
                callbacks=[publisher],
                verbose=2,
            )
    print(f"version {publisher.version} is the last", flush=True)


if __name__ == "__main__":
    main()
