"""The compiled model of train.py and demo.py, and its flags."""

import keras
from absl import flags
from data import Clicks
from model import MODELS, build_model

import het_tf

FLAGS = flags.FLAGS
flags.DEFINE_enum("model", "wide_deep", MODELS, "Network over the embeddings.")
flags.DEFINE_integer("dim", 32, "Columns of an embedding.", lower_bound=1)
flags.DEFINE_multi_integer(
    "hidden_units", [64, 32], "Width of a hidden layer; once per layer.", lower_bound=1
)
flags.DEFINE_integer(
    "min_count", 1, "Updates of an id until it has a row of its own.", lower_bound=1
)
flags.DEFINE_float("learning_rate", 0.1, "Of the embeddings (row-wise Adagrad).")
flags.DEFINE_float("dense_learning_rate", 3e-3, "Of everything else (Adam).")
flags.DEFINE_integer("batch_size", 256, "Examples per step and worker.", lower_bound=1)
flags.DEFINE_integer("workers", 2, "Worker processes.")
flags.DEFINE_integer("ps", 2, "Parameter server processes.")


def compiled_model(clicks: Clicks, cache: het_tf.CacheConfig | str | None = "auto") -> keras.Model:
    """Returns a model to train. To be called in a strategy's scope."""

    def embedding(table: str, dim: int) -> het_tf.layers.HetEmbedding:
        return het_tf.layers.HetEmbedding(
            dim,
            optimizer=het_tf.optimizers.RowWiseAdagrad(FLAGS.learning_rate),
            admission=het_tf.Admission(FLAGS.min_count) if FLAGS.min_count > 1 else None,
            cache=cache,
            name=table,
        )

    model = build_model(
        embedding,
        clicks.columns,
        dim=FLAGS.dim,
        hidden_units=FLAGS.hidden_units,
        crosses=clicks.crosses,
        model_class=het_tf.keras.Model,
        kind=FLAGS.model,
        integers=clicks.integers,
    )
    model.compile(
        keras.optimizers.Adam(FLAGS.dense_learning_rate),
        "binary_crossentropy",
        metrics=[
            keras.metrics.AUC(2000, name="auc"),
            keras.metrics.BinaryCrossentropy(name="log_loss"),
            het_tf.keras.metrics.NormalizedEntropy(),
            het_tf.keras.metrics.Calibration(),
        ],
    )
    return model
