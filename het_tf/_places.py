"""Where a cache keeps its rows: in the memory of its task's GPU, or in the host's."""

from __future__ import annotations

import tensorflow as tf

from het_tf import ops


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
