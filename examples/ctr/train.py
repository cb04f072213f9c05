"""Click-through prediction on MovieLens 100K: wide & deep, DeepFM, DCN or DLRM.

Trains the same model twice on a local cluster, with no cache and with the HET cache on every
worker, and prints what the cache changes. Then exports the cached model and asks it a question.

    python examples/ctr/train.py               # 2 workers, 2 parameter servers
    python examples/ctr/train.py --workers=4 --staleness=10 --capacity=500 --policy=lru
    python examples/ctr/train.py --model=dcn --schedule=herald
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

# What goes wrong is raised; what TensorFlow logs besides is not for the reader of a demo.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import report
import tensorflow as tf
from absl import app, flags, logging
from model import MODELS, build_model

import het_tf
from het_tf.datasets import movielens

FLAGS = flags.FLAGS
flags.DEFINE_enum("model", "wide_deep", MODELS, "Network over the embeddings.")
flags.DEFINE_integer("dim", 32, "Columns of an embedding.")
flags.DEFINE_multi_integer("hidden_units", [64, 32], "Width of a hidden layer; once per layer.")
flags.DEFINE_integer("workers", 2, "Worker processes.")
flags.DEFINE_integer("ps", 2, "Parameter server processes.")
flags.DEFINE_float(
    "staleness",
    None,
    "What a worker's cached row may miss or hold back, in updates (with --clock=drift a length);"
    " -1: anything; default: CacheConfig's own bounds.",
)
flags.DEFINE_integer(
    "capacity", None, "Rows a worker caches, in each of the two tables; default: CacheConfig's own."
)
flags.DEFINE_enum("policy", "lfu", ["lfu", "lru"], "Which rows leave a full cache.")
flags.DEFINE_enum("clock", "count", ["count", "lamport", "drift"], "How staleness is counted.")
flags.DEFINE_enum(
    "schedule",
    None,
    ["herald", "fae"],
    "Which worker trains which rating, and when (het_tf.data); default: ratings at random.",
)
flags.DEFINE_integer("hot_rows", 500, "Rows that --schedule=fae takes for hot.")
flags.DEFINE_integer("epochs", 4, "Passes over the ratings.")
flags.DEFINE_integer("evaluations", 2, "Evaluations per pass: points of the curve.")
flags.DEFINE_integer("batch_size", 256, "Ratings per step and worker.")
flags.DEFINE_integer("steps_per_execution", 8, "Steps a worker does on its own at a time.")
flags.DEFINE_float("learning_rate", 0.1, "Of the embeddings (row-wise Adagrad).")
flags.DEFINE_float("dense_learning_rate", 3e-3, "Of everything else (Adam).")
flags.DEFINE_string("data_dir", None, "What tfds.load takes; default: see het_tf.datasets.")
flags.DEFINE_bool("download", True, "Download MovieLens (5 MB) if it is not there.")
flags.DEFINE_string(
    "output_dir", None, "For the curve and the SavedModel; default: a new folder, which is printed."
)


def ids_of(features: dict[str, tf.Tensor], label: tf.Tensor) -> list[tf.Tensor]:
    """What the model looks up, by column."""
    return list(features.values())


def worker_data_fn(data: movielens.Arrays, schedule: str | None):
    """Returns a function that makes a worker's batches."""
    size = FLAGS.batch_size
    hot = None
    if schedule == "fae":
        ratings = movielens.batches(data, size, shuffle_seed=0)
        hot = het_tf.data.hot_rows(ratings, ids_of, FLAGS.hot_rows)
        print(f"Hot rows: {hot.accesses:.0%} of the ids, {hot.examples:.0%} of the ratings.")

    def worker_data(context: tf.distribute.InputContext) -> tf.data.Dataset:
        if schedule == "herald":  # every worker plans with the same ratings in the same order
            every = movielens.batches(data, size, shuffle_seed=0)
            return het_tf.data.location_aware(every, ids_of, context, batch_size=size)
        worker = context.input_pipeline_id
        part = worker, context.num_input_pipelines
        mine = movielens.batches(data, size, shuffle_seed=worker, part=part)
        if hot is None:
            return mine
        return het_tf.data.hot_batches(mine, ids_of, hot, batch_size=size)

    return worker_data


