"""Clusters and the strategy that trains on them."""

from het_tf.distribute.cache_reports import CacheReport
from het_tf.distribute.cluster import LocalCluster
from het_tf.distribute.strategy import HetParameterServerStrategy

__all__ = ["CacheReport", "HetParameterServerStrategy", "LocalCluster"]
