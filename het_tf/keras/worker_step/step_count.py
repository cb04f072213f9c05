"""The number of steps that a model's optimizer counts, where several workers count it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from het_tf.compat import keras_internals
from het_tf.layers.embedding import embeddings_of


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


def innermost(optimizer: Any) -> Any:
    """The optimizer that steps: that of a `LossScaleOptimizer`, or the same."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if scales else optimizer


def counted_variable(optimizer: Any) -> keras.Variable | None:
    """In which it counts: `iterations` is none where it accumulates gradients. None: nowhere."""
    return keras_internals.step_counter(innermost(optimizer))


class RateFollower:
    """Moves the embeddings' rates on the servers, where no step may: steps of workers overlap."""

    def __init__(self, model: keras.Model):
        """Follows the rate of the optimizer that `model` is compiled with."""
        self._optimizer = model.optimizer
        self._layers = [x for x in embeddings_of(model) if x.rate_variable is not None]
        self._last: float | None = None

    def follow(self) -> None:
        """To be called after callbacks; reads one variable where they left it as it was."""
        rate = getattr(self._optimizer, "learning_rate", None)
        if not self._layers or not isinstance(rate, keras.Variable):
            return
        now = float(rate.numpy())
        if now != self._last:
            for layer in self._layers:
                layer.follow_rate(now)
            self._last = now


@contextlib.contextmanager
def rate_is_loaded(optimizer: Any) -> Iterator[Callable[[], bool]]:
    """Around a loading of weights; what it gives then says whether the optimizer's rate was loaded.

    Args:
      optimizer: of the model; None: it has none.
    """
    rate = keras_internals.learning_rate_variable(innermost(optimizer))
    if rate is None:
        yield lambda: True
        return
    loaded: list[bool] = []
    assign = rate.assign

    def note(*args: Any, **kwargs: Any) -> Any:
        loaded.append(True)
        return assign(*args, **kwargs)

    # In the instance: the variable itself is read by steps that workers make meanwhile.
    rate.assign = note
    try:
        yield lambda: bool(loaded)
    finally:
        vars(rate).pop("assign", None)
