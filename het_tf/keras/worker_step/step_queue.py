"""Queues of steps on a worker: those whose lookups are under way, and those that are prepared."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from het_tf import ops
from het_tf.compat.function_graphs import handle_from_caller
from het_tf.runtime.broadcast import cluster_devices, visit


class Window:
    """A queue of prepared steps on each worker, of a given number at most, kept between closures.

    Preparing takes a place first (`reserve_op`), so that no more than `size` steps are under way or
    wait; computing a step frees its place (`take_op`). What is sent for a step passes through a
    queue of its own on the way (`send_op`, `receive_op`), which is empty when a closure has ended.

    Attributes:
      size: that number.
    """

    def __init__(self, size: int):
        """Describes the window, of `size` steps."""
        self.size = size
        self._name = f"window/{uuid.uuid4().hex}"
        self._generation = ""
        self._made: set[str] = set()

    # Eagerly, on the coordinator.

    @contextlib.contextmanager
    def of(self, generation: str, goes_on: bool) -> Iterator[None]:
        """Closures that are scheduled in this context, and end in it, use the queue of this name.

        Args:
          generation: that name; within another such context, one of its own.
          goes_on: whether its steps are for later ones with this name, too.
        """
        before, self._generation = self._generation, generation
        self._made.add(generation)
        try:
            yield
            if not goes_on:
                self._destroy(self._queues(generation))
                self._made.remove(generation)
        finally:
            self._generation = before

    def clear(self) -> None:
        """Forgets the queues on all workers, while no closure runs."""
        queues = [each for generation in self._made for each in self._queues(generation)]
        self._destroy([self._make_sent, *queues])
        self._made.clear()

    def _queues(self, generation: str) -> list[Callable[[], tf.Tensor]]:
        makes = (self._make_places, self._make_steps)
        return [functools.partial(make, generation) for make in makes]

    def _destroy(self, queues: Sequence[Callable[[], tf.Tensor]]) -> None:
        def destroy() -> None:
            for make in queues:
                tf.raw_ops.DestroyResourceOp(resource=make(), ignore_lookup_error=True)

        visit(cluster_devices("worker"), destroy, lambda device, error: True)

    # Traced.

    def open_op(self, keeps: bool) -> tf.Tensor:
        """Before anything else in a closure; what a closure that failed had taken is free again.

        Args:
          keeps: whether steps are kept that are prepared: those of a closure that brings its
            batches are for nobody else.

        TensorFlow cancels the other closures when one fails, but not reliably: one that waits for
        a place would wait for ever.

        Returns:
          int32 scalar: how many steps are prepared.
        """
        kept = self._size_op()
        if not keeps:
            dropped = tf.raw_ops.QueueDequeueManyV2(
                handle=self._steps(), n=kept, component_types=[tf.variant]
            )
            # Asked again: what waits for an op only by way of a constant may be made without it, as
            # TensorFlow's passes over a graph were seen to do.
            with tf.control_dependencies(dropped):
                kept = self._size_op()
        left = tf.raw_ops.QueueSizeV2(handle=self._places()) - kept
        freed = tf.raw_ops.QueueDequeueManyV2(
            handle=self._places(), n=left, component_types=[tf.bool]
        )
        self._sent = self._make_sent()
        forgotten = tf.raw_ops.QueueDequeueManyV2(
            handle=self._sent,
            n=tf.raw_ops.QueueSizeV2(handle=self._sent),
            component_types=[tf.variant],
        )
        with tf.control_dependencies([*freed, *forgotten]):
            return tf.identity(kept)

    def send_op(self, components: Sequence[tf.Tensor]) -> tf.Operation:
        """Passes on what was sent for steps."""
        sent = tf.raw_ops.OptionalFromValue(components=components)
        return tf.raw_ops.QueueEnqueueV2(handle=self._sent, components=[sent])

    def send_end_op(self) -> tf.Operation:
        """Says that no more will be sent in this closure."""
        return tf.raw_ops.QueueEnqueueV2(handle=self._sent, components=[tf.raw_ops.OptionalNone()])

    def receive_op(self) -> tf.Tensor:
        """What was sent next, an optional of the components of `send_op`; without a value: the end.

        Waits for it.
        """
        (sent,) = tf.raw_ops.QueueDequeueV2(handle=self._sent, component_types=[tf.variant])
        return sent

    def reserve_op(self) -> tf.Operation:
        """Takes a place; waits for one."""
        return tf.raw_ops.QueueEnqueueV2(handle=self._places(), components=[tf.constant(True)])

    def put_op(self, components: Sequence[tf.Tensor]) -> tf.Operation:
        """Puts a prepared step in its place."""
        step = tf.raw_ops.OptionalFromValue(components=components)
        return tf.raw_ops.QueueEnqueueV2(handle=self._steps(), components=[step])

    def put_end_op(self) -> tf.Operation:
        """Says that no step follows, since the data has ended."""
        with tf.control_dependencies([self.reserve_op()]):
            end = tf.raw_ops.OptionalNone()
            return tf.raw_ops.QueueEnqueueV2(handle=self._steps(), components=[end])

    def take_op(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The next step; waits for it.

        Returns:
          step: scalar variant, an optional of the components of `put_op`; without a value: the end.
          waited: float64 scalar, seconds, 0 if it was there.
        """
        ready = self._size_op() > 0
        with tf.control_dependencies([ready]):
            before = tf.timestamp()
        with tf.control_dependencies([before]):
            (step,) = tf.raw_ops.QueueDequeueV2(handle=self._steps(), component_types=[tf.variant])
        with tf.control_dependencies([step]):
            after = tf.timestamp()
            freed = tf.raw_ops.QueueDequeueV2(handle=self._places(), component_types=[tf.bool])
        with tf.control_dependencies(freed):
            step = tf.identity(step)
        return step, tf.where(ready, tf.zeros([], tf.float64), after - before)

    def _make_sent(self) -> tf.Tensor:
        # In the graph, since a handle from the coordinator costs each closure a message.
        with tf.device("/device:CPU:0"):
            return tf.raw_ops.FIFOQueueV2(
                component_types=[tf.variant],
                shapes=[[]],  # for open_op, which takes many
                container=ops.CONTAINER,
                shared_name=f"{self._name}/sent",
            )

    def _size_op(self) -> tf.Tensor:
        return tf.raw_ops.QueueSizeV2(handle=self._steps())

    def _steps(self) -> tf.Tensor:
        return handle_from_caller(f"{self._name}/steps", lambda: self._make_steps(self._generation))

    def _places(self) -> tf.Tensor:
        return handle_from_caller(
            f"{self._name}/places", lambda: self._make_places(self._generation)
        )

    def _make_steps(self, generation: str) -> tf.Tensor:
        # The places bound it.
        return tf.raw_ops.FIFOQueueV2(
            component_types=[tf.variant],
            shapes=[[]],  # for open_op, which takes many
            container=ops.CONTAINER,
            shared_name=f"{self._name}/{generation}/steps",
        )

    def _make_places(self, generation: str) -> tf.Tensor:
        return tf.raw_ops.FIFOQueueV2(
            component_types=[tf.bool],
            shapes=[[]],  # for open_op, which takes many
            capacity=self.size,
            container=ops.CONTAINER,
            shared_name=f"{self._name}/{generation}/places",
        )
