"""Handles of the caches of a table: on each task, and for graphs that run on any worker."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from het_tf import ops
from het_tf._places import host_here, task_of
from het_tf._visits import COORDINATOR, cache_devices, cluster_devices, visit
from het_tf.cache_config import CacheConfig

# Attribute of a cache that has as many rows on its device as memory allows.
_AUTO = -1


class Handles:
    """Makes handles of the caches under one name. It knows nothing of the object that has it."""

    def __init__(
        self,
        attributes: dict[str, Any],
        on_coordinator: dict[str, Any],
        devices: dict[Any, str],
        config: CacheConfig | None,
        is_local: bool,
    ):
        """Makes nothing yet.

        Args:
          attributes: of `ops.cache_handle` on a worker.
          on_coordinator: the same there; its caches get another name.
          devices: by task (`task_of`), that which keeps its rows.
          config: of the cache.
          is_local: whether the table is in this process: what leaves a device is there anyway.
        """
        self.on_host = attributes
        self.on_coordinator = on_coordinator | {
            "shared_name": f"{attributes['shared_name']}/coordinator"
        }
        self.devices = devices
        self._is_local = is_local
        if devices:
            rows = config.device_capacity
            self._on_device = attributes | {"device_capacity": _AUTO if rows == "auto" else rows}
            if is_local:
                self._on_device["capacity"] = 0
            self._kind = config.device

    def make(self) -> tf.Tensor:
        """A handle of the cache of the task under whose device this is called, eagerly."""
        if self.devices:
            task = task_of(host_here())
            if task in self.devices:
                with tf.device(self.devices[task]):
                    return ops.cache_handle(**self._on_device)
            return _on_host(self.on_coordinator if task[0] == COORDINATOR else self.on_host)
        handle = _on_host(self.on_host)
        if task_of(handle.device)[0] != COORDINATOR:
            return handle
        # The device is not known before, so an empty cache that is never used is there too.
        return _on_host(self.on_coordinator)

    def on_every_worker_op(self) -> tf.Tensor | None:
        """A handle in a graph that any worker may run; None if they keep their rows apart."""
        if not self.devices:
            return _on_host(self.on_host)
        if len(self.devices) < len(cluster_devices("worker")):
            return None
        with tf.device(f"/device:{self._kind}:0"):
            return ops.cache_handle(**self._on_device)

    def destroy(self) -> None:
        """Frees the caches on all tasks. A worker that is lost has lost its cache."""

        def destroy() -> None:
            here = [self.make(), *([] if self.devices else [_on_host(self.on_host)])]
            for handle in here:
                tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

        devices = ["/device:CPU:0"] if self._is_local else cache_devices()
        visit(devices, destroy, is_lost=lambda device, error: True)


def _on_host(attributes: dict[str, Any]) -> tf.Tensor:
    # The handle op runs on GPUs, too, in a build with CUDA.
    with tf.device("/device:CPU:0"):
        return ops.cache_handle(**attributes)
