"""Clusters, and the strategy that trains on them."""

from het_tf.distribute.cluster.local_cluster import LocalCluster
from het_tf.distribute.cluster.training_cluster import open_cluster
from het_tf.distribute.strategy import HetParameterServerStrategy
from het_tf.distribute.worker_state import CacheReport

__all__ = ["CacheReport", "HetParameterServerStrategy", "LocalCluster", "open_cluster"]
