"""The steps that a worker has begun to prepare and not begun to compute, kept between closures."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import tensorflow as tf

from het_tf._graph import handle_from_caller

Element = list[tf.Tensor]


class Window:
    """A queue of prepared steps on each worker, of a given number at most.

    Preparing takes a place first (`reserve_op`), so that no more than `size` steps are under way or
    wait; computing a step frees its place (`take_op`).
    """

    def __init__(self, size: int):
        """Describes the window, of `size` steps."""
        self._size = size
        self._name = f"window/{uuid.uuid4().hex}"
        self._types: list[tf.DType] = []
        self._generation = ""
        self._made: set[str] = set()

    def begin(self, generation: str) -> None:
        """Closures that are scheduled from now on use the queue of this name."""
        self._generation = generation
        self._made.add(generation)

    # Traced.

    def open_op(self) -> tf.Tensor:
        """Before anything else in a closure; what a closure that failed had taken is free again.

        TensorFlow cancels the other closures when one fails, but not reliably: one that waits for
        a place would wait for ever.

        Returns:
          int32 scalar: how many steps are prepared.
        """
        kept = self._size_op()
        left = tf.raw_ops.QueueSizeV2(handle=self._places()) - kept
        freed = tf.raw_ops.QueueDequeueManyV2(
            handle=self._places(), n=left, component_types=[tf.bool]
        )
        with tf.control_dependencies(freed):
            return tf.identity(kept)

    def reserve_op(self) -> tf.Operation:
        """Takes a place; waits for one."""
        return tf.raw_ops.QueueEnqueueV2(handle=self._places(), components=[tf.constant(True)])

    def put_op(self, components: Sequence[tf.Tensor]) -> tf.Operation:
        """Puts a prepared step in its place."""
        self._types = [component.dtype for component in components]
        more = tf.constant(True)
        return tf.raw_ops.QueueEnqueueV2(handle=self._steps(), components=[more, *components])

    def put_end_op(self) -> tf.Operation:
        """Says that no step follows, since the data has ended."""
        nothing = [nothing_of(dtype) for dtype in self._types]
        with tf.control_dependencies([self.reserve_op()]):
            return tf.raw_ops.QueueEnqueueV2(
                handle=self._steps(), components=[tf.constant(False), *nothing]
            )

    def take_op(self) -> tuple[tf.Tensor, tf.Tensor, Element]:
        """The next step; waits for it.

        Returns:
          more: bool scalar, whether there is one.
          waited: float64 scalar, seconds, 0 if it was there.
          components: of `put_op`.
        """
        ready = self._size_op() > 0
        with tf.control_dependencies([ready]):
            before = tf.timestamp()
        with tf.control_dependencies([before]):
            more, *components = tf.raw_ops.QueueDequeueV2(
                handle=self._steps(), component_types=[tf.bool, *self._types]
            )
        with tf.control_dependencies([more]):
            after = tf.timestamp()
            freed = tf.raw_ops.QueueDequeueV2(handle=self._places(), component_types=[tf.bool])
        with tf.control_dependencies(freed):
            more = tf.identity(more)
        return more, tf.where(ready, tf.zeros([], tf.float64), after - before), components

    # Eagerly, on a worker.

    def destroy(self) -> None:
        """Forgets the queues on the worker under which this is called."""
        for generation in self._made:
            for make in (self._make_places, self._make_steps):
                tf.raw_ops.DestroyResourceOp(resource=make(generation), ignore_lookup_error=True)

    @property
    def in_use(self) -> bool:
        """Whether there may be queues."""
        return bool(self._types and self._made)

    def forget(self) -> None:
        """After `destroy` on all workers."""
        self._made.clear()

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
            component_types=[tf.bool, *self._types],
            shared_name=f"{self._name}/{generation}/steps",
        )

    def _make_places(self, generation: str) -> tf.Tensor:
        return tf.raw_ops.FIFOQueueV2(
            component_types=[tf.bool],
            shapes=[[]],  # for open_op, which takes many
            capacity=self._size,
            shared_name=f"{self._name}/{generation}/places",
        )


def nothing_of(dtype: tf.DType) -> tf.Tensor:
    """A tensor of a dtype with nothing in it."""
    if dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=tf.constant(-1), max_num_elements=0, element_dtype=tf.int32
        )
    return tf.zeros([0], dtype)
