"""Wide & deep (Cheng et al., arXiv 1606.07792) over int64 ids, for any kind of embedding layer."""

from collections.abc import Callable, Sequence

import keras
from keras import ops

from het_tf.datasets.movielens import Column

# (name, dim) -> a layer that turns int64 keys [batch, k] into vectors [batch, k, dim].
EmbeddingFactory = Callable[[str, int], Callable[[keras.KerasTensor], keras.KerasTensor]]

# Pairs of columns whose every combination has a weight of its own in the wide part.
CROSSES = (("age", "movie"), ("gender", "movie"), ("occupation", "movie"))


def build_model(
    embedding: EmbeddingFactory,
    columns: Sequence[Column],
    dim: int = 32,
    hidden_units: Sequence[int] = (64, 32),
    dropout: float = 0.2,
    crosses: Sequence[tuple[str, str]] = CROSSES,
    model_class: type[keras.Model] = keras.Model,
) -> keras.Model:
    """Returns a model from {column: int64 ids} to the probability of a click, float32 [batch].

    All columns share two tables, "deep" with `dim` columns and "wide" with one, so that a batch
    takes one lookup in each. Ids of different columns overlap; `_key` keeps them apart.
    """
    inputs = {
        column.name: keras.Input(
            (column.length,) if column.length else (), name=column.name, dtype="int64"
        )
        for column in columns
    }
    keys, shares = [], []
    for number, column in enumerate(columns):
        ids = inputs[column.name]
        ids = ids if column.length else ops.expand_dims(ids, 1)
        keys.append(_key(number, ids))
        shares.append(_shares(ids))
    crossed = [
        ops.expand_dims(_key(len(columns) + number, _pair(inputs[left], inputs[right])), 1)
        for number, (left, right) in enumerate(crosses)
    ]

    vectors = embedding("deep", dim)(ops.concatenate(keys, axis=1))  # [batch, ids, dim]
    vectors = vectors * ops.expand_dims(ops.concatenate(shares, axis=1), 2)
    ends = [sum(each.shape[1] for each in keys[: n + 1]) for n in range(len(keys) - 1)]
    deep = [ops.sum(part, axis=1) for part in ops.split(vectors, ends, axis=1)]
    deep = keras.layers.Concatenate()(deep)
    for units in hidden_units:
        deep = keras.layers.Dense(units, activation="relu")(deep)
        deep = keras.layers.Dropout(dropout)(deep)

    weights = embedding("wide", 1)(ops.concatenate(keys + crossed, axis=1))  # [batch, ids, 1]
    shares += [ops.ones_like(each, dtype="float32") for each in crossed]
    wide = ops.sum(weights[:, :, 0] * ops.concatenate(shares, axis=1), axis=1, keepdims=True)

    logit = keras.layers.Dense(1)(deep) + wide
    return model_class(inputs, ops.sigmoid(logit[:, 0]), name="wide_and_deep")


def _key(column_number: int, ids: keras.KerasTensor) -> keras.KerasTensor:
    """One key space for all columns: 2**40 ids each. Exact, since keys stay int64 all the way."""
    return ids + column_number * 2**40


def _pair(left: keras.KerasTensor, right: keras.KerasTensor) -> keras.KerasTensor:
    return left * 2**20 + right


def _shares(ids: keras.KerasTensor) -> keras.KerasTensor:
    """Weights float32 [batch, k] that average over the ids that are not padding (negative)."""
    present = ops.cast(ids >= 0, "float32")
    return present / ops.maximum(ops.sum(present, axis=1, keepdims=True), 1.0)
