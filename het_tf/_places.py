"""Where a cache keeps its rows: in the memory of its task's GPU, or in the host's."""

from __future__ import annotations

from collections.abc import Sequence

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


def devices_beside(host: str, kind: str) -> list[str]:
    """The devices that can keep rows for a task, each in a store of its own.

    Args:
      host: the task's CPU device.
      kind: "GPU"; or "CPU", which takes a GPU's place in builds without CUDA.

    Returns:
      Their names, at least one.

    Raises:
      ValueError: there is none; says why.
    """
    cuda = ops.build()["cuda"]
    if kind == "CPU":
        if cuda is not None:
            raise ValueError(f"the het_tf ops are built with CUDA {cuda}, for GPUs alone")
        return [host]
    if cuda is None:
        raise ValueError(
            "the het_tf ops are built without CUDA; where there is an nvcc, HET_TF_CUDA=1 builds"
            " them with it"
        )
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    found = [name for name in names if task_of(name) in (task_of(host), (None, None))]
    if not found:
        raise ValueError(f"TensorFlow sees no GPU beside {host}")
    return found


def device_here(devices: Sequence[str]) -> str:
    """That of the devices under which this is called eagerly, or the first."""
    if len(devices) == 1:
        return devices[0]
    here = tf.DeviceSpec.from_string(tf.zeros([]).device)
    for device in devices:
        spec = tf.DeviceSpec.from_string(device)
        if (spec.device_type, spec.device_index) == (here.device_type, here.device_index):
            return device
    return devices[0]
