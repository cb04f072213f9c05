"""What a worker does before it ends: it sends what its caches and replicas still hold.

These were made by the training program, whose context nobody else reaches, and it may be busy or
gone. So the worker finds them by itself (`Het>ProcessCaches`, `Het>ProcessReplicas`), asks the
parameter servers which shards they hold, and pushes through a session of its own server.
"""

from __future__ import annotations

import collections
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
    """Sends all that caches and replicas of this process hold back, and lets them make no more.

    A step that is under way fails with `tf.errors.CancelledError` at its next lookup or update, or
    when the next step of its replica begins, and the training program runs it again on another
    worker.

    Args:
      target: of this process's server.
      task: this process's.
      timeout: seconds that one step of it may take.

    Returns:
      The number of shards, over all caches and replicas with something to send, that were reached,
      and of those that were not: their parameter server is down or has lost them, or, of a replica,
      that of another of its shards.

    Raises:
      tf.errors.OpError: a parameter server failed meanwhile.
    """
    here = f"/job:{task.task_type}/task:{task.task_index}"
    addresses = task.cluster["ps"]
    probes = [call_in_daemon(probe, address, _PROBE_TIMEOUT) for address in addresses]
    up = [f"/job:ps/task:{i}" for i, answer in enumerate(probes) if answer.result() is TaskState.UP]
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

    run(ops.process_ends)
    caches, replicas = run(lambda: (ops.process_caches(), ops.process_replicas()))
    reached = lost = 0
    for holders, shards_of, send in (
        (_by_id(caches), ops.process_tables, _send_cache),
        (_by_id(replicas), ops.process_dense_shards, _send_replica),
    ):
        if not holders:
            continue
        found = run(lambda shards_of=shards_of: _on_each(up, shards_of))
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
    """Incarnations of the shards of each cache or replica."""
    holders = collections.defaultdict(list)
    for number, incarnation in rows.tolist():
        holders[number].append(incarnation)
    return holders


def _on_each(devices: list[str], op: Callable[[], tf.Tensor]) -> dict[str, tf.Tensor]:
    """What an op gives on each device."""
    given = {}
    for device in devices:
        with tf.device(f"{device}/device:CPU:0"):
            given[device] = op()
    return given


def _send_cache(run: Run, number: int, shards: list[int], homes: dict[int, str]) -> int:
    """Sends what a cache holds. Returns to how many of its shards: those that have a home."""

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
    """Sends the steps of a replica, if all its shards have a home. Returns to how many."""
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
    """The reply of a shard on a device; empty where there is nothing to say."""

    def ask() -> tf.Tensor:
        with tf.device(f"{device}/device:CPU:0"):
            return sync(find(np.int64(incarnation)), request)

    return tf.cond(tf.size(request) > 0, ask, lambda: tf.zeros([0], tf.uint8))


def _note_ended(devices: Sequence[str]) -> list[tf.Operation]:
    """Ops that tell parameter servers, for whoever asks, that nothing was lost here."""
    holders = [ops.process_caches(all=True), ops.process_replicas(all=True)]
    ids = tf.unique(tf.concat(holders, 0)[:, 0]).y
    notes = []
    for device in devices:
        with tf.device(f"{device}/device:CPU:0"):
            notes.append(ops.process_note_ended(ids))
    return notes
