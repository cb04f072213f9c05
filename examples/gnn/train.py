"""Node classification with GraphSAGE and trained node embeddings on parameter servers.

    python examples/gnn/train.py                           # a small generated graph
    python examples/gnn/train.py --data=github_graph

--data is a folder with edges.csv (id_1,id_2) and labels.csv (id,ml_target). Four of five nodes are
for training. Prints AUC and F1 of the others, beside those of two simpler ways: the share of
neighbours with label 1, and logistic regression on the number of neighbours. (Node embeddings as in
HET, VLDB 2022.)
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import baselines
import keras
import numpy as np
import quality
import sage
import tensorflow as tf
from absl import app, flags
from keras import layers, ops

import het_tf
from het_tf.datasets import graphs

FLAGS = flags.FLAGS
flags.DEFINE_string("data", None, "Folder with the graph; default: a generated one.")
flags.DEFINE_integer("dim", 64, "Columns of a node's embedding.", lower_bound=1)
flags.DEFINE_integer("hidden", 64, "Width of a layer.", lower_bound=1)
flags.DEFINE_multi_integer("fanout", [10, 10], "Neighbours, for each layer.", lower_bound=1)
flags.register_validator("fanout", sage.is_fanout, "--fanout must be given twice")
flags.DEFINE_float("dropout", 0.5, "Share of the inputs of a layer that are left out.")
flags.DEFINE_integer("workers", 2, "Worker processes.")
flags.DEFINE_integer("ps", 2, "Parameter server processes.")
flags.DEFINE_integer("batch_size", 256, "Nodes of a step.", lower_bound=1)
flags.DEFINE_float("learning_rate", 3e-3, "Of everything (Adam).")
flags.DEFINE_integer("epochs", 2, "Passes over the nodes.", lower_bound=1)


def batches(graph: graphs.Graph, nodes: np.ndarray, shuffle: bool) -> tf.data.Dataset:
    """Batches of ids and labels."""
    sample = sage.sampler(graph, FLAGS.fanout)
    labels = tf.constant(graph.labels, tf.float32)
    data = tf.data.Dataset.from_tensor_slices(nodes)
    if shuffle:
        data = data.shuffle(len(nodes))
    data = data.batch(min(FLAGS.batch_size, len(nodes)), drop_remainder=shuffle)
    return data.map(lambda n: (sample(n), tf.gather(labels, n))).prefetch(2)


def build_model() -> keras.Model:
    """Returns a model from ids to the probability of label 1, [batch]."""
    near, far = FLAGS.fanout
    ids = keras.Input((near + near * far,), dtype="int64")
    rows = het_tf.layers.HetEmbedding(FLAGS.dim, name="nodes")(ids)
    rows = layers.Dropout(FLAGS.dropout)(rows)
    # The node's own row would learn its label by heart, and rows of other nodes learn nothing then.
    own = ops.zeros_like(rows[:, 0])
    state = sage.encode(own, rows, FLAGS.fanout, FLAGS.hidden, FLAGS.dropout)
    return het_tf.keras.Model(ids, layers.Dense(1, activation="sigmoid")(state)[:, 0])


def load() -> graphs.Graph:
    """The graph that --data names."""
    graph = sage.load(FLAGS.data, graphs.generate)
    if not np.isin(graph.labels, (0, 1)).all():
        raise ValueError(f"--data={FLAGS.data} has labels other than 0 and 1")
    return graph


def split(graph: graphs.Graph) -> list[np.ndarray]:
    """The nodes to train on, and the others."""
    order = np.random.default_rng(0).permutation(len(graph.labels))
    return np.split(order, [len(order) * 4 // 5])


def train(strategy, graph: graphs.Graph) -> keras.Model:
    """Returns a trained model."""
    train_nodes, _ = split(graph)

    def worker_data(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return batches(
            graph, train_nodes[context.input_pipeline_id :: context.num_input_pipelines], True
        )

    with strategy.scope():
        model = build_model()
        model.compile(keras.optimizers.Adam(FLAGS.learning_rate), "binary_crossentropy")
    model.fit(worker_data, epochs=FLAGS.epochs, verbose=2)
    return model


def evaluate(model: keras.Model, graph: graphs.Graph) -> dict[str, float]:
    """AUC and F1 of the nodes that the model was not trained on."""
    _, nodes = split(graph)
    predicted = model.predict(batches(graph, nodes, False), verbose=0)
    return quality.metrics(graph.labels[nodes], predicted)


def main(_) -> None:
    graph = load()
    train_nodes, test_nodes = split(graph)
    labels = graph.labels[test_nodes]
    results = {
        "Degree": quality.metrics(labels, baselines.by_degree(graph, train_nodes)[test_nodes]),
        "Votes": quality.metrics(labels, baselines.votes(graph, train_nodes)[test_nodes]),
    }
    with het_tf.distribute.open_cluster(FLAGS.workers, FLAGS.ps) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        results["GraphSAGE"] = evaluate(train(strategy, graph), graph)
    for name, metrics in results.items():
        print(f"{name}:", " ".join(f"{figure} {value:.3f}" for figure, value in metrics.items()))


if __name__ == "__main__":
    app.run(main)
