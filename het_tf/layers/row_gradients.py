"""Gradients of a layer's rows, from the backward pass to the update of the table."""

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

_ROWS = [tf.int64, tf.float32]  # Keys [keys] and their gradients [keys, dim].


class Call:
    """One call of a layer. The rows of a call are updated once."""

    def __init__(self) -> None:
        """Creates a call whose rows are not updated yet."""
        self._graphs: weakref.WeakSet[tf.Graph] = weakref.WeakSet()

    def note_training(self, graph: tf.Graph) -> bool:
        """Records an update. Returns whether the update is the first in a graph.

        Each branch of `tf.cond` is a graph, and only one branch runs.
        """
        is_first = graph not in self._graphs
        self._graphs.add(graph)
        return is_first


@dataclasses.dataclass(frozen=True)
class CallGradients:
    """Gradients of one call of a layer.

    Attributes:
      call: the call.
      layer: weak reference to the `HetEmbedding`.
      keys: int64 [any shape], the keys that the call looked up.
      ticket: ticket of the lookup.
      pooling: scalar variant of the pooled lookup. None: rows were not pooled.
      gradients: float32 [bags, dim] per feature, scaled like the loss.
      sends: see `WorkerCache.update_op`.
      room: room of the lookup. None: the lookup was not begun before its step.
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
        """Returns the gradients with `change` applied to each tensor."""
        return dataclasses.replace(self, gradients=[change(g) for g in self.gradients])

    def shared(self, share: tf.Tensor) -> CallGradients:
        """See `het_tf.optimizers.joint_optimizer.RowGradients.shared`."""
        return dataclasses.replace(self.map(lambda g: g * share), sends=False)

    def are_finite(self) -> tf.Tensor:
        """Returns whether all gradients are finite, bool scalar."""
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in self.gradients])

    def zero(self) -> tf.Tensor:
        """See `het_tf.optimizers.joint_optimizer.RowGradients.zero`."""
        return tf.reduce_sum(self.gradients[0][:0])

    def of_keys(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns unique keys, int64 [keys], and the gradient of each, float32 [keys, dim]."""
        if self.pooling is not None:
            return ops.pooled_sums(self.pooling, self.gradients)
        keys, places = tf.unique(tf.reshape(self.keys, [-1]))
        return keys, tf.math.unsorted_segment_sum(self.gradients[0], places, tf.size(keys))

    def update_op(self, rate: tf.Tensor) -> None:
        """Updates the rows. `rate` is a float32 scalar."""
        update = self.layer().stored.update_op(
            self.ticket, self.pooling, self.gradients, rate, self.sends
        )
        if self.room is not None:
            self.room.note_update(update)


def keys_of_calls(calls: Sequence[CallGradients]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the concatenated `CallGradients.of_keys` of calls. Keys are unique within a call."""
    keys, sums = zip(*(call.of_keys() for call in calls), strict=True)
    return tf.concat(keys, 0), tf.concat(sums, 0)


def sums_of_rows(calls: Sequence[CallGradients], nonfinite: str) -> tf.Tensor:
    """Returns the gradient of each row, summed over all calls of a layer, float32 [rows, dim].

    Args:
      calls: calls of one layer.
      nonfinite: argument of `HetEmbedding`. Rows that an update skips count as zeros.
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
    """Gradients of a layer's rows from steps that were not applied yet.

    The gradients are in a queue of at most one element, in the process that runs the steps. A
    variable would be on a parameter server, if there are any.
    """

    def __init__(self, layer: Any):
        """Creates an empty accumulator."""
        self._layer = weakref.ref(layer)
        self._queue_op = functools.partial(_queue_op, f"accumulated/{uuid.uuid4().hex}")
        self._devices = ["/device:CPU:0"] if layer.table.is_local else cache_devices()
        layer.table.forgets(self)
        deferred_destroy.destroy_after(
            self, functools.partial(_destroy, self._queue_op, self._devices)
        )

    def clear(self) -> None:
        """Discards the gradients, since the rows were restored. No step may be running."""

        def drain() -> None:
            queue = self._queue_op()
            if int(tf.raw_ops.QueueSizeV2(handle=queue)):
                tf.raw_ops.QueueDequeueV2(handle=queue, component_types=_ROWS)

        visit(self._devices, drain, is_lost=lambda device, error: True)

    def add_op(
        self, calls: Sequence[CallGradients], rate: tf.Tensor, is_due: tf.Tensor, steps: int
    ) -> None:
        """Adds the gradients of a step. A due step updates the rows with the mean over `steps`."""
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
