"""The gradients of a layer's rows, from a backward pass to the update of the table."""

from __future__ import annotations

import dataclasses
import functools
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from het_tf import ops
from het_tf.layers.lookahead import Room
from het_tf.runtime import deferred_destroy
from het_tf.runtime.broadcast import cache_devices, visit

_ROWS = [tf.int64, tf.float32]  # keys [keys] and their gradients [keys, dim]


class Call:
    """One call of a layer, whose rows are updated once."""

    def __init__(self) -> None:
        """A call whose rows are not updated yet."""
        self._graphs: weakref.WeakSet[tf.Graph] = weakref.WeakSet()

    def note_training(self, graph: tf.Graph) -> bool:
        """Notes an update; returns whether it is the first in a graph.

        The branches of `tf.cond` are graphs, of which only one runs.
        """
        is_first = graph not in self._graphs
        self._graphs.add(graph)
        return is_first


@dataclasses.dataclass(frozen=True)
class CallGradients:
    """The gradients of one call of a layer.

    Attributes:
      call: the call.
      layer: weak reference to the `HetEmbedding`.
      keys: int64 [any shape], the keys that the call looked up.
      ticket: of the lookup.
      pooling: of the lookup, where rows were pooled.
      gradients: float32 [bags, dim] of each feature, scaled like the loss.
      sends: as of `WorkerCache.update_op`.
      room: of the lookup, where the lookup was begun before its step.
    """

    call: Call
    layer: weakref.ref[Any]
    keys: tf.Tensor
    ticket: tf.Tensor
    pooling: tf.Tensor | None
    gradients: list[tf.Tensor]
    sends: bool
    room: Room | None

    def map(self, change: Callable[[tf.Tensor], tf.Tensor]) -> CallGradients:
        """Returns the gradients after a change of each tensor."""
        return dataclasses.replace(self, gradients=[change(g) for g in self.gradients])

    def are_finite(self) -> tf.Tensor:
        """Returns whether all gradients are finite, bool scalar."""
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in self.gradients])

    def zero(self) -> tf.Tensor:
        """As of `het_tf.optimizers.joint_optimizer.RowGradients`."""
        return tf.reduce_sum(self.gradients[0][:0])

    def of_keys(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Unique keys, int64 [keys], and the sum of the gradients of each, float32 [keys, dim]."""
        if self.pooling is not None:
            return ops.pooled_sums(self.pooling, self.gradients)
        keys, places = tf.unique(tf.reshape(self.keys, [-1]))
        return keys, tf.math.unsorted_segment_sum(self.gradients[0], places, tf.size(keys))

    def update_op(self, rate: tf.Tensor) -> None:
        """Updates the rows; rate: float32 scalar."""
        update = self.layer().stored.update_op(
            self.ticket, self.pooling, self.gradients, rate, self.sends
        )
        if self.room is not None:
            self.room.note_update(update)


def keys_of_calls(calls: Sequence[CallGradients]) -> tuple[tf.Tensor, tf.Tensor]:
    """As `CallGradients.of_keys`, of all calls of a layer; keys are unique within each call."""
    keys, sums = zip(*(call.of_keys() for call in calls), strict=True)
    return tf.concat(keys, 0), tf.concat(sums, 0)


def sums_of_rows(calls: Sequence[CallGradients], nonfinite: str) -> tf.Tensor:
    """The gradient of each row by all calls of a layer, float32 [rows, dim].

    Args:
      calls: of the layer.
      nonfinite: as of `HetEmbedding`; rows that an update skips count as zeros.
    """
    keys, sums = keys_of_calls(calls)
    if nonfinite == "skip":
        are_finite = tf.math.is_finite(tf.reduce_sum(tf.square(sums), 1, keepdims=True))
        sums = tf.where(are_finite, sums, 0.0)
    if len(calls) == 1:
        return sums
    keys, places = tf.unique(keys)
    return tf.math.unsorted_segment_sum(sums, places, tf.size(keys))


class Accumulator:
    """The gradients of a layer's rows in steps that were not applied yet.

    They are in a queue of at most one element, in the process that makes the steps: a variable
    would be on a parameter server, where there are some.
    """

    def __init__(self, layer: Any):
        """Starts empty."""
        self._layer = weakref.ref(layer)
        self._queue_op = functools.partial(_queue_op, f"accumulated/{uuid.uuid4().hex}")
        self._devices = ["/device:CPU:0"] if layer.table.is_local else cache_devices()
        layer.table.forgets(self)
        deferred_destroy.destroy_after(
            self, functools.partial(_destroy, self._queue_op, self._devices)
        )

    def clear(self) -> None:
        """Forgets the gradients, since the rows were restored. No step may be under way."""

        def drain() -> None:
            queue = self._queue_op()
            if int(tf.raw_ops.QueueSizeV2(handle=queue)):
                tf.raw_ops.QueueDequeueV2(handle=queue, component_types=_ROWS)

        visit(self._devices, drain, is_lost=lambda device, error: True)

    def add_op(
        self, calls: Sequence[CallGradients], rate: tf.Tensor, is_due: tf.Tensor, steps: int
    ) -> None:
        """Adds the gradients of a step; where the step is due, updates rows with their mean."""
        layer, sends = self._layer(), calls[0].sends
        queue = self._queue_op()
        keys, gradients = keys_of_calls(calls)
        shape = [None, layer.output_dim]

        def take() -> list[tf.Tensor]:
            return tf.raw_ops.QueueDequeueV2(handle=queue, component_types=_ROWS)

        there = tf.raw_ops.QueueSizeV2(handle=queue) > 0
        before = tf.cond(there, take, lambda: [keys[:0], gradients[:0]])
        keys = tf.concat([tf.ensure_shape(before[0], [None]), keys], 0)
        gradients = tf.concat([tf.ensure_shape(before[1], shape), gradients], 0)

        def train() -> None:
            found = layer.stored.found_op(keys)
            mean = [gradients / steps]
            if layer.stored.is_cached and not sends:
                mean = Room([(layer.worker_cache, found)]).before_op(mean)
            layer.stored.update_op(found, None, mean, rate, sends)

        def keep() -> None:
            tf.raw_ops.QueueEnqueueV2(handle=queue, components=[keys, gradients])

        tf.cond(is_due, train, keep)


def _queue_op(name: str) -> tf.Tensor:
    with tf.device("/device:CPU:0"):
        return tf.raw_ops.FIFOQueueV2(
            component_types=_ROWS, container=ops.CONTAINER, shared_name=name
        )


def _destroy(queue_op: Callable[[], tf.Tensor], devices: list[str]) -> None:
    def destroy() -> None:
        tf.raw_ops.DestroyResourceOp(resource=queue_op(), ignore_lookup_error=True)

    visit(devices, destroy, is_lost=lambda device, error: True)
