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
from het_tf._threads import call_in_daemon
from het_tf.distribute import health
from het_tf.distribute.tf_config import TaskConfig

_PROBE_TIMEOUT = 5.0  # seconds


def flush_caches(target: str, task: TaskConfig, timeout: float) -> tuple[int, int]:
    """Sends every update that the caches of this process have not sent, and lets them make no more.

    A step that is under way fails with `tf.errors.CancelledError` at its next lookup or update, and
    the training program runs it again on another worker.

    Args:
      target: of this process's server.
      task: this process's.
      timeout: seconds that one step of it may take.

    Returns:
      The number of shards, over all caches with something to send, that were reached, and of those
      whose parameter server is down or has lost them.

    Raises:
      tf.errors.OpError: a parameter server failed meanwhile.
    """
    here = f"/job:{task.task_type}/task:{task.task_index}"
    addresses = task.cluster["ps"]
    probes = [call_in_daemon(health.probe, address, _PROBE_TIMEOUT) for address in addresses]
    up = [
        f"/job:ps/task:{i}"
        for i, probe in enumerate(probes)
        if probe.result() is health.TaskState.UP
    ]
    config = tf.compat.v1.ConfigProto(
        # Without these the session would wait for all tasks of the cluster.
        device_filters=[*up, here],
        operation_timeout_in_ms=int(1000 * timeout),
    )

    def run(build: Callable[[], Any]) -> Any:
        with tf.Graph().as_default() as graph, tf.device(f"{here}/device:CPU:0"):
            fetches = build()
        with tf.compat.v1.Session(target, graph=graph, config=config) as session:
            return session.run(fetches)

    caches = collections.defaultdict(list)
    for cache, incarnation in run(lambda: ops.process_caches(freeze=True)).tolist():
        caches[cache].append(incarnation)
    if not caches:
        run(lambda: _note_ended(up))
        return 0, 0
    devices = run(lambda: _tables(up))
    homes = {i: device for device, found in devices.items() for i in found.tolist()}
    run(lambda: [_push(cache, shards, homes) for cache, shards in caches.items()])
    shards = [incarnation for shards in caches.values() for incarnation in shards if incarnation]
    reached = sum(incarnation in homes for incarnation in shards)
    if reached == len(shards):
        run(lambda: _note_ended(up))
    return reached, len(shards) - reached


def _note_ended(devices: list[str]) -> list[tf.Operation]:
    """Ops that tell parameter servers, for whoever asks, that nothing was lost with the caches."""
    caches = tf.unique(ops.process_caches(all=True)[:, 0]).y
    notes = []
    for device in devices:
        with tf.device(f"{device}/device:CPU:0"):
            notes.append(ops.process_note_ended(caches))
    return notes


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
