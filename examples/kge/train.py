"""Knowledge-graph embeddings: TransE, DistMult, ComplEx and RotatE on parameter servers.

    python examples/kge/train.py                           # a small generated graph
    python examples/kge/train.py --data=fb15k237 --model=complex --epochs=50

--data is a folder with train.txt, valid.txt and test.txt: head, relation and tail, with tabs
between them. Prints the filtered MRR and Hits@k of the test triples (Bordes et al., NIPS 2013).
"""

import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import ops
from scores import MODELS

import het_tf
from het_tf.datasets import triples

FLAGS = flags.FLAGS
flags.DEFINE_string("data", None, "Folder with the triples; default: generated ones.")
flags.DEFINE_enum("model", "complex", list(MODELS), "Score of a triple.")
flags.DEFINE_integer("dim", 128, "Columns of an embedding.")
flags.DEFINE_integer("workers", 2, "Worker processes.")
flags.DEFINE_integer("ps", 2, "Parameter server processes.")
flags.DEFINE_integer("groups", 8, "Groups of triples in a batch.")
flags.DEFINE_integer("group_size", 64, "Triples of a group, which share negative entities.")
flags.DEFINE_integer("negatives", 128, "Random entities for the triples of a group.")
flags.DEFINE_float("temperature", 1.0, "Of the weights of the negatives; 0: all the same.")
flags.DEFINE_float("dropout", 0.2, "Share of the columns that are left out.")
flags.DEFINE_float("learning_rate", 0.1, "Of the embeddings (Adagrad).")
flags.DEFINE_integer("epochs", 20, "Passes over the triples.")
flags.DEFINE_integer("most_tested", 5000, "Test triples that are ranked.")


def worker_data(data: triples.Triples):
    """Returns a function that makes a worker's batches: groups of triples and negatives."""
    count = len(data.entities)

    def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        mine = data.train[context.input_pipeline_id :: context.num_input_pipelines]
        rows = tf.constant(mine)
        groups = max(1, min(FLAGS.groups, len(mine) // FLAGS.group_size))

        def batch(at: tf.Tensor):
            head, relation, tail = tf.unstack(
                tf.reshape(tf.gather(rows, at), [groups, FLAGS.group_size, 3]), axis=2
            )
            negatives = tf.random.uniform([groups, FLAGS.negatives], 0, count, tf.int64)
            entities = tf.concat([head, tail, negatives], axis=1)
            return {"entities": entities, "relations": relation}, tf.zeros([groups])

        order = tf.data.Dataset.range(len(mine)).shuffle(len(mine))
        size = groups * FLAGS.group_size
        return order.batch(size, drop_remainder=True).map(batch).prefetch(2)

    return batches


def build_model(relations: int) -> keras.Model:
    """Returns a model from entities and relations to scores [groups, triples, 1 + negatives]."""
    size, model = FLAGS.group_size, MODELS[FLAGS.model]
    inputs = {
        "entities": keras.Input((2 * size + FLAGS.negatives,), dtype="int64", name="entities"),
        "relations": keras.Input((size,), dtype="int64", name="relations"),
    }
    options = {
        "optimizer": keras.optimizers.Adagrad(FLAGS.learning_rate, 1e-8),
        "embeddings_initializer": keras.initializers.RandomUniform(-0.5, 0.5),
    }
    entity = het_tf.layers.HetEmbedding(FLAGS.dim, name="entities_rows", **options)
    relation = het_tf.layers.HetEmbedding(FLAGS.dim, name="relations_rows", **options)
    rows = keras.layers.Dropout(FLAGS.dropout)(entity(inputs["entities"]))
    h, t, n = ops.split(rows, [size, 2 * size], axis=1)
    r = keras.layers.Dropout(FLAGS.dropout)(relation(inputs["relations"]))
    scores = [
        model.similarity_of_pairs(model.tails(h, r), t),
        model.similarity(model.tails(h, r), n),
        model.similarity(model.heads(t, r), n),
    ]
    return het_tf.keras.Model(inputs, ops.concatenate(scores, axis=2))


def loss(_, scores: tf.Tensor) -> tf.Tensor:
    """Negative sampling, hard negatives weigh more (Sun et al., RotatE, ICLR 2019)."""
    true, false = scores[..., :1], scores[..., 1:]
    weights = ops.stop_gradient(ops.softmax(FLAGS.temperature * false, axis=-1))
    wrong = ops.sum(weights * ops.softplus(false), axis=-1)
    return ops.mean(wrong + ops.softplus(-true[..., 0]), axis=-1) / 2


def ranks(model: keras.Model, data: triples.Triples) -> np.ndarray:
    """Ranks of the right tails and heads among all entities that make no other known triple."""
    score = MODELS[FLAGS.model]
    rows = model.get_layer("entities_rows").table.lookup(np.arange(len(data.entities)))
    relations = model.get_layer("relations_rows").table.lookup(np.arange(len(data.relations)))
    known: dict[tuple[str, int, int], list[int]] = {}
    for h, r, t in np.concatenate([data.train, data.valid, data.test]).tolist():
        known.setdefault(("tail", h, r), []).append(t)
        known.setdefault(("head", t, r), []).append(h)
    found = []
    for first in range(0, min(len(data.test), FLAGS.most_tested), 500):
        h, r, t = data.test[first : min(first + 500, FLAGS.most_tested)].T
        for side, given, right, query in (
            ("tail", h, t, score.tails(rows[h], relations[r])),
            ("head", t, h, score.heads(rows[t], relations[r])),
        ):
            every = np.array(score.similarity(query[np.newaxis], rows[np.newaxis]))[0]
            for i in range(len(every)):
                mine = every[i, right[i]]
                every[i, known[side, given[i], r[i]]] = -np.inf
                # Of equal scores the right entity is the last. NaN is never smaller.
                found.append(1 + np.count_nonzero(~(every[i] < mine)))
    return np.array(found)


def main(_) -> None:
    if FLAGS.dim % 2:
        raise ValueError(f"--dim must be even, not {FLAGS.dim}")
    folder = FLAGS.data
    if folder is None:
        folder = tempfile.mkdtemp(prefix="het_tf_kge_")
        triples.generate(folder)
    data = triples.load(folder)
    with het_tf.distribute.LocalCluster(FLAGS.workers, FLAGS.ps) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            model = build_model(len(data.relations))
            model.compile(keras.optimizers.SGD(), loss)
        model.fit(worker_data(data), epochs=FLAGS.epochs, verbose=2)
        found = ranks(model, data)
        hits = " ".join(f"Hits@{k} {np.mean(found <= k):.3f}" for k in (1, 3, 10))
        print(f"{FLAGS.model}: filtered MRR {np.mean(1 / found):.3f} {hits}")


if __name__ == "__main__":
    app.run(main)
