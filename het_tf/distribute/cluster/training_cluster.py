"""The cluster of a training program: that of TF_CONFIG, or server processes on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import tensorflow as tf

from het_tf.distribute.cluster.local_cluster import LocalCluster
from het_tf.distribute.cluster.tf_config import read_chief_config


@dataclasses.dataclass(frozen=True)
class ConfiguredCluster:
    """The cluster that TF_CONFIG names, whose servers are started elsewhere.

    Attributes:
      resolver: the cluster resolver for `HetParameterServerStrategy`.
    """

    resolver: tf.distribute.cluster_resolver.ClusterResolver


@contextlib.contextmanager
def open_cluster(
    num_workers: int = 2, num_ps: int = 2
) -> Iterator[LocalCluster | ConfiguredCluster]:
    """Opens the cluster that TF_CONFIG names, or starts a `LocalCluster` if TF_CONFIG is not set.

    The same program then runs on one machine and, as the chief, on a cluster of hosts:

        with het_tf.distribute.open_cluster(num_workers=2, num_ps=2) as cluster:
            strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)

    The servers of TF_CONFIG keep running at the end of the `with` block. Those of a `LocalCluster`
    end there.

    Args:
      num_workers: number of worker processes of the `LocalCluster`, at least 1. Not used with
        TF_CONFIG, which lists the workers.
      num_ps: number of parameter server processes of the `LocalCluster`, at least 1. Not used with
        TF_CONFIG.

    Yields:
      An object with the attribute `resolver`, the cluster resolver for
      `HetParameterServerStrategy`. Without TF_CONFIG, it is a `LocalCluster`.

    Raises:
      ValueError: a part of TF_CONFIG is malformed, or it names another task than the chief; or
        fewer than one worker or ps.
      RuntimeError: a server of the `LocalCluster` died or did not listen in time.
    """
    if os.environ.get("TF_CONFIG", "").strip():
        read_chief_config()
        yield ConfiguredCluster(tf.distribute.cluster_resolver.TFConfigClusterResolver())
        return
    with LocalCluster(num_workers, num_ps) as cluster:
        yield cluster
