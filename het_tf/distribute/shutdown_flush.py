"""Flush of a worker's caches and replicas before the worker ends.

The training program created the caches and replicas in its own TensorFlow context, which the worker
cannot use. The program may also be busy or gone. The worker therefore finds the caches and replicas
itself (`Het>ProcessCaches`, `Het>ProcessReplicas`), asks the parameter servers for the shards that
they hold, and pushes through a session of its own server.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf.distribute.cluster.tf_config import TaskConfig
from het_tf.distribute.failures.probes import TaskState, probe
from het_tf.runtime.threads import call_in_daemon

_PROBE_TIMEOUT = 5.0  # seconds


def send_all(target: str, task: TaskConfig, timeout: float) -> tuple[int, int]:
    """Pushes all pending updates of this process's caches and replicas, and ends their use.

    A running step fails with `tf.errors.CancelledError` at its next lookup or update, or when the
    next step of its replica begins. The training program runs this step again on another worker.

    Args:
      target: target of this process's server.
      task: task of this process.
      timeout: seconds that each session run may take.

    Returns:
      Two numbers of shards, summed over the caches and replicas with pending updates: the shards
      that were reached, and the shards that were not. A shard is not reached if its parameter
      server is down or has lost the shard. A shard of a replica is not reached either if another
      shard of the replica is not.

    Raises:
      tf.errors.OpError: a parameter server failed during the flush.
    """
    here = f"/job:{task.task_type}/task:{task.task_index}"
    addresses = task.cluster["ps"]
    probes = [call_in_daemon(probe, address, _PROBE_TIMEOUT) for address in addresses]
    up = [f"/job:ps/task:{i}" for i, answer in enumerate(probes) if answer.result() is TaskState.UP]
    config = tf.compat.v1.ConfigProto(
        # Without device filters, the session would wait for all tasks of the cluster.
        device_filters=[*up, here],
        operation_timeout_in_ms=int(1000 * timeout),
    )

    def run(build: Callable[[], Any]) -> Any:
        with tf.Graph().as_default() as graph, tf.device(f"{here}/device:CPU:0"):
            fetches = build()
        with tf.compat.v1.Session(target, graph=graph, config=config) as session:
            return session.run(fetches)

    run(ops.process_ends)
    caches, replicas = run(lambda: (ops.process_caches(), ops.process_replicas()))
    reached = lost = 0
    for holders, shards_of, send in (
        (_by_id(caches), ops.process_tables, _send_cache),
        (_by_id(replicas), ops.process_dense_shards, _send_replica),
    ):
        if not holders:
            continue
        found = run(functools.partial(_on_each, up, shards_of))
        homes = {shard: device for device, shards in found.items() for shard in shards.tolist()}
        for number, shards in holders.items():
            sent = send(run, number, shards, homes)
            reached += sent
            lost += sum(map(bool, shards)) - sent
    if not lost:
        run(lambda: _note_ended(up))
    return reached, lost


Run = Callable[[Callable[[], Any]], Any]


def _by_id(rows: np.ndarray) -> dict[int, list[int]]:
    """Groups rows of (id, incarnation): the incarnations of a holder's shards, by its id."""
    holders = collections.defaultdict(list)
    for number, incarnation in rows.tolist():
        holders[number].append(incarnation)
    return holders


def _on_each(devices: list[str], op: Callable[[], tf.Tensor]) -> dict[str, tf.Tensor]:
    """Runs an op on every device. Returns the outputs by device."""
    outputs = {}
    for device in devices:
        with tf.device(f"{device}/device:CPU:0"):
            outputs[device] = op()
    return outputs


def _send_cache(run: Run, number: int, shards: list[int], homes: dict[int, str]) -> int:
    """Pushes the pending updates of a cache to the shards with a home. Returns their number.

    Args:
      run: builds a graph and runs it.
      number: id of the cache.
      shards: incarnation of every shard. 0: the shard has never replied to the cache.
      homes: devices of the reachable shards, by incarnation.
    """

    def push() -> list[tf.Tensor]:
        handle = ops.process_cache(np.int64(number))
        _, requests = ops.cache_flush(handle, num_shards=len(shards), all=True)
        return [
            reply
            for shard, request in zip(shards, requests, strict=True)
            if shard in homes
            for reply in [_sync(ops.process_table, ops.table_sync, homes[shard], shard, request)]
        ]

    run(push)
    return sum(shard in homes for shard in shards)


def _send_replica(run: Run, number: int, shards: list[int], homes: dict[int, str]) -> int:
    """Pushes the steps of a replica if all of its shards have a home. Returns their number.

    Accepts the arguments of `_send_cache`.
    """
    if not all(shard in homes for shard in shards):
        return 0

    def settle() -> tf.Tensor:
        handle = ops.process_replica(np.int64(number))
        return ops.replica_settle(handle, [], np.int64(0), reads=False, all=True)

    def exchange() -> tf.Operation:
        handle = ops.process_replica(np.int64(number))
        ticket, requests = ops.replica_request(handle, num_shards=len(shards))
        replies = [
            _sync(ops.process_dense_shard, ops.dense_sync, homes[shard], shard, request)
            for shard, request in zip(shards, requests, strict=True)
        ]
        return ops.replica_receive(handle, ticket, replies)

    while run(settle):
        run(exchange)
    return len(shards)


def _sync(
    find: Callable[[Any], tf.Tensor],
    sync: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    device: str,
    incarnation: int,
    request: tf.Tensor,
) -> tf.Tensor:
    """Returns the reply of a shard on a device, or an empty reply to an empty request."""

    def ask() -> tf.Tensor:
        with tf.device(f"{device}/device:CPU:0"):
            return sync(find(np.int64(incarnation)), request)

    return tf.cond(tf.size(request) > 0, ask, lambda: tf.zeros([0], tf.uint8))


def _note_ended(devices: Sequence[str]) -> list[tf.Operation]:
    """Builds ops that store on the parameter servers that this worker lost no update."""
    holders = [ops.process_caches(all=True), ops.process_replicas(all=True)]
    ids = tf.unique(tf.concat(holders, 0)[:, 0]).y
    notes = []
    for device in devices:
        with tf.device(f"{device}/device:CPU:0"):
            notes.append(ops.process_note_ended(ids))
    return notes
