"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before TensorFlow is imported: tests run on the CPU, however many GPUs there are.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import made_before

import het_tf

# TensorFlow's coordinator raises in its destructor if a closure ever failed. Where that happens to
# hit while pytest works on its summary, pytest ends with a SystemError. So it is kept alive.
_kept_alive: list[object] = []


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[het_tf.distribute.LocalCluster]:
    """Three workers and two parameter servers, shared: do not kill any of them."""
    log_dir = tmp_path_factory.mktemp("cluster")
    with het_tf.distribute.LocalCluster(num_workers=3, num_ps=2, log_dir=log_dir) as running:
        yield running


@pytest.fixture(scope="session")
def made_before_strategy() -> made_before.MadeBefore:
    """Datasets, tables and layers that were there before `strategy`."""
    return made_before.MadeBefore()


@pytest.fixture(scope="session")
def strategy(
    cluster: het_tf.distribute.LocalCluster, made_before_strategy: made_before.MadeBefore
) -> het_tf.distribute.HetParameterServerStrategy:
    """The strategy on `cluster`."""
    made = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
    _kept_alive.extend([made, made.coordinator])
    return made
