"""Node classification with GraphSAGE and trained node embeddings on parameter servers.

    python examples/gnn/train.py                           # a small generated graph
    python examples/gnn/train.py --data=github_graph

--data is a folder with edges.csv (id_1,id_2) and labels.csv (id,ml_target). Four of five nodes are
for training. Prints AUC and F1 of the others, beside those of the share of positive neighbours.
(GraphSAGE: Hamilton et al., NIPS 2017. Node embeddings as in HET, VLDB 2022.)
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
from het_tf.datasets import graphs

FLAGS = flags.FLAGS
flags.DEFINE_string("data", None, "Folder with the graph; default: a generated one.")
flags.DEFINE_integer("dim", 64, "Columns of a node's embedding.")
flags.DEFINE_integer("hidden", 64, "Width of a layer.")
flags.DEFINE_multi_integer("fanout", [10, 10], "Neighbours that are drawn, for each of two layers.")
flags.DEFINE_float("dropout", 0.5, "Share of the inputs of a layer that are left out.")
flags.DEFINE_integer("workers", 2, "Worker processes.")
flags.DEFINE_integer("ps", 2, "Parameter server processes.")
flags.DEFINE_integer("batch_size", 256, "Nodes of a step.")
flags.DEFINE_float("learning_rate", 3e-3, "Of everything (Adam).")
flags.DEFINE_integer("epochs", 2, "Passes over the nodes.")


def sampler(graph: graphs.Graph):
    """Returns a function from nodes [batch] to ids [batch, fanout + fanout * fanout].

    These are neighbours of the node, and neighbours of each neighbour, drawn with replacement. A
    node without neighbours is its own neighbour.
    """
    offsets, neighbors = tf.constant(graph.offsets), tf.constant(graph.neighbors)

    def draw(nodes: tf.Tensor, fanout: int) -> tf.Tensor:
        first, count = tf.gather(offsets, nodes), tf.gather(graph.degrees, nodes)
        at = tf.random.uniform([tf.size(nodes), fanout], 0, 2**31 - 1, tf.int64)
        at = first[:, tf.newaxis] + at % tf.maximum(count, 1)[:, tf.newaxis]
        drawn = tf.gather(neighbors, tf.minimum(at, len(graph.neighbors) - 1))
        return tf.where(count[:, tf.newaxis] > 0, drawn, nodes[:, tf.newaxis])

    def sample(nodes: tf.Tensor) -> tf.Tensor:
        near = draw(nodes, FLAGS.fanout[0])
        far = draw(tf.reshape(near, [-1]), FLAGS.fanout[1])
        far = tf.reshape(far, [-1, FLAGS.fanout[0] * FLAGS.fanout[1]])
        return tf.concat([near, far], 1)

    return sample


def batches(graph: graphs.Graph, nodes: np.ndarray, shuffle: bool) -> tf.data.Dataset:
    """Batches of ids and labels."""
    sample, labels = sampler(graph), tf.constant(graph.labels, tf.float32)
    data = tf.data.Dataset.from_tensor_slices(nodes)
    if shuffle:
        data = data.shuffle(len(nodes))
    data = data.batch(min(FLAGS.batch_size, len(nodes)), drop_remainder=shuffle)
    return data.map(lambda n: (sample(n), tf.gather(labels, n))).prefetch(2)


def build_model() -> keras.Model:
    """Returns a model from ids to the probability of label 1, [batch]."""
    near, far = FLAGS.fanout
    ids = keras.Input((near + near * far,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(FLAGS.dim, name="nodes")
    rows = layers.Dropout(FLAGS.dropout)(embedding(ids))
    neighbors, others = ops.split(rows, [near], axis=1)
    # The node's own row would learn its label by heart, and rows of other nodes learn nothing then.
    node = ops.zeros_like(neighbors[:, :1])

    def aggregate(own, of_neighbors, activation):
        both = ops.concatenate([own, ops.mean(of_neighbors, axis=2)], axis=-1)
        return layers.Dropout(FLAGS.dropout)(activation(both))

    first = layers.Dense(FLAGS.hidden, activation="relu")
    others = ops.reshape(others, (-1, near, far, FLAGS.dim))
    states = aggregate(neighbors, others, first)
    own = aggregate(node, ops.expand_dims(neighbors, 1), first)
    second = layers.Dense(FLAGS.hidden, activation="relu")
    state = aggregate(own, ops.expand_dims(states, 1), second)
    return het_tf.keras.Model(ids, layers.Dense(1, activation="sigmoid")(state)[:, 0, 0])


def scores(labels: np.ndarray, predicted: np.ndarray) -> str:
    """AUC, and F1 of both labels on average, of probabilities."""
    auc = keras.metrics.AUC(num_thresholds=2000)
    auc.update_state(labels, predicted)
    found = predicted > 0.5
    f1 = [
        2
        * np.sum((found == kind) & (labels == kind))
        / max(np.sum(found == kind) + np.sum(labels == kind), 1)
        for kind in (0, 1)
    ]
    return f"AUC {float(auc.result()):.3f} F1 {np.mean(f1):.3f}"


def main(_) -> None:
    if len(FLAGS.fanout) != 2:
        raise ValueError(f"--fanout must be given twice, once for each layer, not {FLAGS.fanout}")
    folder = FLAGS.data
    if folder is None:
        folder = tempfile.mkdtemp(prefix="het_tf_gnn_")
        graphs.generate(folder)
    graph = graphs.load(folder)
    order = np.random.default_rng(0).permutation(len(graph.labels))
    train, test = np.split(order, [len(order) * 4 // 5])

    def mine(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return batches(graph, train[context.input_pipeline_id :: context.num_input_pipelines], True)

    with het_tf.distribute.LocalCluster(FLAGS.workers, FLAGS.ps) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            model = build_model()
            model.compile(keras.optimizers.Adam(FLAGS.learning_rate), "binary_crossentropy")
        model.fit(mine, epochs=FLAGS.epochs, verbose=2)
        predicted = model.predict(batches(graph, test, False), verbose=0)
    known = np.zeros(len(graph.labels), bool)
    known[train] = True
    of_edge = np.repeat(np.arange(len(known)), graph.degrees)
    voters = known[graph.neighbors]
    votes = np.bincount(of_edge, voters * graph.labels[graph.neighbors], len(known))
    share = (votes + graph.labels[train].mean()) / (np.bincount(of_edge, voters, len(known)) + 1)
    labels = graph.labels[test]
    print(f"Neighbours' votes: {scores(labels, share[test])}")
    print(f"GraphSAGE: {scores(labels, predicted)}")


if __name__ == "__main__":
    app.run(main)
