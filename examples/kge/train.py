"""Knowledge-graph embeddings: TransE, DistMult, ComplEx and RotatE on parameter servers.

    python examples/kge/train.py                           # a small generated graph
    python examples/kge/train.py --data=fb15k237 --model=complex --epochs=50

--data is a folder with train.txt, valid.txt and test.txt: head, relation and tail, with tabs
between them. Prints the filtered MRR and Hits@k of test triples (Bordes et al., NIPS 2013).
"""

import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import ops
from ranking import Ranking
from scores import MODELS

import het_tf
from het_tf.datasets import triples

FLAGS = flags.FLAGS
flags.DEFINE_string("data", None, "Folder with the triples; default: generated ones.")
flags.DEFINE_enum("model", "complex", list(MODELS), "Score of a triple.")
flags.DEFINE_integer("dim", 128, "Columns of an embedding.", lower_bound=1)
flags.DEFINE_integer("workers", 2, "Worker processes.")
flags.DEFINE_integer("ps", 2, "Parameter server processes.")
flags.DEFINE_integer("groups", 8, "Groups of triples in a batch.", lower_bound=1)
flags.DEFINE_integer("group_size", 64, "Triples that share negatives.", lower_bound=1)
flags.DEFINE_integer("negatives", 128, "Random entities of a group.", lower_bound=1)
flags.DEFINE_float("temperature", 1.0, "Of the weights of the negatives; 0: all the same.")
flags.DEFINE_float("dropout", None, "Share of the columns that are left out; default: the model's.")
flags.DEFINE_float("learning_rate", 0.1, "Of the embeddings (Adagrad).")
flags.DEFINE_integer("epochs", 20, "Passes over the triples.", lower_bound=1)
flags.DEFINE_integer("most_tested", 5000, "Test triples, the first ones.", lower_bound=1)


def worker_data(data: triples.Triples):
    """Returns a function that makes a worker's batches: groups of triples and negatives."""
    count = len(data.entities)

    def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
        share = data.train[context.input_pipeline_id :: context.num_input_pipelines]
        rows = tf.constant(share)
        groups = max(1, min(FLAGS.groups, len(share) // FLAGS.group_size))

        def batch(at: tf.Tensor):
            head, relation, tail = tf.unstack(
                tf.reshape(tf.gather(rows, at), [groups, FLAGS.group_size, 3]), axis=2
            )
            negatives = tf.random.uniform([groups, FLAGS.negatives], 0, count, tf.int64)
            entities = tf.concat([head, tail, negatives], axis=1)
            return {"entities": entities, "relations": relation}, tf.zeros([groups])

        order = tf.data.Dataset.range(len(share)).shuffle(len(share))
        size = groups * FLAGS.group_size
        return order.batch(size, drop_remainder=True).map(batch).prefetch(2)

    return batches


def build_model() -> keras.Model:
    """Returns a model from entities, relations to scores [groups, triples, 1 + 2 * negatives]."""
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
    dropout = model.dropout if FLAGS.dropout is None else FLAGS.dropout
    rows = keras.layers.Dropout(dropout)(entity(inputs["entities"]))
    h, t, n = ops.split(rows, [size, 2 * size], axis=1)
    r = keras.layers.Dropout(dropout)(relation(inputs["relations"]))
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


def load() -> triples.Triples:
    """The triples that --data names."""
    folder = FLAGS.data
    if folder is None:
        folder = tempfile.mkdtemp(prefix="het_tf_kge_")
        triples.generate(folder)
    return triples.load(folder)


def vectors(model: keras.Model, data: triples.Triples) -> list[np.ndarray]:
    """The rows of all entities, and of all relations."""
    return [
        model.get_layer(f"{name}_rows").table.lookup(np.arange(len(getattr(data, name))))
        for name in ("entities", "relations")
    ]


def train(strategy, data: triples.Triples) -> keras.Model:
    """Returns a trained model."""
    with strategy.scope():
        model = build_model()
        model.compile(keras.optimizers.SGD(), loss)
    ranking = Ranking(data)

    def validate(epoch: int, logs: dict[str, float]) -> None:
        found = ranking.metrics(MODELS[FLAGS.model], *vectors(model, data), data.valid[:500])
        logs["val_MRR"] = found["MRR"]

    # Before the callback that prints the logs.
    validation = keras.callbacks.LambdaCallback(on_epoch_end=validate)
    model.fit(worker_data(data), epochs=FLAGS.epochs, callbacks=[validation], verbose=2)
    return model


def evaluate(model: keras.Model, data: triples.Triples) -> dict[str, float]:
    """The model's metrics on the test triples."""
    questions = data.test[: FLAGS.most_tested]
    return Ranking(data).metrics(MODELS[FLAGS.model], *vectors(model, data), questions)


def main(_) -> None:
    if FLAGS.dim % 2:
        raise ValueError(f"--dim must be even, not {FLAGS.dim}")
    data = load()
    with het_tf.distribute.open_cluster(FLAGS.workers, FLAGS.ps) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        results = evaluate(train(strategy, data), data)
        print(f"{FLAGS.model}:", " ".join(f"{name} {value:.3f}" for name, value in results.items()))


if __name__ == "__main__":
    app.run(main)
