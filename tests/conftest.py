"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import random

import pytest

# Before TensorFlow is imported: tests run on the CPU, however many GPUs there are. Those that need
# a GPU run with CUDA_VISIBLE_DEVICES=0.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# The workers of a cluster use the same GPU, and TensorFlow would take all of its memory.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
# For each node of a graph, a pass of oneDNN's goes through all kernels that there are: a sixth of
# what tests take. Servers and programs have it, too; README's and the pages' do without.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import made_before
import tensorflow as tf

import het_tf

# Every traced function is many thousands of objects. Looking for garbage after each 700, as Python
# does, is a tenth of what tests take.
gc.set_threshold(10_000)

# TensorFlow's coordinator raises in its destructor if a closure ever failed. Where that happens to
# hit while pytest works on its summary, pytest ends with a SystemError. So it is kept alive.
_kept_alive: list[object] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that share `cluster` come last: what a process runs beside a cluster is slower."""
    sharing = {item.path for item in items if "cluster" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path in sharing)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keras draws its seeds from here: every run of a test begins with the same weights."""
    random.seed(item.nodeid)


@pytest.fixture(params=["CPU", "GPU"])
def rows_kind(request: pytest.FixtureRequest) -> str:
    """The kind of device that keeps the rows of a device cache; its /device:<kind>:0 is there."""
    cuda = het_tf.ops.build()["cuda"]
    if request.param == "CPU" and cuda is not None:
        pytest.skip(f"the ops are built with CUDA {cuda}: the host takes no GPU's place")
    if request.param == "GPU" and cuda is None:
        pytest.skip("the ops are built without CUDA")
    if request.param == "GPU" and not tf.config.list_logical_devices("GPU"):
        pytest.skip("TensorFlow sees no GPU: CUDA_VISIBLE_DEVICES=0 shows it one, if it is there")
    return request.param


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> het_tf.distribute.LocalCluster:
    """Three workers and two parameter servers, shared: do not kill any of them."""
    log_dir = tmp_path_factory.mktemp("cluster")
    running = het_tf.distribute.LocalCluster(num_workers=3, num_ps=2, log_dir=log_dir)
    running.start()
    # Never closed: to take leave of servers takes TensorFlow a minute or two after so many
    # functions. They end with this process.
    _kept_alive.append(running)
    return running


@pytest.fixture(scope="session")
def made_before_strategy() -> made_before.MadeBefore:
    """Datasets, tables and layers that were there before `strategy`."""
    return made_before.MadeBefore()


@pytest.fixture(scope="session")
def strategy(
    cluster: het_tf.distribute.LocalCluster, made_before_strategy: made_before.MadeBefore
) -> het_tf.distribute.HetParameterServerStrategy:
    """The strategy on `cluster`."""
    made = het_tf.distribute.HetParameterServerStrategy(cluster.resolver, dense_staleness=None)
    _kept_alive.extend([made, made.coordinator])
    return made
