"""Step count of an optimizer, if several workers count its steps."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from het_tf.compat import keras_internals
from het_tf.optimizers.joint_optimizer import innermost


class StepCount:
    """`iterations` of an optimizer, as one step reads and counts it.

    Keras reads and assigns the count, which loses steps of overlapping workers. Here, the assigned
    value minus the value read is added. Two rules depend on the worker's own steps:

    - With gradient accumulation, an optimizer acts at every n-th step of the worker. In `seen`,
      the multiple of n counts all workers' steps, for rates. The remainder counts own steps.
    - If the worker has its own slots, their bias correction (Adam) counts the worker's own steps.

    Attributes:
      variable: count variable of the optimizer.
      seen: int64 scalar, value of the variable in the step.
      less: int64 scalar, subtracted from the value while slots are updated. None: 0.
    """

    def __init__(
        self,
        variable: keras.Variable,
        shared: tf.Variable,
        own: tf.Variable | None = None,
        cycle: int = 0,
        own_slots: bool = False,
    ):
        """Reads the count, at the beginning of a step.

        Args:
          variable: count variable of the optimizer.
          shared: counts the steps of all workers.
          own: counts the worker's own steps. None: no rule needs them.
          cycle: number n of steps. 0: no gradient accumulation.
          own_slots: whether the worker has its own slots.
        """
        self.variable = variable
        self._shared = shared
        self._own = own
        self.seen = tf.identity(shared)
        if own is not None and cycle:
            self.seen += own % cycle - self.seen % cycle
        self.less = self.seen - own if own_slots else None

    def take(self, value: tf.Tensor) -> None:
        """Counts the steps by which `value`, which replaces `seen`, exceeds `seen`."""
        added = tf.cast(value, tf.int64) - self.seen
        self._shared.assign_add(added)
        if self._own is not None:
            self._own.assign_add(added)


def counted_variable(optimizer: Any) -> keras.Variable | None:
    """Returns an optimizer's count variable, if any. `iterations` may be a tensor instead."""
    return keras_internals.step_counter(innermost(optimizer))
