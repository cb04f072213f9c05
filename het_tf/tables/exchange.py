"""Messages of a step: one to each parameter server, with the requests of all tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from het_tf import ops


class Party(Protocol):
    """A participant of an exchange that has one shard on each parameter server, such as a table."""

    def serve_op(self, shard: int, request: tf.Tensor) -> tf.Tensor:
        """Returns a shard's reply to a request. Runs on the shard's server. Both uint8 [bytes]."""


class Exchange:
    """Sends the requests of several parties to the parameter servers and returns the replies."""

    def __init__(self, devices: Sequence[str], parties: Sequence[Party]):
        """Stores the arguments and sends nothing.

        Args:
          devices: devices of the parameter servers, in the order of the shards.
          parties: senders of requests, in the order of the requests in `send_op`.
        """
        self._devices = tuple(devices)
        self._parties = tuple(parties)
        self._functions: dict[int, Any] = {}

    def send_op(self, requests: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Sends requests and waits for the replies. A server without a request gets no message.

        Args:
          requests: uint8 [bytes], by party and shard. 0 bytes: no request.

        Returns:
          The replies, uint8 [bytes], by party and shard. 0 bytes: there was no request.
        """
        return self.receive_op(self.call_op(requests))

    # The two halves of `send_op`, for callers that compute while a message is under way.

    def call_op(self, requests: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
        """Sends requests, arguments as for `send_op`, and does not wait for the replies.

        Returns:
          Scalar variant for `receive_op`. A caller may drop it without waiting for the replies.
        """
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
        """Waits for the replies to `call_op`. Returns them as `send_op` does."""
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
