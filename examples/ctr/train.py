"""Click-through prediction on parameter servers: wide & deep, DeepFM, DCN-v2 or DLRM.

    python examples/ctr/train.py                          # generated clicks in Criteo's format
    python examples/ctr/train.py --model=dlrm --format=criteo --data=day_0.gz --test_data=day_1.gz
    python examples/ctr/train.py --format=movielens --epochs=4

The workers read the files while they train. Every category has a row of its own; with --hash_bins,
categories share rows; with --min_count, rare ones have none. Prints AUC, log loss, normalized
entropy and calibration on the test data.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import compiled
import data
import keras
from absl import app, flags

import het_tf
from het_tf.datasets import implicit_movielens, movielens

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(compiled)  # --help lists them, too.
flags.DEFINE_enum(
    "format", "criteo", [*data.FORMATS, "movielens", "movielens_1m"], "Format of the data."
)
flags.DEFINE_list(
    "data",
    [],
    "Files to train on, or the folder of MovieLens; default: generated clicks, or a download.",
)
flags.DEFINE_list("test_data", [], "Files to test with.")
flags.DEFINE_integer(
    "hash_bins", 0, "Rows of a column of categories; 0: one for each.", lower_bound=0
)
flags.DEFINE_integer("epochs", 1, "Passes over the clicks.", lower_bound=1)
flags.DEFINE_string("tensorboard_dir", None, "Folder for TensorBoard.")
flags.DEFINE_string("export_dir", None, "Folder for the SavedModel; default: none.")


def load() -> data.Clicks:
    """The data that the flags name."""
    if FLAGS.format in data.FORMATS:
        if bool(FLAGS.data) != bool(FLAGS.test_data):
            raise ValueError(f"--data={FLAGS.data} and --test_data={FLAGS.test_data}: give both")
        if not FLAGS.data and os.environ.get("TF_CONFIG"):
            raise ValueError("With TF_CONFIG, --data must name files that all workers can read.")
        form = data.FORMATS[FLAGS.format]
        if not FLAGS.data:
            return data.generated(form, FLAGS.batch_size, FLAGS.hash_bins)
        return data.files(form, FLAGS.data, FLAGS.test_data, FLAGS.batch_size, FLAGS.hash_bins)
    if FLAGS.test_data or FLAGS.hash_bins or len(FLAGS.data) > 1:
        raise ValueError(
            f"--format={FLAGS.format} takes one folder as --data and no other flag of the data, not"
            f" --data={FLAGS.data} --test_data={FLAGS.test_data} --hash_bins={FLAGS.hash_bins}"
        )
    folder = FLAGS.data[0] if FLAGS.data else None
    if FLAGS.format == "movielens_1m":
        if folder is None:
            raise ValueError("--format=movielens_1m needs --data")
        return data.ratings(*implicit_movielens.load(folder), FLAGS.batch_size)
    train, test, info = movielens.load_arrays(folder, download=True)
    print(f"Ratings: {info.source}, {info.reason}.")
    return data.ratings(train, test, info.columns, FLAGS.batch_size)


def train(strategy, clicks: data.Clicks) -> keras.Model:
    """Returns a trained model."""
    with strategy.scope():
        model = compiled.compiled_model(clicks)
    callbacks = (
        [keras.callbacks.TensorBoard(FLAGS.tensorboard_dir)] if FLAGS.tensorboard_dir else []
    )
    model.fit(clicks.train, epochs=FLAGS.epochs, callbacks=callbacks, verbose=2)
    return model


def evaluate(model: keras.Model, clicks: data.Clicks) -> dict[str, float]:
    """The model's metrics on the test data."""
    return model.evaluate(clicks.test, verbose=0, return_dict=True)


def main(_) -> None:
    clicks = load()
    with het_tf.distribute.open_cluster(FLAGS.workers, FLAGS.ps) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        model = train(strategy, clicks)
        metrics = evaluate(model, clicks)
        names = ("auc", "log_loss", "normalized_entropy", "calibration")
        print(f"{FLAGS.model}:", ", ".join(f"{name} {metrics[name]:.4f}" for name in names))
        if FLAGS.export_dir:
            model.export(FLAGS.export_dir, verbose=False)


if __name__ == "__main__":
    app.run(main)
