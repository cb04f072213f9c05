"""What replicas of the dense variables have in common: a flat copy of them on the servers.

It is cut into shards, several on each server, which are due one after the other: rows that travel
with one of them wait for no more.
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

# A message costs as much as half a millisecond on a core, and 500 kB as long at 8 Gbit/s.
_SHARD_BYTES = 250_000
_MAX_PHASES = 8
_PATIENCE = 5.0  # seconds with a server that may hang


class DenseCopy:
    """The shards of a copy, by their names.

    Attributes:
      servers: devices of the parameter servers.
      phases: shards on each of them.
    """

    def __init__(self, name: str, num_floats: int, staleness: int):
        """Cuts the copy; nothing is made yet.

        Args:
          name: unique, of the replicas.
          num_floats: that are trained.
          staleness: own steps that may be unsent.
        """
        self._name = name
        self.servers = cluster_devices("ps")
        num_bytes = 4 * num_floats // len(self.servers)
        due = max(1, (staleness + 1) // 2)  # Steps from one push of a shard to the next.
        self.phases = max(1, min(-(-num_bytes // _SHARD_BYTES), _MAX_PHASES, due))
        self._freeing: list[concurrent.futures.Future[None]] = []
        self._devices = [server for server in self.servers for _ in range(self.phases)]

    @property
    def num_shards(self) -> int:
        """On all servers."""
        return len(self._devices)

    # Ops.

    def pack(self, frames: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """A message for each server, uint8 [bytes], of one for each shard."""
        return [
            _pack(frames[first : first + self.phases])
            for first in range(0, self.num_shards, self.phases)
        ]

    def unpack(self, messages: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The inverse of `pack`."""
        return [frame for message in messages for frame in self._unpack(message)]

    def serve_op(self, server: int, message: tf.Tensor) -> tf.Tensor:
        """On parameter server number `server`: its reply to a message of a replica."""
        first = server * self.phases
        replies = [
            ops.dense_sync(self._handle_op(first + i), request)
            for i, request in enumerate(self._unpack(message))
        ]
        return _pack(replies)

    def _unpack(self, message: tf.Tensor) -> Sequence[tf.Tensor]:
        return ops.unpack_frames(message, n=self.phases) if self.phases > 1 else [message]

    def pieces_op(self, sizes: Sequence[Sequence[int]]) -> list[list[list[tf.Tensor]]]:
        """What is exchanged, cut into variables.

        Args:
          sizes: of the variables that are floats, and of those that are counters, in elements.

        Returns:
          Of each kind, of each variable the pieces, on the servers where they are.
        """
        states = []
        for shard, device in self._shards():
            with tf.device(device):
                states.append(ops.dense_get(self._handle_op(shard)))
        kinds = []
        for number, of_kind in enumerate(sizes):
            parts = [state[number] for state in states]
            bounds = np.cumsum([0, *of_kind]).tolist()
            ends = [_first(bounds[-1], shard + 1, len(parts)) for shard in range(len(parts))]
            kinds.append(
                [_slices(parts, ends, begin, end) for begin, end in itertools.pairwise(bounds)]
            )
        return kinds

    # Eagerly.

    def set(
        self,
        floats: np.ndarray,
        counters: np.ndarray,
        rest: np.ndarray,
        num_trainable: int,
        weights: tuple[float, float],
    ) -> None:
        """Makes or replaces the shards.

        Args:
          floats: float32 [n], those that are trained first.
          counters: int64 [n].
          rest: uint8 [bytes], that replicas begin with and keep to themselves.
          num_trainable: of the floats.
          weights: that a contribution counts with: to those that are trained, and to all others.
        """
        for call in self._freeing:  # It would free those that are made here.
            with contextlib.suppress(tf.errors.OpError):
                call.result()
        self._freeing = []
        for shard, device in self._shards():
            own_floats = self._part(floats, shard)
            first = _first(floats.size, shard, self.num_shards)
            with tf.device(device):
                ops.dense_set(
                    self._handle_op(shard),
                    own_floats,
                    self._part(counters, shard),
                    self._part(rest, shard),
                    num_first=int(np.clip(num_trainable - first, 0, own_floats.size)),
                    first_weight=weights[0],
                    second_weight=weights[1],
                )

    def destroy(self) -> None:
        """Frees the memory of the shards; a server that does not answer does so when it does."""
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
    """FirstOfShard in ops/core/dense/replica.h."""
    return n // shards * shard + n % shards * shard // shards


def _slices(
    parts: Sequence[tf.Tensor], ends: Sequence[int], begin: int, end: int
) -> list[tf.Tensor]:
    """[begin, end) of a vector whose parts, which end at `ends`, are on several devices."""
    slices = []
    first = 0
    for part, last in zip(parts, ends, strict=True):
        if max(begin, first) < min(end, last):
            with tf.device(part.device):
                slices.append(part[max(begin, first) - first : min(end, last) - first])
        first = last
    return slices
