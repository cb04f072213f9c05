"""Prediction of the next item with self-attention (SASRec) on parameter servers.

    python examples/sequence/train.py                      # small generated sequences
    python examples/sequence/train.py --data=video_games/reviews.txt.gz --epochs=100

--data is a file with lines of "user item", grouped by user and in the order of time. The last item
of a user is for testing. Prints Hits@10 and NDCG@10 of this item among 100 random ones, as Kang and
McAuley do (SASRec, ICDM 2018).
"""

import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import attention
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import ops

import het_tf
from het_tf.datasets import interactions

FLAGS = flags.FLAGS
flags.DEFINE_string("data", None, "File with the sequences; default: generated ones.")
flags.DEFINE_integer("dim", 64, "Columns of an embedding.", lower_bound=1)
flags.DEFINE_integer("length", 50, "Items of a sequence, the last ones.", lower_bound=1)
flags.DEFINE_integer("blocks", 2, "Blocks of self-attention.", lower_bound=1)
flags.DEFINE_float("dropout", 0.3, "Share of the inputs of a block that are left out.")
flags.DEFINE_integer("workers", 2, "Worker processes.")
flags.DEFINE_integer("ps", 2, "Parameter server processes.")
flags.DEFINE_integer("batch_size", 128, "Sequences of a step.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.03, "Of the embeddings (Adagrad).")
flags.DEFINE_float("dense_learning_rate", 1e-3, "Of everything else (Adam).")
flags.DEFINE_integer("epochs", 20, "Passes over the sequences.", lower_bound=1)
flags.DEFINE_integer("most_tested", 10_000, "Users that are tested, the first ones.", lower_bound=1)

_CANDIDATES = 100  # random items beside the right one


def padded(sequences: list[np.ndarray]) -> np.ndarray:
    """The last items of every sequence, int64 [sequences, length], at the end of the row."""
    return keras.utils.pad_sequences(sequences, FLAGS.length, "int64", value=attention.PAD)


def worker_data(sequences: list[np.ndarray], count: int):
    """Returns a function that makes a worker's batches: items, the next ones, and random ones."""
    items, following = padded([s[:-1] for s in sequences]), padded([s[1:] for s in sequences])

    def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        share = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        rows = np.concatenate([items[share], following[share]], axis=1)
        size = min(FLAGS.batch_size, len(rows))

        def batch(at: tf.Tensor):
            sequence = tf.gather(rows, at)
            shape = [size, FLAGS.length]
            is_item = sequence[:, FLAGS.length :] != attention.PAD
            random_items = tf.random.uniform(shape, 1, count + 1, tf.int64)
            random_items = tf.where(is_item, random_items, attention.PAD)
            return tf.concat([sequence, random_items], axis=1), tf.cast(is_item, tf.float32)

        order = tf.data.Dataset.range(len(rows)).shuffle(len(rows))
        return order.batch(size, drop_remainder=True).map(batch).prefetch(2)

    return batches


def build_model() -> keras.Model:
    """Returns a model to logits [batch, length, 2]: of the right and of a random item."""
    embedding = het_tf.layers.HetEmbedding(
        FLAGS.dim,
        optimizer=keras.optimizers.Adagrad(FLAGS.learning_rate, 1e-8),
        name="items",
    )
    encoder = attention.build_encoder(FLAGS.length, FLAGS.dim, FLAGS.blocks, FLAGS.dropout)
    ids = keras.Input((3 * FLAGS.length,), dtype="int64")
    rows, *next_rows = ops.split(embedding(ids), 3, axis=1)
    states = encoder([rows, ids[:, : FLAGS.length]])
    logits = ops.stack([ops.sum(states * each, axis=-1) for each in next_rows], axis=-1)
    return het_tf.keras.Model(ids, logits)


def loss(weight: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Cross-entropy of the right and of the random item. Padding has weight 0."""
    each = ops.softplus(-logits[..., 0]) + ops.softplus(logits[..., 1])
    return ops.sum(weight * each) / ops.sum(weight)


def ranks(encoder: keras.Model, rows: np.ndarray, sequences: list[np.ndarray]) -> np.ndarray:
    """Ranks of the last items among random items that the user has not taken."""
    rng = np.random.default_rng(0)
    batches = tf.data.Dataset.from_tensor_slices(padded([s[:-1] for s in sequences])).batch(512)
    states = np.concatenate([encoder([tf.gather(rows, i), i])[:, -1] for i in batches])
    result = []
    for state, items in zip(states, sequences, strict=True):
        drawn = 1 + rng.permutation(len(rows) - 1)[: _CANDIDATES + len(items)]
        candidates = drawn[~np.isin(drawn, items)][:_CANDIDATES]
        scores = rows[np.concatenate([items[-1:], candidates])] @ state
        result.append(1 + np.count_nonzero(~(scores[1:] < scores[0])))
    return np.array(result)


def load() -> list[np.ndarray]:
    """The items of every user with at least three."""
    path = FLAGS.data
    if path is None:
        path = os.path.join(tempfile.mkdtemp(prefix="het_tf_sequence_"), "reviews.txt")
        interactions.generate_sequences(path)
    sequences = [items for items in interactions.load_sequences(path) if len(items) >= 3]
    if not sequences:
        raise ValueError(f"--data={path} has no user with three items")
    items = np.concatenate(sequences)
    if items.min() <= attention.PAD or items.max() < 2 * _CANDIDATES:
        raise ValueError(f"--data={path} needs items from 1 on, and at least {2 * _CANDIDATES}")
    return sequences


def train(strategy, sequences: list[np.ndarray]) -> keras.Model:
    """Returns a trained model."""
    count = int(np.concatenate(sequences).max())
    data = worker_data([s[:-1] for s in sequences], count)
    with strategy.scope():
        model = build_model()
        model.compile(keras.optimizers.Adam(FLAGS.dense_learning_rate), loss)
    model.fit(data, epochs=FLAGS.epochs, verbose=2)
    return model


def evaluate(model: keras.Model, sequences: list[np.ndarray]) -> dict[str, float]:
    """Metrics of the users' last items, which the model was not trained on."""
    count = int(np.concatenate(sequences).max())
    rows = model.get_layer("items").table.lookup(np.arange(count + 1))
    rank = ranks(model.get_layer("encoder"), rows, sequences[: FLAGS.most_tested])
    gains = np.where(rank <= 10, 1 / np.log2(rank + 1), 0)
    return {"Hits@10": float(np.mean(rank <= 10)), "NDCG@10": float(np.mean(gains))}


def main(_) -> None:
    sequences = load()
    with het_tf.distribute.open_cluster(FLAGS.workers, FLAGS.ps) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        results = evaluate(train(strategy, sequences), sequences)
        print("SASRec:", " ".join(f"{name} {value:.3f}" for name, value in results.items()))


if __name__ == "__main__":
    app.run(main)
