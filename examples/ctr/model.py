"""Models of clicks over int64 ids, for any kind of embedding layer.

wide_deep  a network and a weight for each id (Cheng et al., arXiv 1606.07792)
deepfm     the same, and the products of all pairs of vectors (Guo et al., arXiv 1703.04247)
dcn        a network beside layers that multiply by their input (DCN-v2, arXiv 2008.13535)
dlrm       a network over all vectors and the products of all pairs of them (Naumov et al., arXiv
           1906.00091: over the products and the vector of the integers, which takes more steps)
"""

from collections.abc import Callable, Sequence

import keras
from keras import ops

from het_tf.datasets.movielens import Column

# (name, dim) -> a layer that turns int64 keys [batch, k] into vectors [batch, k, dim].
EmbeddingFactory = Callable[[str, int], Callable[[keras.KerasTensor], keras.KerasTensor]]

MODELS = ("wide_deep", "deepfm", "dcn", "dlrm")
_CROSS_LAYERS = 3


def build_model(
    embedding: EmbeddingFactory,
    columns: Sequence[Column],
    dim: int = 32,
    hidden_units: Sequence[int] = (64, 32),
    dropout: float = 0.2,
    crosses: Sequence[tuple[str, str]] = (),
    model_class: type[keras.Model] = keras.Model,
    kind: str = "wide_deep",
    integers: int = 0,
) -> keras.Model:
    """Returns a model from {column: int64 ids} to the probability of a click, float32 [batch].

    All columns share two tables, "deep" with `dim` columns and "wide" with one, so that a batch
    takes one lookup in each. Ids of different columns overlap; `_key` keeps them apart. `crosses`
    have weights in "wide", which the kinds "dcn" and "dlrm" do not have. `kind`: one of MODELS.
    With `integers`, the model also takes so many counts, "integers", which may be NaN.
    """
    if kind not in MODELS:
        raise ValueError(f"kind must be one of {MODELS}, not {kind!r}")
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
    fields = [ops.sum(part, axis=1) for part in ops.split(vectors, ends, axis=1)]

    def network(x: keras.KerasTensor) -> keras.KerasTensor:
        for units in hidden_units:
            x = keras.layers.Dense(units, activation="relu")(x)
            x = keras.layers.Dropout(dropout)(x)
        return x

    if integers:  # One more vector, made of all of them.
        inputs["integers"] = keras.Input((integers,), name="integers")
        counts = ops.log1p(ops.maximum(ops.nan_to_num(inputs["integers"]), 0))
        fields.append(keras.layers.Dense(dim)(network(counts)))
    fields = ops.stack(fields, axis=1)
    flat = keras.layers.Flatten()(fields)

    if kind == "dlrm":
        count = fields.shape[1]
        products = ops.matmul(fields, ops.transpose(fields, (0, 2, 1)))
        pairs = [i * count + j for i in range(count) for j in range(i)]
        products = ops.take(ops.reshape(products, (-1, count**2)), pairs, axis=1)
        last = network(ops.concatenate([flat, products], axis=1))
    elif kind == "dcn":
        crossing = flat
        for _ in range(_CROSS_LAYERS):
            crossing = flat * keras.layers.Dense(flat.shape[1])(crossing) + crossing
        last = ops.concatenate([crossing, network(flat)], axis=1)
    else:
        last = network(flat)
    logit = keras.layers.Dense(1)(last)
    if kind == "deepfm":
        square_of_sum, sum_of_squares = ops.sum(fields, 1) ** 2, ops.sum(fields**2, 1)
        logit = logit + ops.sum(square_of_sum - sum_of_squares, axis=1, keepdims=True) / 2
    if kind in ("wide_deep", "deepfm"):
        weights = embedding("wide", 1)(ops.concatenate(keys + crossed, axis=1))  # [batch, ids, 1]
        shares += [ops.ones_like(each, dtype="float32") for each in crossed]
        weighted = weights[:, :, 0] * ops.concatenate(shares, axis=1)
        logit = logit + ops.sum(weighted, axis=1, keepdims=True)
    return model_class(inputs, ops.sigmoid(logit[:, 0]), name=kind)


def _key(column_number: int, ids: keras.KerasTensor) -> keras.KerasTensor:
    """One key space for all columns: 2**40 ids each. Exact, since keys stay int64 all the way."""
    return ids + column_number * 2**40


def _pair(left: keras.KerasTensor, right: keras.KerasTensor) -> keras.KerasTensor:
    return left * 2**20 + right


def _shares(ids: keras.KerasTensor) -> keras.KerasTensor:
    """Weights float32 [batch, k] that average over the ids that are not padding (negative)."""
    present = ops.cast(ids >= 0, "float32")
    return present / ops.maximum(ops.sum(present, axis=1, keepdims=True), 1.0)
