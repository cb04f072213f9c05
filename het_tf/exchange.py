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
        by_shard = [
            self._send_to(shard, [party[shard] for party in requests])
            for shard in range(len(self._devices))
        ]
        return [list(replies) for replies in zip(*by_shard, strict=True)]

    def _send_to(self, shard: int, requests: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        if not requests:
            return []
        message = requests[0] if len(requests) == 1 else ops.pack_frames(requests)

        def send() -> tf.Tensor:
            # A remote call, and not ops placed there: they would cross the network even in the
            # branch that is not taken.
            return tf.raw_ops.RemoteCall(
                target=self._devices[shard],
                args=[message],
                Tout=[tf.uint8],
                f=self._function(shard),
            )[0]

        # TensorFlow calls the servers one after the other, since calls have side effects. To call
        # all at once (`_graph.run_beside`) saves round trips, but lets the first call of a function
        # register it with its server while another call is being sent, and that is a race in
        # TensorFlow 2.21 (EagerClusterFunctionLibraryRuntime keeps a pointer into a vector that
        # grows): seen as "Unable to parse request".
        reply = tf.cond(tf.size(message) > 0, send, lambda: tf.zeros([0], tf.uint8))
        if len(requests) == 1:
            return [reply]
        return ops.unpack_frames(reply, n=len(requests))

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