def train(strategy, name, cache, train_data, test_data, columns):
    """Trains one model; returns (model, report.Run). cache: het_tf.CacheConfig or None."""
    keras.utils.set_random_seed(1)
    embeddings = []

    def embedding(table: str, dim: int) -> het_tf.layers.HetEmbedding:
        layer = het_tf.layers.HetEmbedding(
            dim,
            optimizer=het_tf.optimizers.RowWiseAdagrad(FLAGS.learning_rate),
            embeddings_initializer="uniform",
            seed=1,
            cache=cache,
            name=table,
        )
        embeddings.append(layer)
        return layer

    with strategy.scope():
        model = build_model(
            embedding,
            columns,
            dim=FLAGS.dim,
            hidden_units=FLAGS.hidden_units,
            model_class=het_tf.keras.Model,
            kind=FLAGS.model,
        )
        model.compile(
            optimizer=keras.optimizers.Adam(FLAGS.dense_learning_rate),
            loss="binary_crossentropy",
            metrics=[keras.metrics.AUC(name="auc")],
            steps_per_execution=FLAGS.steps_per_execution,
        )

    def cache_stats() -> report.Stats:
        each = [layer.cache_stats() for layer in embeddings]
        return {counter: sum(stats[counter] for stats in each) for counter in each[0]}

    # One epoch of `fit` is what lies between two evaluations.
    steps = len(train_data[1]) // FLAGS.batch_size // FLAGS.evaluations
    run = report.Run(name)
    model.fit(
        worker_data_fn(train_data, FLAGS.schedule if cache else None),
        epochs=FLAGS.epochs * FLAGS.evaluations,
        steps_per_epoch=steps,
        validation_data=movielens.batches(test_data, 2048),
        callbacks=[report.Meter(run, steps * FLAGS.batch_size, cache_stats)],
        verbose=2,
    )
    return model, run


def ask(saved_model: pathlib.Path, rows: movielens.Arrays) -> None:
    """Asks the exported model about the first rating, in a process that has TensorFlow alone."""
    features, label = rows
    query = {name: ids[0].tolist() for name, ids in features.items()}
    serve = pathlib.Path(__file__).with_name("serve.py")
    command = [sys.executable, str(serve), str(saved_model), json.dumps(query)]
    served = subprocess.run(command, capture_output=True, text=True)
    if served.returncode:
        raise RuntimeError(f"{serve} failed:\n{served.stderr}")
    answer = json.loads(served.stdout)
    liked = "did" if label[0] else "did not"
    print(
        f"Asked stock TensorFlow from {saved_model}: does user {query['user']} like movie "
        f"{query['movie']}? {answer['click']:.1%} likely. (In the test ratings the user {liked}.)"
    )


def cache_config() -> het_tf.CacheConfig:
    bound = {}
    if FLAGS.staleness is not None:
        in_updates = FLAGS.clock != "drift" and FLAGS.staleness.is_integer()
        staleness = int(FLAGS.staleness) if in_updates else FLAGS.staleness
        bound = {"staleness": None if FLAGS.staleness < 0 else staleness}
    return het_tf.CacheConfig(
        capacity=FLAGS.capacity, policy=FLAGS.policy, clock=FLAGS.clock, **bound
    )


def bound_of(cache: het_tf.CacheConfig) -> str:
    if cache.total_staleness is not None:
        return f"total staleness {cache.total_staleness:g}"
    return "unbounded staleness" if cache.read_bound is None else f"staleness {cache.read_bound:g}"


def main(_) -> None:
    start = time.perf_counter()
    logging.set_verbosity(logging.WARNING)
    tf.get_logger().setLevel("ERROR")
    train_data, test_data, info = movielens.load_arrays(FLAGS.data_dir, FLAGS.download)
    print(f"Ratings: {info.source}, {info.reason}; {info.num_train:,} to train on.")
    cache = cache_config()
    output = pathlib.Path(FLAGS.output_dir or tempfile.mkdtemp(prefix="het_tf_ctr_"))
    output.mkdir(parents=True, exist_ok=True)

    with het_tf.distribute.LocalCluster(num_workers=FLAGS.workers, num_ps=FLAGS.ps) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        runs = []
        for name, config in (("no cache", None), ("HET cache", cache)):
            print(f"\nTraining with {name}", flush=True)
            model, run = train(strategy, name, config, train_data, test_data, info.columns)
            runs.append(run)

        heading = f"{FLAGS.workers} workers, {FLAGS.ps} parameter servers, {bound_of(cache)}"
        print(f"\n{FLAGS.model} on {info.source} ratings, {heading}\n")
        print(report.table(*runs), end="\n\n")
        print(report.on_a_network(*runs, FLAGS.workers), end="\n\n")
        report.plot(runs, output / "curve.png", heading)
        print(f"Curves: {output / 'curve.png'}")
        model.export(output / "saved_model", verbose=False)
    ask(output / "saved_model", test_data)
    print(f"All this took {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    app.run(main)
