"""Where a cache keeps its rows: in the memory of its task's GPU, or in the host's."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from absl import logging

from het_tf import ops
from het_tf._visits import cluster_devices
from het_tf.cache_config import CacheConfig


def task_of(device: str) -> tuple[str | None, int | None]:
    """Job and task of a device, by its name; of one of this process alone they may be None."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.job, spec.task


def host_here() -> str:
    """The CPU device of the task under which this is called eagerly."""
    with tf.device("/device:CPU:0"):
        return ops.shard_of(tf.zeros([0], tf.int64), num_shards=1).device


def device_beside(host: str, kind: str) -> str:
    """The device that keeps rows for a task: the first of its kind, since a task has one cache.

    Args:
      host: the task's CPU device.
      kind: "GPU"; or "CPU", which takes a GPU's place in builds without CUDA.

    Returns:
      Its name.

    Raises:
      ValueError: there is none; says why.
    """
    cuda = ops.build()["cuda"]
    if kind == "CPU":
        if cuda is not None:
            raise ValueError(f"the het_tf ops are built with CUDA {cuda}, for GPUs alone")
        return host
    if cuda is None:
        raise ValueError(
            "the het_tf ops are built without CUDA; where there is an nvcc, HET_TF_CUDA=1 builds"
            " them with it"
        )
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    found = [name for name in names if task_of(name) in (task_of(host), (None, None))]
    if not found:
        raise ValueError(f"TensorFlow sees no GPU beside {host}")
    return found[0]


def devices_of_rows(name: str, config: CacheConfig | None, is_local: bool) -> dict[Any, str]:
    """By task (`task_of`), the device that keeps the rows of a cache; empty: hosts do.

    Args:
      name: of the cache, for the log.
      config: of the cache.
      is_local: whether the table is in this process.

    Raises:
      ValueError: a task has no such device, nor a capacity to keep rows on its host.
    """
    if config is None or config.device_capacity is None:
        return {}
    devices = {}
    with tf.init_scope():
        hosts = [host_here()] if is_local else cluster_devices("worker")
    for host in hosts:
        try:
            devices[task_of(host)] = device_beside(host, config.device)
        except ValueError as error:
            if config.capacity is None:
                raise ValueError(
                    f"device_capacity = {config.device_capacity!r}: {error}. With a"
                    " capacity beside it, rows are kept on the host then"
                ) from error
            logging.info("rows of %s are on the host %s: %s", name, host, error)
    return devices
