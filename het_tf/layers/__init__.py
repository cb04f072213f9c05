"""Keras layers."""

from het_tf.layers.collection import FeatureConfig, HetEmbeddingCollection, TableConfig
from het_tf.layers.embedding import HetEmbedding

# The name that keras-rs has for it (docs/keras_rs.md).
DistributedEmbedding = HetEmbeddingCollection

__all__ = [
    "DistributedEmbedding",
    "FeatureConfig",
    "HetEmbedding",
    "HetEmbeddingCollection",
    "TableConfig",
]
