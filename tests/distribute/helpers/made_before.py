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
    """Objects that a user makes before the strategy.

    Attributes:
      datasets: of eight batches `(id, id)`, the ids 0 to 31 once each.
      variable: 1.0.
      lookup: a layer with a lookup table.
      words: a dataset that uses the layer.
    """

    def __init__(self):
        plain = tf.data.Dataset.from_tensor_slices((_IDS, _IDS)).batch(4)
        self.lookup = keras.layers.StringLookup(vocabulary=WORDS)
        self.variable = tf.Variable(1.0)
        self.datasets = {
            "plain": plain,
            "shuffled": plain.unbatch().shuffle(32).batch(4).prefetch(2),
            "mapped": plain.map(lambda x, y: (x + self.variable - 1.0, y)),
            "generator": tf.data.Dataset.from_generator(
                _generate, output_signature=plain.element_spec
            ),
        }
        words = tf.data.Dataset.from_tensor_slices(np.array(WORDS)[:, None])
        self.words = words.batch(2).map(lambda x: (self.lookup(x), tf.zeros([2, 1])))
