"""Link prediction with GraphSAGE and trained node embeddings.

    python examples/gnn/links.py                           # a small generated graph with genres
    python examples/gnn/links.py --data=github_graph
    python examples/gnn/links.py --data=deezer_hu          # with the genres that users like

--data is a folder with edges.csv, and genres.json or labels.csv. A tenth of the edges is for
testing. Prints the AUC of these edges against pairs of one end and a random node, and that of two
numbers: of common neighbours, and of neighbours of the second node.
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
flags.DEFINE_integer("dim", 64, "Columns of an embedding, and width of a layer.", lower_bound=1)
flags.DEFINE_multi_integer("fanout", [5, 5], "Neighbours, for each layer.", lower_bound=1)
flags.register_validator("fanout", sage.is_fanout, "--fanout must be given twice")
flags.DEFINE_float("dropout", 0.0, "Share of the inputs of a layer that are left out.")
flags.DEFINE_integer("workers", 2, "Worker processes.")
flags.DEFINE_integer("ps", 2, "Parameter server processes.")
flags.DEFINE_integer("batch_size", 256, "Edges of a step.", lower_bound=1)
flags.DEFINE_float("learning_rate", 3e-3, "Of everything (Adam).")
flags.DEFINE_integer("epochs", 2, "Passes over the edges.", lower_bound=1)

_PARTS = 3  # of the edges


def split(graph: graphs.Graph) -> tuple[graphs.Graph, np.ndarray, np.ndarray]:
    """Returns the graph of nine tenths of the edges, these edges, and the others, [n, 2]."""
    ends = np.stack([np.repeat(np.arange(len(graph.degrees)), graph.degrees), graph.neighbors], 1)
    edges = np.unique(ends[ends[:, 0] < ends[:, 1]], axis=0)
    rng = np.random.default_rng(0)
    # In any order of the ends: a second end that is always the larger one would tell by its number.
    edges = rng.permuted(rng.permutation(edges), axis=1)
    test, train = np.split(edges, [len(edges) // 10])
    return graphs.from_edges(train, graph.labels), train, test


def batches(graph: graphs.Graph, edges: np.ndarray, shuffle: bool) -> tf.data.Dataset:
    """Batches of (a node, its neighbour, a random node), with a drawn neighbourhood each."""
    sample, count = sage.sampler(graph, FLAGS.fanout), len(graph.degrees)
    rows, labels = tf.constant(edges), tf.constant(graph.labels)

    def batch(at: tf.Tensor):
        left, right = tf.unstack(tf.gather(rows, at), axis=1)
        other = tf.random.uniform(tf.shape(left), 0, count, tf.int64)
        nodes = [tf.concat([node[:, None], sample(node)], 1) for node in (left, right, other)]
        features = {"nodes": tf.stack(nodes, axis=1)}
        if graph.labels.ndim == 2:
            features["genres"] = tf.gather(labels, features["nodes"][:, :, 0])
        return features, tf.tile([[1.0, 0.0]], [tf.size(left), 1])

    order = tf.data.Dataset.range(len(edges))
    order = order.shuffle(len(edges)) if shuffle else order
    size = min(FLAGS.batch_size, len(edges))
    return order.batch(size, drop_remainder=shuffle).map(batch).prefetch(2)


def build_model(graph: graphs.Graph) -> keras.Model:
    """Returns a model to logits [batch, 2]: of the neighbour and of the random node."""
    near, far = FLAGS.fanout
    # Rows, ids of a node, combiner.
    tables = {"nodes": (len(graph.degrees), 1 + near + near * far, None)}
    if graph.labels.ndim == 2:
        tables["genres"] = (int(graph.labels.max()) + 1, graph.labels.shape[1], "mean")
    inputs, features, weights = {}, {}, {}
    for name, (rows, ids, combiner) in tables.items():
        inputs[name] = keras.Input((3, ids), dtype="int64", name=name)
        weights[name] = ops.cast(inputs[name] >= 0, "float32")  # Others pad a bag.
        table = het_tf.layers.TableConfig(name, rows, FLAGS.dim, combiner=combiner)
        features[name] = het_tf.layers.FeatureConfig(name, table, (None, 3, ids), None)
    ids = {name: ops.maximum(each, 0) for name, each in inputs.items()}
    vectors = het_tf.layers.HetEmbeddingCollection(features)(ids, weights)
    rows = ops.reshape(vectors.pop("nodes"), (-1, 1 + near + near * far, FLAGS.dim))
    own = rows[:, 0] + sum(ops.reshape(each, (-1, FLAGS.dim)) for each in vectors.values())
    own, rows = (layers.Dropout(FLAGS.dropout)(x) for x in (own, rows))
    state = sage.encode(own, rows[:, 1:], FLAGS.fanout, FLAGS.dim, FLAGS.dropout)
    state = own + layers.Dense(FLAGS.dim)(state)
    popularity = ops.reshape(layers.Dense(1)(state), (-1, 3))
    left, right, other = ops.split(ops.reshape(state, (-1, 3, FLAGS.dim)), 3, axis=1)
    pairs = ops.concatenate([left * right, left * other], axis=1)
    return het_tf.keras.Model(inputs, ops.sum(pairs, axis=2) + popularity[:, 1:])


def load() -> graphs.Graph:
    """The graph that --data names."""
    return sage.load(FLAGS.data, graphs.generate_genres)


def train(strategy, graph: graphs.Graph) -> keras.Model:
    """Returns a trained model."""
    _, train_edges, _ = split(graph)
    # An edge that is asked for must not be seen: neighbours are drawn from the other parts.
    parts = np.array_split(train_edges, _PARTS)
    seen = [np.concatenate(parts[:i] + parts[i + 1 :]) for i in range(_PARTS)]
    pairs = [(graphs.from_edges(s, graph.labels), p) for s, p in zip(seen, parts, strict=True)]

    def worker_data(context: tf.distribute.InputContext) -> tf.data.Dataset:
        worker, workers = context.input_pipeline_id, context.num_input_pipelines
        return tf.data.Dataset.sample_from_datasets(
            [batches(neighborhood, part[worker::workers], True) for neighborhood, part in pairs]
        )

    with strategy.scope():
        model = build_model(graph)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(FLAGS.learning_rate), loss)
    model.fit(worker_data, epochs=FLAGS.epochs, verbose=2)
    return model


def evaluate(model: keras.Model, graph: graphs.Graph) -> dict[str, float]:
    """The AUC of edges that the model was not trained on."""
    train_graph, _, test_edges = split(graph)
    true, false = model.predict(batches(train_graph, test_edges, False), verbose=0).T
    return {"AUC": quality.area_under_curve(true, false)}


def main(_) -> None:
    graph = load()
    train_graph, _, test_edges = split(graph)
    random = np.random.default_rng(0).integers(0, len(graph.degrees), len(test_edges))
    kinds = test_edges, np.stack([test_edges[:, 0], random], axis=1)
    common = (baselines.common_neighbors(train_graph, pairs) for pairs in kinds)
    print(f"Common neighbours: AUC {quality.area_under_curve(*common):.3f}")
    degrees = (train_graph.degrees[pairs[:, 1]] for pairs in kinds)
    print(f"Neighbours of the second node: AUC {quality.area_under_curve(*degrees):.3f}")
    with het_tf.distribute.open_cluster(FLAGS.workers, FLAGS.ps) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        model = train(strategy, graph)
        print(f"GraphSAGE: AUC {evaluate(model, graph)['AUC']:.3f}")


if __name__ == "__main__":
    app.run(main)
