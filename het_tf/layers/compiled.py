"""What a layer makes of the optimizer that its model is compiled with."""

from __future__ import annotations

import warnings
import weakref

import keras
import tensorflow as tf

from het_tf import _keras
from het_tf.layers import callers
from het_tf.layers.same import SameOptimizer


class CompiledOptimizer(SameOptimizer):
    """The part of `HetEmbedding` that takes that optimizer, or follows its learning rate.

    Attributes:
      optimizer: of the rows; None: it is to be the compiled one, which is not known yet.
    """

    # Of optimizers that others were followed after: their rates then, as `compiled_rate`.
    _left_rates: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, float]
    _compiled_rate_when_built: float

    def compiled_with(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Takes note of what the model is compiled with.

        `het_tf.keras.Model.compile` calls it; of a plain `keras.Model` the beginning of `fit`, or
        the first step, does.

        Raises:
          ValueError: the layer's optimizer is "same", and that one has no row form.
        """
        if self._takes_compiled:
            self._hear_of(optimizer)
            return
        if self.trainable:
            self._warn_of_what_rows_lack(optimizer)
        self._follow(optimizer)
        rate = _rate_of(optimizer)
        self._set_compiled_rate(rate or 0.0)
        own = self.optimizer.learning_rate
        if not isinstance(own, float):  # a schedule
            return
        if self.built:
            own = float(self.learning_rate.numpy())
        if rate == 0 and self.trainable:
            warnings.warn(
                f"compile's optimizer has a learning rate of 0, but layer {self.name} trains with"
                f" its own optimizer {type(self.optimizer).__name__}, at {own:g}: give it"
                ' optimizer="same" or trainable=False if it should not',
                stacklevel=3,
            )

    def _set_compiled_rate(self, rate: float) -> None:
        self._compiled_rate_when_built = rate
        if self.built and self.rate_variable is not None:
            self.compiled_rate.value.assign(rate)

    def _warn_of_what_rows_lack(self, optimizer: keras.optimizers.Optimizer) -> None:
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        own, schedules = self.optimizer, keras.optimizers.schedules
        lacks = {}
        has_schedule = not isinstance(optimizer.learning_rate, keras.Variable)
        if has_schedule and not isinstance(own.learning_rate, schedules.LearningRateSchedule):
            lacks["a schedule as learning_rate"] = 'give the layer one, or optimizer="same"'
        decays = optimizer.weight_decay and not self._is_excluded_from_decay(optimizer)
        if decays and not own.weight_decay:
            lacks[f"weight_decay={optimizer.weight_decay!r}"] = (
                'give the layer\'s optimizer one, or the layer optimizer="same"'
            )
        for name in ("clipnorm", "clipvalue"):
            if getattr(optimizer, name) and not own.clipnorm:
                lacks[f"{name}={getattr(optimizer, name)!r}"] = (
                    "give the layer's optimizer a clipnorm, which is of each row"
                )
        if optimizer.use_ema:
            lacks["use_ema=True"] = "rows have no average"
        for what, remedy in lacks.items():
            warnings.warn(
                f"compile's optimizer has {what}, which rows of layer {self.name} go without: they"
                f" have an optimizer of their own, {type(own).__name__}; {remedy}",
                stacklevel=4,
            )

    def turn_to(self, optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer | None:
        """Follows that optimizer's rate from where it was left: a layer may be in several models.

        Args:
          optimizer: that a model of the layer was compiled with.

        Returns:
          The one that was followed, if it is another: for `turn_back`.

        Raises:
          ValueError: the layer's optimizer is "same", and that one has no row form, or is another
            than the one with which functions that were traced have trained the table.
        """
        before = self._followed()
        if self._takes_compiled:
            self._take(optimizer)
            return None if before is optimizer else before
        if self._compiled_optimizer is None or before is optimizer:
            return None
        left = self._left_rates.get(optimizer, _rate_of(optimizer) or 0.0)
        self._follow(optimizer)
        self._set_compiled_rate(left)
        return before

    def turn_back(self, optimizer: keras.optimizers.Optimizer) -> None:
        """After `turn_to` another one for a while."""
        if self._takes_compiled:
            self._compiled_optimizer = weakref.ref(optimizer)
        else:
            self.turn_to(optimizer)

    def _follow(self, optimizer: keras.optimizers.Optimizer) -> None:
        before = self._followed()
        if before is not None and self.built and self.rate_variable is not None:
            self._left_rates[before] = float(self.compiled_rate.value)
        self._compiled_optimizer = weakref.ref(optimizer)

    def note_loaded(self) -> None:
        """What was loaded goes with the rate of the optimizer that is there, if not loaded, too."""
        optimizer = self._followed()
        rate = None if optimizer is None else _rate_of(optimizer)
        follows = rate and self.built and self.rate_variable is not None
        if follows and float(self.compiled_rate.value) > 0:
            self.compiled_rate.value.assign(rate)

    def follow_rate(self, rate: float) -> None:
        """Moves the learning rate by the factor by which that of `compile`'s optimizer moved.

        Args:
          rate: of `compile`'s optimizer. The factor is counted from when the model was compiled or
            from the last call.
        """
        if self.rate_variable is not None:
            self._rate.follow_op(tf.constant(rate, tf.float32))

    def _note_compiled(self, optimizer: keras.optimizers.Optimizer) -> None:
        known = self._compiled_optimizer
        if known is not None and known() is optimizer:
            return
        with tf.init_scope():
            if self._takes_compiled:
                self._check_is_for(optimizer)
                return
            # A rate that was loaded goes with the layer's own, which was loaded with it; unless the
            # optimizer is a new one, which has not made a step.
            steps = _keras.step_counter(getattr(optimizer, "inner_optimizer", optimizer))
            counts = self.rate_variable is not None and known is None
            counts = counts and int(tf.convert_to_tensor(steps)) > 0
            if counts and float(tf.convert_to_tensor(self.compiled_rate)):
                self._compiled_optimizer = weakref.ref(optimizer)
            else:
                self.compiled_with(optimizer)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """As of Keras, whose `fit` asks for them before it calls callbacks for an epoch.

        It asks the layer for nothing else before these may set another rate. So a layer that no
        `compile` has told of the model's optimizer takes note of it here.
        """
        model = None if self._takes_compiled else callers.compiled_model()
        if model is not None and callers.is_called_by(keras.Model.fit, model):
            self._note_compiled(model.optimizer)
        return super().metrics

    def _rate_op(self, steps: tf.Tensor | None) -> tf.Tensor:
        """The learning rate of a step; steps: as of `steps_op`."""
        here = self._followed_here()
        if self._takes_compiled:
            return self._same_rate_op(steps)
        rate = None if here is None else here.learning_rate
        return self._rate.step_op(rate if isinstance(rate, keras.Variable) else None)

    def _followed_here(self) -> keras.optimizers.Optimizer | None:
        """That of the model that runs or traces a step in this process."""
        model = callers.compiled_model() if self._table.is_local else None
        if model is None:
            return None
        self._note_compiled(model.optimizer)
        return model.optimizer

    @property
    def rate_variable(self) -> keras.Variable | None:
        """The variable of a rate of the layer's own; None: a schedule, or it is not built yet."""
        return self._rate.variable if self.built and not self._takes_compiled else None

    @property
    def compiled_rate(self) -> keras.Variable | None:
        """What the rate of `compile`'s optimizer was when `learning_rate` was last moved with it.

        If that was 0: minus its quotient by `learning_rate` before. None where there is no
        `rate_variable`.
        """
        return self._rate.compiled if self.rate_variable is not None else None

    @property
    def unread_rates(self) -> list[keras.Variable]:
        """Variables that no step of a worker reads."""
        if not self.built:
            return []
        return self._rate.variables_of_its_own if self._takes_compiled else [self._rate.compiled]

    @property
    def learning_rate(self) -> keras.Variable:
        """The learning rate, where it is a number. Assign to it, and the next step uses it.

        With "same" it is that of the compiled optimizer.

        Raises:
          ValueError: the layer is not built yet, or its learning rate follows a schedule.
        """
        rate = self._same_rate if self.built and self._takes_compiled else self.rate_variable
        if rate is None:
            raise ValueError(
                f"layer {self.name} has no learning rate until it is built, nor with a schedule"
            )
        return rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.learning_rate.assign(value)


def _rate_of(optimizer: keras.optimizers.Optimizer) -> float | None:
    """None: it follows a schedule."""
    rate = optimizer.learning_rate
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None
