"""GPUs of a host, shared among its tasks: one for each worker, which has one cache."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from het_tf.distribute.tf_config import TaskConfig


def gpu_of(task: TaskConfig, num_gpus: int) -> int | None:
    """Which GPU a worker task uses.

    The workers of a host take its GPUs in turn, in the order of the cluster's addresses.

    Args:
      task: a worker.
      num_gpus: how many its process sees: all of the host, or those of CUDA_VISIBLE_DEVICES.

    Returns:
      From 0 to num_gpus - 1; None where there is none.
    """
    return task.rank_on_host % num_gpus if num_gpus else None


def show_one(task: TaskConfig, config: tf.compat.v1.ConfigProto) -> str:
    """Has the server of a worker see the GPU of `gpu_of`, and no other.

    Args:
      task: the worker.
      config: of its server, which is changed.

    Returns:
      Which it is, for a message; empty where there is none.
    """
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    gpu = gpu_of(task, num_gpus)
    if gpu is None:
        return ""
    config.gpu_options.visible_device_list = str(gpu)
    # Several workers may have one GPU, and a coordinator beside them.
    config.gpu_options.allow_growth = True
    unused = num_gpus - task.num_tasks_on_host
    rest = f"; no worker uses {unused} of them: list as many workers of this host"
    return f"GPU {gpu} of {num_gpus}{rest if unused > 0 else ''}"


def leave_memory_to_workers() -> None:
    """Has this process take memory of GPUs as it needs it: workers may share them."""
    # Where TensorFlow has begun to use them, or memory was set otherwise, that is left as it is.
    with contextlib.suppress(RuntimeError, ValueError):
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
