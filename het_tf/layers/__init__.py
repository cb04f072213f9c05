"""Keras layers."""

from het_tf.layers.embedding import HetEmbedding

__all__ = ["HetEmbedding"]
