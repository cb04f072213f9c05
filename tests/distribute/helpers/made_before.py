"""What a user makes before the strategy, as `conftest.strategy` does: datasets, tables, layers."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

WORDS = ["ant", "bee", "cat", "dog"]
_IDS = np.arange(32, dtype=np.float32).reshape(-1, 1)


def _generate():
    for i in range(8):
        yield _IDS[4 * i : 4 * i + 4], _IDS[4 * i : 4 * i + 4]


class MadeBefore:
    """Datasets of eight batches `(id, id)`, the ids 0 to 31 once each, and a table and layers."""

    def __init__(self):
        words = [f"word {i}" for i in range(32)]
        plain = tf.data.Dataset.from_tensor_slices((_IDS, _IDS)).batch(4)
        of_words = tf.data.Dataset.from_tensor_slices((words, _IDS)).batch(4)
        self.table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(words, _IDS[:, 0]), -1.0
        )
        self.mutable = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, [-1.0])
        self.mutable.insert(words, _IDS)
        self.dense = tf.lookup.experimental.DenseHashTable(
            tf.string, tf.float32, -1.0, empty_key="", deleted_key="$"
        )
        self.dense.insert(words, _IDS[:, 0])
        self.layer = keras.layers.StringLookup(vocabulary=words, num_oov_indices=0)
        self.word_layer = keras.layers.StringLookup(vocabulary=WORDS)
        # What is left of one whose constructor failed.
        self.half_made = tf.lookup.StaticHashTable.__new__(tf.lookup.StaticHashTable)
        self.variable = tf.Variable(1.0)
        self.datasets = {
            "plain": plain,
            "shuffled": plain.unbatch().shuffle(32).batch(4).prefetch(2),
            "mapped": plain.map(lambda x, y: (x + self.variable - 1.0, y)),
            "table": of_words.map(lambda x, y: (self.table.lookup(x)[:, None], y)),
            "mutable table": of_words.map(
                lambda x, y: (tf.ensure_shape(self.mutable.lookup(x), [None, 1]), y)
            ),
            "dense table": of_words.map(
                lambda x, y: (tf.ensure_shape(self.dense.lookup(x)[:, None], [None, 1]), y)
            ),
            "StringLookup": of_words.map(lambda x, y: (tf.cast(self.layer(x), y.dtype), y)),
            "generator": tf.data.Dataset.from_generator(
                _generate, output_signature=plain.element_spec
            ),
        }
