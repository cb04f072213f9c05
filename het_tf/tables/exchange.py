"""One message to each parameter server for everything that a step has for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from het_tf import ops


class Party(Protocol):
    """What is spread over parameter servers and has something to say to each: a table, say."""

    def serve_op(self, shard: int, request: tf.Tensor) -> tf.Tensor:
        """On the parameter server of a shard: its reply to a request. Both uint8 [bytes]."""


class Exchange:
    """Carries the requests of several parties to parameter servers, and the replies back."""

    def __init__(self, devices: Sequence[str], parties: Sequence[Party]):
        """Describes the exchange.

        Args:
          devices: of the parameter servers, in the order of the shards.
          parties: who has requests, in the order in which they will be given.
        """
        self._devices = tuple(devices)
        self._parties = tuple(parties)
        self._functions: dict[int, Any] = {}

    def send_op(self, requests: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Sends what there is to say; a server for which nobody has anything gets no message.

        Args:
          requests: uint8 [bytes], by party and shard; 0 bytes: nothing to say.

        Returns:
          The replies, uint8 [bytes], by party and shard; 0 bytes where nothing was said.
        """
        return self.receive_op(self.call_op(requests))

    # The two halves of it, for whoever has something to do in between.

    def call_op(self, requests: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        """Sends: a scalar variant for `receive_op`; if it is dropped, nobody waits for replies."""
        by_shard = list(zip(*requests, strict=True))
        if len(self._parties) == 1:
            messages = [request for (request,) in by_shard]
        else:
            messages = [ops.pack_frames(frames) for frames in by_shard]
        return ops.call_servers(
            messages,
            devices=self._devices,
            functions=[self._function(shard) for shard in range(len(self._devices))],
        )

    def receive_op(self, calls: tf.Tensor) -> list[list[tf.Tensor]]:
        """The replies to what `call_op` sent."""
        replies = ops.await_replies(calls, n=len(self._devices))
        if len(self._parties) == 1:
            return [replies]
        frames = [ops.unpack_frames(reply, n=len(self._parties)) for reply in replies]
        return [list(party) for party in zip(*frames, strict=True)]

    def _function(self, shard: int) -> Any:
        if shard not in self._functions:
            parties = self._parties

            @tf.function(input_signature=[tf.TensorSpec([None], tf.uint8)], autograph=False)
            def serve(message: tf.Tensor) -> tf.Tensor:
                if len(parties) == 1:
                    return parties[0].serve_op(shard, message)
                requests = ops.unpack_frames(message, n=len(parties))
                return ops.pack_frames(
                    [
                        party.serve_op(shard, request)
                        for party, request in zip(parties, requests, strict=True)
                    ]
                )

            self._functions[shard] = serve.get_concrete_function()
        return self._functions[shard]
