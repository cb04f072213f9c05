"""The number of steps that a model's optimizer counts, where several workers count it."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from het_tf.compat import keras_internals
from het_tf.optimizers.joint_optimizer import innermost


class StepCount:
    """`iterations` of an optimizer, as one step sees and counts it.

    Keras counts by reading and assigning, which loses counts when workers overlap: here what a step
    assigns is taken as what it adds. And some of what an optimizer does hangs on how many steps the
    worker has made. One that accumulates gradients acts at every n-th step of the worker, whose
    gradients they are: what a step sees is a multiple of n by all workers' steps, which rates and
    the like follow, and the remainder is the worker's own. And one whose slots are the worker's
    corrects a bias (Adam's) that they have after so many steps.

    Attributes:
      variable: the optimizer's.
      seen: int64 scalar, its value in the step.
      less: int64 scalar, by how much a step on slots sees less; None: it sees the same.
    """

    def __init__(
        self,
        variable: keras.Variable,
        shared: tf.Variable,
        own: tf.Variable | None = None,
        cycle: int = 0,
        own_slots: bool = False,
    ):
        """Reads it, when a step begins.

        Args:
          variable: the optimizer's.
          shared: in which the steps of all workers are counted.
          own: in which the worker's are; None: it does not matter which are.
          cycle: n; 0: gradients are not accumulated.
          own_slots: whether the worker has slots of its own.
        """
        self.variable = variable
        self._shared = shared
        self._own = own
        self.seen = tf.identity(shared)
        if own is not None and cycle:
            self.seen += own % cycle - self.seen % cycle
        self.less = self.seen - own if own_slots else None

    def take(self, value: tf.Tensor) -> None:
        """Counts what is added to `seen` where `value` takes its place."""
        added = tf.cast(value, tf.int64) - self.seen
        self._shared.assign_add(added)
        if self._own is not None:
            self._own.assign_add(added)


def counted_variable(optimizer: Any) -> keras.Variable | None:
    """In which it counts: `iterations` is none where it accumulates gradients. None: nowhere."""
    return keras_internals.step_counter(innermost(optimizer))
