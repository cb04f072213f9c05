"""Compares training with and without the cache: the model of train.py on MovieLens 100K.

Trains on a local cluster, with no cache and with the HET cache on every worker, and prints a table
and a picture. Then exports the cached model and asks it a question.

    python examples/ctr/demo.py               # 2 workers, 2 parameter servers
    python examples/ctr/demo.py --workers=4 --staleness=10 --capacity=500 --policy=lru
    python examples/ctr/demo.py --model=dcn --schedule=herald
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

import compiled
import data
import keras
import report
import tensorflow as tf
from absl import app, flags, logging

import het_tf
from het_tf.datasets import movielens

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(compiled)  # --help lists them, too.
flags.DEFINE_integer(
    "staleness",
    None,
    "Updates that a cached row may miss or hold back; -1: any; default: CacheConfig's own.",
)
flags.DEFINE_integer("capacity", None, "Rows of each cache; default: CacheConfig's.", lower_bound=1)
flags.DEFINE_enum("policy", "lfu", ["lfu", "lru"], "Which rows leave a full cache.")
flags.DEFINE_enum(
    "schedule", None, ["herald", "fae"], "Order of the ratings (het_tf.data); default: random."
)
flags.DEFINE_integer("hot_rows", 500, "Rows that --schedule=fae takes for hot.", lower_bound=1)
flags.DEFINE_integer("epochs", 4, "Passes over the ratings.", lower_bound=1)
flags.DEFINE_integer("evaluations", 2, "Evaluations per pass: points of the curve.", lower_bound=1)
flags.DEFINE_string("data_dir", None, "What tfds.load takes; default: see het_tf.datasets.")
flags.DEFINE_bool("download", True, "Download MovieLens (5 MB) if it is not there.")
flags.DEFINE_string(
    "output_dir",
    None,
    "For the curve, its figures and the SavedModel; default: a new folder, which is printed.",
)


def train(strategy, name, cache, clicks: data.Clicks, examples: int):
    """Trains one model; returns (model, report.Run). cache: het_tf.CacheConfig or None."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = compiled.compiled_model(clicks, cache)
    embeddings = [x for x in model.layers if isinstance(x, het_tf.layers.HetEmbedding)]

    def cache_stats() -> report.Stats:
        each = [layer.cache_stats() for layer in embeddings]
        return {counter: sum(stats[counter] for stats in each) for counter in each[0]}

    # One epoch of `fit` is what lies between two evaluations.
    steps = examples // FLAGS.batch_size // FLAGS.evaluations
    run = report.Run(name)
    model.fit(
        clicks.train,
        epochs=FLAGS.epochs * FLAGS.evaluations,
        steps_per_epoch=steps,
        validation_data=clicks.test,
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
        bound = {"staleness": FLAGS.staleness if FLAGS.staleness >= 0 else None}
    return het_tf.CacheConfig(capacity=FLAGS.capacity, policy=FLAGS.policy, **bound)


def bound_of(cache: het_tf.CacheConfig) -> str:
    if cache.total_staleness is not None:
        return f"total staleness {cache.total_staleness:g}"
    return "unbounded staleness" if cache.read_bound is None else f"staleness {cache.read_bound:g}"


def main(_) -> None:
    start = time.perf_counter()
    logging.set_verbosity(logging.WARNING)
    tf.get_logger().setLevel("ERROR")
    ratings, test_ratings, info = movielens.load_arrays(FLAGS.data_dir, FLAGS.download)
    size = FLAGS.batch_size
    clicks = data.ratings(ratings, test_ratings, info.columns, size)
    print(f"Ratings: {info.source}, {info.reason}; {info.num_train:,} to train on.")
    cache = cache_config()
    output = pathlib.Path(FLAGS.output_dir or tempfile.mkdtemp(prefix="het_tf_ctr_"))
    output.mkdir(parents=True, exist_ok=True)

    with het_tf.distribute.LocalCluster(num_workers=FLAGS.workers, num_ps=FLAGS.ps) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        runs = []
        for name, config in (("no cache", None), ("HET cache", cache)):
            print(f"\nTraining with {name}", flush=True)
            if config and FLAGS.schedule:
                clicks = data.planned(
                    clicks, ratings, FLAGS.schedule, size, cache.capacity, FLAGS.hot_rows
                )
            model, run = train(strategy, name, config, clicks, info.num_train)
            runs.append(run)

        heading = f"{FLAGS.workers} workers, {FLAGS.ps} parameter servers, {bound_of(cache)}"
        print(f"\n{FLAGS.model} on {info.source} ratings, {heading}\n")
        print(report.table(*runs), end="\n\n")
        print(report.on_a_network(*runs, FLAGS.workers), end="\n\n")
        report.save(runs, output / "runs.json")
        report.plot(runs, output / "curve.png", heading)
        print(f"Curves: {output / 'curve.png'}")
        model.export(output / "saved_model", verbose=False)
    ask(output / "saved_model", test_ratings)
    print(f"All this took {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    app.run(main)
