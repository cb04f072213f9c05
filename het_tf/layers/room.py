"""Room for the updates of a step where steps overlap (Cache::MakeRoom in ops/core/cache)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf

from het_tf._visits import cluster_devices
from het_tf.cache import WorkerCache, install_complete_op
from het_tf.exchange import Exchange


class Room:
    """Has the first update of a step wait until the shards have enough of the updates before it.

    That is, for all layers of the step at once. They seldom lack it: what is due travels with the
    lookups of later steps.
    """

    def __init__(self, lookups: Sequence[tuple[WorkerCache, tf.Tensor]]):
        """lookups: caches and their tickets, in the graph of the step."""
        # TensorFlow never forgets the gradient of which this is a part. It must not keep the cache.
        self._lookups = [
            (weakref.ref(cache), ticket) for cache, ticket in lookups if cache.makes_room
        ]
        self._made: tf.Tensor | None = None
        self._updates: list[tf.Operation] = []

    def before_op(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The gradients of a layer, when there is room for its update."""
        if not self._lookups:
            return list(gradients)
        if self._made is None:
            with tf.control_dependencies(gradients):
                self._made = self._make_op()
        with tf.control_dependencies([self._made]):
            return [tf.identity(gradient) for gradient in gradients]

    def note_update(self, update: tf.Operation) -> None:
        """Takes note of an update of the step."""
        self._updates.append(update)

    def updates(self) -> list[tf.Operation]:
        """Those updates that are ops of the graph being built."""
        graph = tf.compat.v1.get_default_graph()
        return [update for update in self._updates if update.graph is graph]

    def _make_op(self) -> tf.Tensor:
        caches = [cache() for cache, _ in self._lookups]
        begun = [
            cache.make_room_op(tf.identity(ticket))
            for cache, (_, ticket) in zip(caches, self._lookups, strict=True)
        ]
        exchange = Exchange(cluster_devices("ps"), [cache.table for cache in caches])

        def send(_: tf.Tensor) -> list[tf.Tensor]:
            replies = exchange.send_op([requests for *_, requests in begun])
            tickets = [made for made, *_ in begun]
            complete = install_complete_op(caches, tickets, replies, exchange.send_op)
            with tf.control_dependencies(complete):
                return [tf.constant(False)]

        # A loop: it hands on what comes from the function's caller, which tf.cond does not.
        lacks_room = tf.reduce_any([lacks for _, lacks, _ in begun])
        (lacks_room,) = tf.while_loop(
            lambda more: more, send, [lacks_room], parallel_iterations=1, name="make_room"
        )
        return lacks_room
