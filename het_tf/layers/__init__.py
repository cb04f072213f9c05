"""Keras layers."""

from het_tf.layers.collection import FeatureConfig, HetEmbeddingCollection, TableConfig
from het_tf.layers.embedding import EmbedReduce, HetEmbedding

# The name that keras-rs has for it (docs/keras_rs.md).
DistributedEmbedding = HetEmbeddingCollection

__all__ = [
    "DistributedEmbedding",
    "EmbedReduce",
    "FeatureConfig",
    "HetEmbedding",
    "HetEmbeddingCollection",
    "TableConfig",
]
