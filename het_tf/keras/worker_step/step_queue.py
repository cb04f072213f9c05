"""Queues of steps on a worker: steps whose lookups are in flight, and prepared steps."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from het_tf import ops
from het_tf.compat.function_graphs import handle_from_caller
from het_tf.runtime.broadcast import cluster_devices, visit

# One step in so many may wait for its rows before a window grows.
_STEPS_PER_WAIT = 100


class Window:
    """A bounded queue of prepared steps on every worker, kept between closures.

    `reserve_op` reserves a step's place before its preparation, and `take_op` frees the place. At
    most `width` steps are therefore in preparation or prepared. A second queue has the steps whose
    lookups were sent (`send_op`, `receive_op`). A closure that succeeds leaves this queue empty.

    The width of a worker's window grows from `start` to `size` as long as its steps wait
    (`adapt_op`). A closure keeps the places beyond the width occupied.

    Attributes:
      size: largest number of steps.
      width: int32 scalar, number of steps, in the graph of the closure (`open_op`).
    """

    width: tf.Tensor

    def __init__(self, size: int, start: int | None = None):
        """Creates a window. Creates no queue. `start` None: the width is `size`."""
        self.size = size
        self._start = size if start is None else start
        self._name = f"window/{uuid.uuid4().hex}"
        self._generation = ""
        self._made: set[str] = set()

    # Eager methods, on the coordinator.

    @contextlib.contextmanager
    def of(self, generation: str, goes_on: bool) -> Iterator[None]:
        """Context that selects the queue for closures that are scheduled and end in the context.

        Args:
          generation: name of the queue. Nested contexts need different names.
          goes_on: whether later contexts with the same name use the remaining steps.
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
        """Destroys the queues on all workers. Closures that are still running fail."""
        queues = [each for generation in self._made for each in self._queues(generation)]
        self._destroy([self._make_sent, *queues])
        visit(cluster_devices("worker"), self._destroy_pace, lambda device, error: True)
        self._made.clear()

    def _queues(self, generation: str) -> list[Callable[[], tf.Tensor]]:
        makes = (self._make_places, self._make_steps)
        return [functools.partial(make, generation) for make in makes]

    def _destroy(self, queues: Sequence[Callable[[], tf.Tensor]]) -> None:
        def destroy() -> None:
            for make in queues:
                # After an error, a step that waits for a server may still use the queue. TensorFlow
                # crashes if such a step is cancelled while it waits for a destroyed queue.
                tf.raw_ops.QueueCloseV2(handle=make(), cancel_pending_enqueues=True)
                tf.raw_ops.DestroyResourceOp(resource=make(), ignore_lookup_error=True)

        visit(cluster_devices("worker"), destroy, lambda device, error: True)

    # Methods for graphs.

    def open_op(self, keeps: bool) -> tf.Tensor:
        """Frees the places of steps that a failed closure left. Precedes the window's other ops.

        If a closure fails, TensorFlow cancels the other closures, but not reliably. A closure that
        waits for a place would wait forever.

        Args:
          keeps: whether to keep prepared steps. False if a closure contains its batches, because no
            other closure can use its steps.

        Returns:
          int32 scalar, number of prepared steps.
        """
        kept = self._size_op()
        if not keeps:
            dropped = tf.raw_ops.QueueDequeueManyV2(
                handle=self._steps(), n=kept, component_types=[tf.variant]
            )
            # The size is read again, because TensorFlow's graph passes were seen to remove control
            # dependencies that go through a constant.
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
            self.width, self._late = tf.unstack(self._pace_op())
            beyond = tf.zeros(tf.reshape(self.size - self.width, [1]), tf.bool)
            occupied = tf.raw_ops.QueueEnqueueManyV2(handle=self._places(), components=[beyond])
        with tf.control_dependencies([occupied]):
            return tf.identity(kept)

    def adapt_op(self, steps: tf.Tensor, waits: tf.Tensor) -> tf.Operation:
        """Widens the window of the next closures if more than one step in 100 waits.

        Args:
          steps: int32 scalar, number of steps of this closure.
          waits: int32 scalar, number of them that waited although others were prepared before.
        """
        late = tf.maximum(self._late + _STEPS_PER_WAIT * waits - steps, 0)
        grows = tf.logical_and(late >= 2 * _STEPS_PER_WAIT, self.width < self.size)
        width = self.width + tf.cast(grows, tf.int32)
        pace = tf.stack([width, tf.where(grows, 0, late)])
        return tf.raw_ops.AssignVariableOp(resource=self._make_pace(), value=pace)

    def send_op(self, components: Sequence[tf.Tensor]) -> tf.Operation:
        """Enqueues steps whose lookups were sent."""
        sent = tf.raw_ops.OptionalFromValue(components=components)
        return tf.raw_ops.QueueEnqueueV2(handle=self._sent, components=[sent])

    def send_end_op(self) -> tf.Operation:
        """Enqueues the end: this closure sends no more lookups."""
        return tf.raw_ops.QueueEnqueueV2(handle=self._sent, components=[tf.raw_ops.OptionalNone()])

    def receive_op(self) -> tf.Tensor:
        """Waits for the next element of `send_op` or `send_end_op`, and returns it.

        An optional of the components of `send_op`. Without a value: the end.
        """
        (sent,) = tf.raw_ops.QueueDequeueV2(handle=self._sent, component_types=[tf.variant])
        return sent

    def reserve_op(self) -> tf.Operation:
        """Reserves a place. Waits until a place is free."""
        return tf.raw_ops.QueueEnqueueV2(handle=self._places(), components=[tf.constant(True)])

    def put_op(self, components: Sequence[tf.Tensor]) -> tf.Operation:
        """Enqueues a prepared step, whose place was reserved."""
        step = tf.raw_ops.OptionalFromValue(components=components)
        return tf.raw_ops.QueueEnqueueV2(handle=self._steps(), components=[step])

    def put_end_op(self) -> tf.Operation:
        """Enqueues the end of the data in a place of its own."""
        with tf.control_dependencies([self.reserve_op()]):
            end = tf.raw_ops.OptionalNone()
            return tf.raw_ops.QueueEnqueueV2(handle=self._steps(), components=[end])

    def take_op(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Waits for the next step and frees its place.

        Returns:
          step: scalar variant, an optional of the components of `put_op`. Without a value: the end.
          waited: float64 scalar, waiting time in seconds. 0 if the step was prepared.
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

    def _pace_op(self) -> tf.Tensor:
        """Returns int32[2]: the width, and a count of the waits beyond one in 100 steps."""
        pace = self._make_pace()
        return tf.cond(
            tf.raw_ops.VarIsInitializedOp(resource=pace),
            lambda: tf.raw_ops.ReadVariableOp(resource=pace, dtype=tf.int32),
            lambda: tf.constant([self._start, 0]),
        )

    def _make_pace(self) -> tf.Tensor:
        with tf.device("/device:CPU:0"):
            return tf.raw_ops.VarHandleOp(
                dtype=tf.int32,
                shape=[2],
                container=ops.CONTAINER,
                shared_name=f"{self._name}/pace",
            )

    def _destroy_pace(self) -> None:
        tf.raw_ops.DestroyResourceOp(resource=self._make_pace(), ignore_lookup_error=True)

    def _make_sent(self) -> tf.Tensor:
        # Built in the graph, because a handle from the coordinator costs a message per closure.
        with tf.device("/device:CPU:0"):
            return tf.raw_ops.FIFOQueueV2(
                component_types=[tf.variant],
                shapes=[[]],  # for DequeueMany in open_op
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
        # Without a capacity, because the places bound the number of steps.
        return tf.raw_ops.FIFOQueueV2(
            component_types=[tf.variant],
            shapes=[[]],  # for DequeueMany in open_op
            container=ops.CONTAINER,
            shared_name=f"{self._name}/{generation}/steps",
        )

    def _make_places(self, generation: str) -> tf.Tensor:
        return tf.raw_ops.FIFOQueueV2(
            component_types=[tf.bool],
            shapes=[[]],  # for DequeueMany in open_op
            capacity=self.size,
            container=ops.CONTAINER,
            shared_name=f"{self._name}/{generation}/places",
        )
