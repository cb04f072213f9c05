"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before TensorFlow is imported: tests run on the CPU, however many GPUs there are.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

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
def strategy(
    cluster: het_tf.distribute.LocalCluster,
) -> het_tf.distribute.HetParameterServerStrategy:
    """The strategy on `cluster`. Variables made before it was first asked for are lost."""
    made = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
    _kept_alive.extend([made, made.coordinator])
    return made
