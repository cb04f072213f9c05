"""Keras layers."""

from het_tf.layers.collection import HetEmbeddingCollection
from het_tf.layers.embedding import EmbedReduce, HetEmbedding
from het_tf.layers.features import FeatureConfig, TableConfig

# The name of the layer in keras-rs (docs/keras_rs.md).
DistributedEmbedding = HetEmbeddingCollection

__all__ = [
    "DistributedEmbedding",
    "EmbedReduce",
    "FeatureConfig",
    "HetEmbedding",
    "HetEmbeddingCollection",
    "TableConfig",
]
