"""Retrieval with two towers on parameter servers: which items does a user take?

    python examples/retrieval/train.py                     # small generated interactions
    python examples/retrieval/train.py --data=amazon_book --epochs=20

--data is a folder with train.txt and test.txt: lines of "user item item ...". The other items of a
batch are the negatives. Frequent items are in more batches, so their logits are corrected by the
logarithm of their frequency (Yi et al., RecSys 2019). Prints Recall@20 and NDCG@20 over all items
that the user has not taken in training, and exports the towers as a SavedModel.
"""

import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers, ops

import het_tf
from het_tf.datasets import interactions

FLAGS = flags.FLAGS
flags.DEFINE_string("data", None, "Folder with the interactions; default: generated ones.")
flags.DEFINE_integer("dim", 64, "Columns of an embedding.", lower_bound=1)
flags.DEFINE_integer("workers", 2, "Worker processes.")
flags.DEFINE_integer("ps", 2, "Parameter server processes.")
flags.DEFINE_integer("batch_size", 1024, "Interactions of a step.", lower_bound=1)
flags.DEFINE_float("temperature", 0.1, "Of the logits.")
flags.DEFINE_float("learning_rate", 0.1, "Of the embeddings (Adagrad).")
flags.DEFINE_integer("epochs", 20, "Passes over the interactions.", lower_bound=1)
flags.DEFINE_string("export_dir", None, "For the SavedModel; default: a new folder.")

_TOP = 20


def worker_data(pairs: np.ndarray):
    """Returns a function that makes a worker's batches: user and item, and the item's label."""
    counts = np.bincount(pairs[:, 1])
    log_share = np.log(np.maximum(counts, 1) / len(pairs)).astype(np.float32)

    def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        share = pairs[context.input_pipeline_id :: context.num_input_pipelines]
        rows, shares = tf.constant(share), tf.constant(log_share)

        def batch(at: tf.Tensor):
            user, item = tf.unstack(tf.gather(rows, at), axis=1)
            # The loss needs to know which items are the same: their places among the distinct ones.
            place = tf.cast(tf.unique(item).idx, tf.float32)
            label = tf.stack([place, tf.gather(shares, item)], axis=1)
            return {"user": user, "item": item}, label

        order = tf.data.Dataset.range(len(share)).shuffle(len(share))
        size = min(FLAGS.batch_size, len(share))
        return order.batch(size, drop_remainder=True).map(batch).prefetch(2)

    return batches


def build_model() -> keras.Model:
    """Returns a model from users and items to their vectors of length 1, [batch, 2, dim]."""
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    towers = []
    for name, ids in inputs.items():
        rows = het_tf.layers.HetEmbedding(
            FLAGS.dim,
            optimizer=keras.optimizers.Adagrad(FLAGS.learning_rate, 1e-8),
            name=f"{name}s",
        )(ids)
        towers.append(layers.UnitNormalization(name=f"{name}_vector")(rows))
    return het_tf.keras.Model(inputs, ops.stack(towers, axis=1))


def loss(label: tf.Tensor, vectors: tf.Tensor) -> tf.Tensor:
    """Softmax over the items of the batch, corrected for how often they are sampled."""
    item, log_share = label[:, 0], label[:, 1]
    users, items = vectors[:, 0], vectors[:, 1]
    logits = ops.matmul(users, ops.transpose(items)) / FLAGS.temperature - log_share
    # The same item in another row of the batch is no negative.
    same = (item[:, np.newaxis] == item) & ~ops.eye(ops.shape(item)[0], dtype="bool")
    logits = ops.where(same, -1e9, logits)
    return ops.logsumexp(logits, axis=1) - ops.diagonal(logits)


def evaluate(model: keras.Model, data: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Recall@20 and NDCG@20 of the users with test interactions."""
    train, test = (pairs[np.argsort(pairs[:, 0], kind="stable")] for pairs in data)
    users = np.unique(test[:, 0])
    count = int(max(train[:, 1].max(), test[:, 1].max())) + 1
    items = model.get_layer("items").table.lookup(np.arange(count))
    items /= np.linalg.norm(items, axis=1, keepdims=True)
    rows = model.get_layer("users").table.lookup(users)
    gains = 1 / np.log2(np.arange(_TOP) + 2)
    recall = ndcg = 0.0
    for first in range(0, len(users), 1000):
        chunk = users[first : first + 1000]
        scores = rows[first : first + 1000] @ items.T
        right = np.zeros(scores.shape, bool)
        for pairs, array, value in (train, scores, -np.inf), (test, right, True):
            low, high = np.searchsorted(pairs[:, 0], [chunk[0], chunk[-1] + 1])
            chunk_pairs = pairs[low:high]
            chunk_pairs = chunk_pairs[np.isin(chunk_pairs[:, 0], chunk)]
            array[np.searchsorted(chunk, chunk_pairs[:, 0]), chunk_pairs[:, 1]] = value
        top = np.argpartition(-scores, min(_TOP, count - 1), axis=1)[:, :_TOP]
        order = np.argsort(-np.take_along_axis(scores, top, 1), axis=1)
        hits = np.take_along_axis(right, np.take_along_axis(top, order, 1), 1)
        of_user = right.sum(1)
        best = np.cumsum(gains)[np.minimum(of_user, _TOP) - 1]
        recall += (hits.sum(1) / of_user).sum()
        ndcg += (hits @ gains[: hits.shape[1]] / best).sum()
    return {"Recall@20": float(recall / len(users)), "NDCG@20": float(ndcg / len(users))}


def load() -> tuple[np.ndarray, np.ndarray]:
    """The interactions to train on and to test with, [n, 2]."""
    folder = FLAGS.data
    if folder is None:
        folder = tempfile.mkdtemp(prefix="het_tf_retrieval_")
        interactions.generate_lists(folder)
    return interactions.load_lists(folder)


def train(strategy, data: tuple[np.ndarray, np.ndarray]) -> keras.Model:
    """Returns a trained model."""
    with strategy.scope():
        model = build_model()
        model.compile(keras.optimizers.SGD(), loss)
    model.fit(worker_data(data[0]), epochs=FLAGS.epochs, verbose=2)
    return model


def main(_) -> None:
    data = load()
    with het_tf.distribute.open_cluster(FLAGS.workers, FLAGS.ps) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        model = train(strategy, data)
        results = evaluate(model, data).items()
        print("Two towers:", " ".join(f"{name} {value:.4f}" for name, value in results))
        exported = FLAGS.export_dir or tempfile.mkdtemp(prefix="het_tf_towers_")
        model.export(exported, verbose=False)
        print(f"SavedModel: {exported}")


if __name__ == "__main__":
    app.run(main)
