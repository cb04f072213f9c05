"""Messages of a step: one to each parameter server, with the requests of all tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from het_tf import ops


class Party(Protocol):
    """A participant of an exchange, such as a table."""

    @property
    def devices(self) -> Sequence[str]:
        """Parameter servers of its shards, in the order of the shards."""

    def serve_op(self, shard: int, request: tf.Tensor) -> tf.Tensor:
        """Returns a shard's reply to a request. Runs on the shard's server. Both uint8 [bytes]."""


class Exchange:
    """Sends the requests of several parties to the parameter servers and returns the replies."""

    def __init__(self, parties: Sequence[Party]):
        """Stores the parties, in the order of the requests in `send_op`. Sends nothing."""
        self._parties = tuple(parties)
        # Receivers of messages: a device, and the how-many-th shard that a party has there.
        shards: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for p, party in enumerate(parties):
            for shard, device in enumerate(party.devices):
                receiver = device, party.devices[:shard].count(device)
                shards.setdefault(receiver, []).append((p, shard))
        self._devices = tuple(device for device, _ in shards)
        self._shards = list(shards.values())  # parties and numbers of their shards, by receiver
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
        frames = [[requests[party][shard] for party, shard in here] for here in self._shards]
        return ops.call_servers(
            [each[0] if len(each) == 1 else ops.pack_frames(each) for each in frames],
            devices=self._devices,
            functions=[self._function(receiver) for receiver in range(len(self._devices))],
        )

    def receive_op(self, calls: tf.Tensor) -> list[list[tf.Tensor]]:
        """Waits for the replies to `call_op`. Returns them as `send_op` does."""
        messages = ops.await_replies(calls, n=len(self._devices))
        replies: dict[tuple[int, int], tf.Tensor] = {}
        for here, message in zip(self._shards, messages, strict=True):
            frames = [message] if len(here) == 1 else ops.unpack_frames(message, n=len(here))
            replies |= dict(zip(here, frames, strict=True))
        return [
            [replies[p, shard] for shard in range(len(party.devices))]
            for p, party in enumerate(self._parties)
        ]

    def _function(self, receiver: int) -> Any:
        if receiver not in self._functions:
            here = [(self._parties[party], shard) for party, shard in self._shards[receiver]]

            @tf.function(input_signature=[tf.TensorSpec([None], tf.uint8)], autograph=False)
            def serve(message: tf.Tensor) -> tf.Tensor:
                if len(here) == 1:
                    ((party, shard),) = here
                    return party.serve_op(shard, message)
                requests = ops.unpack_frames(message, n=len(here))
                return ops.pack_frames(
                    [
                        party.serve_op(shard, request)
                        for (party, shard), request in zip(here, requests, strict=True)
                    ]
                )

            self._functions[receiver] = serve.get_concrete_function()
        return self._functions[receiver]
