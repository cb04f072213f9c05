"""Rounds of synchronous steps: closures that make the steps of all workers together.

See docs/protocol.md, section 9. A round has one closure for each member, and every member makes the
same number of steps. In every step, all members wait on the parameter servers for each other.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from het_tf import ops
from het_tf.runtime import deferred_destroy
from het_tf.runtime.broadcast import cluster_devices, visit
from het_tf.tables.table import EmbeddingTable

_NOBODY = -1  # Worker of a member that no closure has joined as yet.
_POLLS_TO_LEAVE = 2  # A worker that has just been started again may count as down for some seconds.
# TensorFlow connects to a restarted worker only when no closure runs, and the others wait for it.
_POLLS_TO_JOIN = 15
_CONNECT_TIMEOUT = 2.0  # seconds


class StepRounds:
    """The rounds of one training. The methods in the first part run eagerly on the coordinator.

    Attributes:
      number: number of the current round. 0: none has begun.
      members: number of members with which the current round began.
    """

    def __init__(
        self,
        down: Callable[[], set[int]],
        is_connected: Callable[[int, float], bool],
        num_workers: int,
    ):
        """Creates the places where members wait, on the parameter servers.

        Args:
          down: returns the workers that are down or lost.
          is_connected: whether this process is connected to a worker that is up. The second
            argument is a timeout in seconds.
          num_workers: number of workers of the cluster.
        """
        self._name = f"steps/{uuid.uuid4().hex}"
        self._servers = cluster_devices("ps")
        self._down = down
        self._is_connected = is_connected
        self._disconnected: set[int] = set()  # Workers that were down since they were connected.
        # By server: round and step at the last poll, and polls there at which a member was absent.
        self._absences: dict[str, tuple[tuple[int, int], dict[int, int]]] = {}
        self._joined: dict[int, int] = {}  # Workers of members, as far as they were absent.
        deferred_destroy.destroy_after(self, functools.partial(_destroy, self._name, self._servers))
        self._num_workers = num_workers
        self.number = 0
        self.members = 0

    @property
    def live_workers(self) -> int:
        """Number of workers that this process is connected to, at least 1. No closure runs."""
        down = self._down()
        self._disconnected |= down
        for worker in sorted(self._disconnected - down):
            if self._is_connected(worker, _CONNECT_TIMEOUT):
                self._disconnected.remove(worker)
        return max(1, self._num_workers - len(self._disconnected))

    def turns(self, made: int, plan_step: int) -> list[tf.Tensor]:
        """Returns an argument for the closure of each member.

        Args:
          made: number of steps that a worker's replica of the dense variables must have made. On a
            worker with another number, such as one that was started since, the closure makes none.
          plan_step: step of the plan that the first batch of every member must have. -1: workers
            push all updates.

        Returns:
          int64 [5]: numbers of the round and of the member, number of members, `made`, `plan_step`.
        """
        return [
            tf.constant([self.number, member, self.members, made, plan_step], tf.int64)
            for member in range(self.members)
        ]

    def begin(self, members: int) -> None:
        """Begins the next round. All closures of the round before have ended."""
        self.number, self.members = self.number + 1, members
        self._joined = {}
        for server in self._servers:
            with tf.device(server):
                ops.step_begin(self.handle_op(), self.number, members)

    def leave(self, members: Sequence[int]) -> None:
        """The other members do not wait for these members any longer."""
        for server in self._servers:
            with tf.device(server):
                ops.step_leave(self.handle_op(), self.number, tf.constant(members, tf.int64))

    def drop_lost(self) -> None:
        """Makes the members of lost workers leave the round, so that the others go on.

        Called about once in a second. A member leaves if it is absent in several calls at one step:
        if its worker is down or was restarted, or if no worker has joined as this member.
        """
        down = self._down()
        self._disconnected |= down
        lost: set[int] = set()
        # A worker may have died after it sent the messages of a step to some of the servers.
        for server in self._servers:
            with tf.device(server):
                number, step, absent, workers = (
                    x.numpy().tolist() for x in ops.step_waiting(self.handle_op())
                )
            if server == self._servers[0]:  # Where members join.
                self._joined |= dict(zip(absent, workers, strict=True))
            place, absences = self._absences.get(server, ((0, 0), {}))
            if place != (number, step) or len(absent) == self.members:  # Or nobody waits.
                place, absences = (number, step), {}
            for member in absent:
                absences[member] = absences.get(member, 0) + 1
                if self._is_lost(self._joined.get(member, _NOBODY), absences[member], down):
                    lost.add(member)
            self._absences[server] = place, absences
        if lost:
            logging.warning(
                "%d of %d members do not make the next steps; workers that are down: %s",
                len(lost),
                self.members,
                sorted(down) or "none",
            )
            self.leave(sorted(lost))

    def _is_lost(self, worker: int, absences: int, down: set[int]) -> bool:
        """Whether a member leaves that was absent in so many polls at one step."""
        if worker == _NOBODY:
            return absences >= (_POLLS_TO_LEAVE if down else _POLLS_TO_JOIN)
        if worker in down:
            return absences >= _POLLS_TO_LEAVE
        # A worker may have died and come back between two polls. A busy one may fail one probe.
        was_disconnected = worker in self._disconnected
        if not was_disconnected and absences % _POLLS_TO_JOIN != 0:
            return False
        if self._is_connected(worker, _CONNECT_TIMEOUT):
            self._disconnected.discard(worker)
            return False
        self._disconnected.add(worker)
        return was_disconnected and absences >= _POLLS_TO_LEAVE

    def abort(self) -> None:
        """Ends the round. Members that wait get an error."""
        self.begin(1)

    # Ops.

    def leave_op(
        self, round_number: tf.Tensor, member: tf.Tensor, leaves: tf.Tensor
    ) -> list[tf.Operation]:
        """Makes a member leave that makes no step. `leaves`: bool scalar, whether it does."""
        members = tf.fill([tf.cast(leaves, tf.int32)], member)
        left = []
        for server in self._servers:
            with tf.device(server):
                left.append(ops.step_leave(self.handle_op(), round_number, members))
        return left

    def join_op(self, round_number: tf.Tensor, member: tf.Tensor, worker: tf.Tensor) -> tf.Tensor:
        """Returns whether a worker may make the steps of a member, bool scalar."""
        with tf.device(self._servers[0]):
            return ops.step_join(self.handle_op(), round_number, member, tf.cast(worker, tf.int64))

    def exchange_op(
        self,
        place: Sequence[tf.Tensor],
        tables: Sequence[EmbeddingTable],
        requests: Sequence[Sequence[tf.Tensor]],
        numbers: tf.Tensor,
    ) -> tuple[list[list[tf.Tensor]], tf.Tensor]:
        """Sends a member's messages of a step, and waits for the messages of all members.

        Args:
          place: int64 scalars, number of the round, member and step, and whether the step is the
            member's last (1) or not (0).
          tables: table of each request. A table may occur several times.
          requests: uint8 [bytes], by table and server.
          numbers: float32 [numbers].

        Returns:
          The replies, uint8 [bytes], by table and server, and the mean of `numbers` over the
          members.
        """
        header = _bytes_of(tf.stack([tf.cast(x, tf.int64) for x in place]))
        count = len(self._servers)
        ends = np.linspace(0, numbers.shape[0], count + 1).astype(int)
        messages = [
            ops.pack_frames([header, *of_server, _bytes_of(numbers[first:last])])
            for of_server, first, last in zip(
                list(zip(*requests, strict=True)) or [()] * count, ends, ends[1:], strict=False
            )
        ]
        replies = ops.await_replies(
            ops.call_servers(
                messages,
                devices=self._servers,
                functions=[self._serving(shard, tables) for shard in range(count)],
            ),
            n=count,
        )
        frames = [ops.unpack_frames(reply, n=len(tables) + 1) for reply in replies]
        of_tables = [list(of_table) for of_table in zip(*(f[:-1] for f in frames), strict=True)]
        parts = [tf.bitcast(tf.reshape(f[-1], [-1, 4]), tf.float32) for f in frames]
        return of_tables, tf.ensure_shape(tf.concat(parts, 0), numbers.shape)

    def _serving(
        self, shard: int, tables: Sequence[EmbeddingTable]
    ) -> tf.types.experimental.Callable:
        @tf.function(input_signature=[tf.TensorSpec([None], tf.uint8)], autograph=False)
        def serve(message: tf.Tensor) -> tf.Tensor:
            handles = [table.handle_op(shard) for table in tables]
            return ops.serve_step(self.handle_op(), handles, message)

        return serve.get_concrete_function()

    def handle_op(self) -> tf.Tensor:
        """Returns the handle of the place where members wait, on the current device."""
        return ops.step_handle(shared_name=self._name)


def _bytes_of(numbers: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(numbers, tf.uint8), [-1])


def _destroy(name: str, servers: Sequence[str]) -> None:
    def destroy() -> None:
        handle = ops.step_handle(shared_name=name)
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

    visit(servers, destroy, is_lost=lambda device, error: True)
