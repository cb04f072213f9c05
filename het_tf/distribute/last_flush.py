"""What a worker does before it ends: it sends the updates that its caches still hold.

The caches were made by the training program, whose context nobody else reaches, and it may be busy
or gone. So the worker finds them by itself (`Het>ProcessCaches`), asks the parameter servers which
shards they hold, and pushes through a session of its own server.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf.distribute import health
from het_tf.distribute.tf_config import TaskConfig


def flush_caches(target: str, task: TaskConfig, timeout: float) -> int:
    """Sends every update that the caches of this process have not sent.

    What a parameter server that is down should get is lost, as its table is.

    Args:
      target: of this process's server.
      task: this process's.
      timeout: seconds that one step of it may take.

    Returns:
      The number of caches that had something to send.

    Raises:
      tf.errors.OpError: a parameter server failed meanwhile.
    """
    here = f"/job:{task.task_type}/task:{task.task_index}/device:CPU:0"
    up = [
        f"/job:ps/task:{i}"
        for i, address in enumerate(task.cluster["ps"])
        if health.probe(address) is health.TaskState.UP
    ]
    config = tf.compat.v1.ConfigProto(
        # Without these the session would wait for all tasks of the cluster.
        device_filters=[*up, f"/job:{task.task_type}/task:{task.task_index}"],
        operation_timeout_in_ms=int(1000 * timeout),
    )

    def run(build: Callable[[], Any]) -> Any:
        with tf.Graph().as_default() as graph, tf.device(here):
            fetches = build()
        with tf.compat.v1.Session(target, graph=graph, config=config) as session:
            return session.run(fetches)

    caches = collections.defaultdict(list)
    for cache, incarnation in run(ops.process_caches).tolist():
        caches[cache].append(incarnation)
    if caches:
        devices = run(lambda: _tables(up))
        homes = {i: device for device, found in devices.items() for i in found.tolist()}
        run(lambda: [_push(cache, shards, homes) for cache, shards in caches.items()])
    return len(caches)


def _tables(devices: list[str]) -> dict[str, tf.Tensor]:
    """The incarnations of the table shards on each device."""
    tables = {}
    for device in devices:
        with tf.device(f"{device}/device:CPU:0"):
            tables[device] = ops.process_tables()
    return tables


def _push(cache: int, incarnations: list[int], homes: dict[int, str]) -> list[tf.Tensor]:
    """Ops that send what a cache holds to those of its shards that have a home."""
    handle = ops.process_cache(np.int64(cache))
    _, requests = ops.cache_flush(handle, num_shards=len(incarnations), all=True)
    return [
        tf.cond(
            tf.size(request) > 0,
            lambda i=incarnation, r=request: _sync(homes[i], i, r),
            lambda: tf.zeros([0], tf.uint8),
        )
        for incarnation, request in zip(incarnations, requests, strict=True)
        if incarnation in homes
    ]


def _sync(device: str, incarnation: int, request: tf.Tensor) -> tf.Tensor:
    with tf.device(f"{device}/device:CPU:0"):
        return ops.table_sync(ops.process_table(np.int64(incarnation)), request)
