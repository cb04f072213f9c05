"""How far an update moves the rows of a layer."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from het_tf.optimizers import Optimizer


class LearningRate(tf.Module):
    """The learning rate of a layer: a number that may follow `compile`'s, or a schedule.

    A module, so that `tf.train.Checkpoint` finds its variables.
    """

    def __init__(
        self,
        add_weight: Callable[..., keras.Variable],
        optimizer: Optimizer | None,
        takes_compiled: bool,
        compiled: float,
    ):
        """Makes the layer's variables.

        Args:
          add_weight: the layer's.
          optimizer: of the layer; None: not known yet.
          takes_compiled: whether it may come to be another one, with a number or a schedule.
          compiled: the rate with which the model was compiled; 0: it was not, or with a schedule.
        """
        super().__init__()
        self.schedule = _schedule_of(optimizer)
        self._iterations = self._own = self._compiled = None
        if self.schedule is not None or takes_compiled:
            self._iterations = add_weight(
                shape=(), initializer="zeros", dtype="int64", trainable=False, name="iterations"
            )
        if self.schedule is None or takes_compiled:
            known = optimizer is not None and self.schedule is None
            rate = optimizer.learning_rate if known else 0.0
            self._own, self._compiled = (
                add_weight(
                    shape=(),
                    initializer=keras.initializers.Constant(value),
                    dtype="float32",
                    autocast=False,
                    trainable=False,
                    name=name,
                )
                for name, value in (("learning_rate", rate), ("compiled_rate", compiled))
            )

    @property
    def is_there(self) -> bool:
        """Whether its variables can be assigned: a symbolic call of Keras makes them at its end."""
        made = self._iterations if self._own is None else self._own
        return hasattr(made.value, "assign")

    @property
    def variable(self) -> keras.Variable | None:
        """The learning rate where it is a number."""
        return self._own if self.schedule is None else None

    @property
    def compiled(self) -> keras.Variable | None:
        """What the rate of `compile`'s optimizer was when `variable` was last moved with it.

        If that was 0: minus its quotient by `variable` before. None where the rate is a schedule
        from the start; no step of a worker reads it.
        """
        return self._compiled

    @property
    def variables_of_its_own(self) -> list[keras.Variable]:
        """All of them."""
        made = [self._iterations, self._own, self._compiled]
        return [variable for variable in made if variable is not None]

    def take(self, optimizer: Optimizer) -> None:
        """Takes the rate of what the model is compiled with."""
        self.schedule = _schedule_of(optimizer)
        if self.schedule is None:
            self._own.value.assign(optimizer.learning_rate)

    def follow_op(self, now: tf.Tensor) -> tf.Tensor:
        """Moves `variable` by the factor by which `compile`'s rate moved to `now`; returns it."""
        own, before = self._own.value, self._compiled.value
        # What the two were is kept while the compiled one is 0, as minus their quotient.
        was_zero = tf.logical_and(before < 0, tf.equal(own, 0))
        rate = tf.where(was_zero, -now / before, tf.convert_to_tensor(own))
        rate = tf.where(before > 0, own * (now / before), rate)
        becomes_zero = tf.logical_and(before > 0, own > 0)
        kept = tf.where(becomes_zero, -before / own, tf.convert_to_tensor(before))
        before.assign(tf.where(now > 0, now, kept))
        own.assign(rate)
        return rate

    def step_op(self, compiled: keras.Variable | None = None) -> tf.Tensor:
        """The rate of a step.

        Args:
          compiled: what a rate that is a number has to follow in this step; None: nothing.
        """
        if self.schedule is not None:
            rate = tf.cast(self.schedule(self._iterations.value), tf.float32)
            self._iterations.value.assign_add(1)
            return rate
        if compiled is not None:
            return self.follow_op(tf.cast(compiled.value, tf.float32))
        return tf.convert_to_tensor(self._own.value)


def _schedule_of(
    optimizer: Optimizer | None,
) -> keras.optimizers.schedules.LearningRateSchedule | None:
    rate = None if optimizer is None else optimizer.learning_rate
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None
