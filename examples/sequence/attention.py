"""Self-attention over sequences (SASRec: Kang and McAuley, ICDM 2018)."""

import keras
from keras import layers, ops

PAD = 0  # Items are numbered from 1.


def build_encoder(length: int, dim: int, blocks: int, dropout: float) -> keras.Model:
    """Returns a model from rows [batch, length, dim] and items to states [batch, length, dim].

    A state depends on the items up to its place.
    """
    rows = keras.Input((length, dim))
    items = keras.Input((length,), dtype="int64")
    present = ops.expand_dims(items != PAD, 1)
    places = ops.cumsum(ops.ones_like(items), axis=1) - 1
    x = rows * dim**0.5 + layers.Embedding(length, dim)(places)
    x = layers.Dropout(dropout)(x)
    for _ in range(blocks):
        normal = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(1, dim, dropout=dropout)
        attended = attention(normal, x, attention_mask=present, use_causal_mask=True)
        x = layers.LayerNormalization()(normal + attended)
        hidden = layers.Dropout(dropout)(layers.Dense(dim, activation="relu")(x))
        x = x + layers.Dropout(dropout)(layers.Dense(dim)(hidden))
    return keras.Model([rows, items], layers.LayerNormalization()(x), name="encoder")
