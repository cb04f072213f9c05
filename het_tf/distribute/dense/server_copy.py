"""Flat copy of the dense variables on the servers, with which the replicas exchange contributions.

The copy has several shards on every server. The shards of a server are due in different steps. A
message that also carries rows is therefore delayed by one shard only.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf.runtime.broadcast import cluster_devices
from het_tf.runtime.threads import call_apart

# A message costs about half a millisecond of a core, which is the time of 500 kB at 8 Gbit/s.
_SHARD_BYTES = 250_000
_MAX_PHASES = 8
_PATIENCE = 5.0  # seconds to wait for a server that may hang


class DenseCopy:
    """The copy's shards. They are resources with names on the servers.

    Attributes:
      servers: devices of the parameter servers.
      phases: number of shards on every server.
    """

    def __init__(self, name: str, num_floats: int, staleness: int):
        """Decides the number of shards. Creates no shard.

        Args:
          name: unique name of the replicas.
          num_floats: number of trained floats.
          staleness: bound on a worker's unsent steps.
        """
        self._name = name
        self.servers = cluster_devices("ps")
        num_bytes = 4 * num_floats // len(self.servers)
        due = max(1, (staleness + 1) // 2)  # Number of steps between two pushes of a shard.
        self.phases = max(1, min(-(-num_bytes // _SHARD_BYTES), _MAX_PHASES, due))
        self._freeing: list[concurrent.futures.Future[None]] = []
        self._devices = [server for server in self.servers for _ in range(self.phases)]

    @property
    def num_shards(self) -> int:
        """Number of shards on all servers."""
        return len(self._devices)

    # Ops.

    def pack(self, frames: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Joins the requests of shards into one message per server, uint8 [bytes]."""
        return [
            _pack(frames[first : first + self.phases])
            for first in range(0, self.num_shards, self.phases)
        ]

    def unpack(self, messages: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Splits messages of servers into replies of shards. The inverse of `pack`."""
        return [frame for message in messages for frame in self._unpack(message)]

    def serve_op(self, server: int, message: tf.Tensor) -> tf.Tensor:
        """Returns a server's reply to a message of a replica. `server` is the server's index."""
        first = server * self.phases
        replies = [
            ops.dense_sync(self._handle_op(first + i), request)
            for i, request in enumerate(self._unpack(message))
        ]
        return _pack(replies)

    def _unpack(self, message: tf.Tensor) -> Sequence[tf.Tensor]:
        return ops.unpack_frames(message, n=self.phases) if self.phases > 1 else [message]

    def pieces_op(
        self, floats: Sequence[int], counters: Sequence[int]
    ) -> tuple[list[list[tf.Tensor]], list[list[tf.Tensor]], list[tf.Tensor]]:
        """Reads the exchanged values and splits them into variables.

        Args:
          floats: numbers of elements of the float variables.
          counters: numbers of elements of the counter variables.

        Returns:
          The pieces of every float variable, of every counter variable, and of the vector `owed` of
          `set`. Each piece is on its server.
        """
        states = []
        for shard, device in self._shards():
            with tf.device(device):
                states.append(ops.dense_get(self._handle_op(shard)))
        return (
            _pieces([state.floats for state in states], floats),
            _pieces([state.counters for state in states], counters),
            [state.owed for state in states],
        )

    # Eager methods.

    def set(
        self,
        floats: np.ndarray,
        owed: np.ndarray,
        counters: np.ndarray,
        rest: np.ndarray,
        steps: int,
        workers: int,
        total: float,
    ) -> None:
        """Creates or replaces the shards.

        Args:
          floats: float32 [n], trained floats first.
          owed: float32 [number of trained floats], contributions that `floats` do not hold yet.
          counters: int64 [n].
          rest: uint8 [bytes], initial values of variables of which every worker has its own.
          steps: number of steps of all workers so far. Young networks are exchanged more often.
          workers: number of workers that make the next steps.
          total: what a contribution to trained floats counts in the end. 1: in full.
        """
        for call in self._freeing:  # A late `destroy` would free the new shards.
            with contextlib.suppress(tf.errors.OpError):
                call.result()
        self._freeing = []
        for shard, device in self._shards():
            first, last = (_first(floats.size, at, self.num_shards) for at in (shard, shard + 1))
            with tf.device(device):
                ops.dense_set(
                    self._handle_op(shard),
                    floats[first:last],
                    owed[first:last],
                    self._part(counters, shard),
                    self._part(rest, shard),
                    tf.constant(steps, tf.int64),
                    num_workers=workers,
                    total=total,
                )

    def floats(self) -> np.ndarray:
        """Returns the merged floats, float32 [n]."""
        parts = []
        for shard, device in self._shards():
            with tf.device(device):
                parts.append(ops.dense_get(self._handle_op(shard)).floats.numpy())
        return np.concatenate(parts)

    def destroy(self) -> None:
        """Frees the shards. Does not wait for a server that hangs, which frees them later."""
        self._freeing = [call_apart(self._destroy_on, server) for server in self.servers]
        for call in self._freeing:
            with contextlib.suppress(tf.errors.OpError, concurrent.futures.TimeoutError):
                call.result(timeout=_PATIENCE)

    def _destroy_on(self, server: str) -> None:
        for shard, device in self._shards():
            if device != server:
                continue
            with tf.device(device):
                tf.raw_ops.DestroyResourceOp(
                    resource=self._handle_op(shard), ignore_lookup_error=True
                )

    def _shards(self) -> Iterator[tuple[int, str]]:
        return enumerate(self._devices)

    def _handle_op(self, shard: int) -> tf.Tensor:
        return ops.dense_handle(shared_name=f"{self._name}/{shard}")

    def _part(self, array: np.ndarray, shard: int) -> np.ndarray:
        begin, end = (_first(array.size, at, self.num_shards) for at in (shard, shard + 1))
        return array[begin:end]


def _pack(frames: Sequence[tf.Tensor]) -> tf.Tensor:
    return ops.pack_frames(frames) if len(frames) > 1 else frames[0]


def _first(n: int, shard: int, shards: int) -> int:
    """Returns the first element of a shard, as FirstOfShard in ops/core/dense/replica.h."""
    return n // shards * shard + n % shards * shard // shards


def _pieces(parts: Sequence[tf.Tensor], sizes: Sequence[int]) -> list[list[tf.Tensor]]:
    """Splits a vector in parts on several devices into the pieces of variables of given sizes."""
    bounds = np.cumsum([0, *sizes]).tolist()
    ends = [_first(bounds[-1], shard + 1, len(parts)) for shard in range(len(parts))]
    return [_slices(parts, ends, begin, end) for begin, end in itertools.pairwise(bounds)]


def _slices(
    parts: Sequence[tf.Tensor], ends: Sequence[int], begin: int, end: int
) -> list[tf.Tensor]:
    """Returns the slices for [begin, end) of a vector in parts on several devices.

    `ends` are the end positions of the parts.
    """
    slices = []
    first = 0
    for part, last in zip(parts, ends, strict=True):
        if max(begin, first) < min(end, last):
            with tf.device(part.device):
                slices.append(part[max(begin, first) - first : min(end, last) - first])
        first = last
    return slices
