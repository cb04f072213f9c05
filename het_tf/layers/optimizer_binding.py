"""A layer with `optimizer="same"`: its rows have the optimizer that its model is compiled with."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from het_tf import optimizers
from het_tf.compat import call_stack, keras_internals
from het_tf.layers import row_optimizers
from het_tf.optimizers import Optimizer
from het_tf.tables.table import EmbeddingTable


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


class SameOptimizer:
    """The part of `HetEmbedding` that takes that optimizer."""

    built: bool
    name: str
    trainable: bool
    anchor: keras.Variable
    optimizer: optimizers.Optimizer | None
    _takes_compiled: bool
    _compiled_optimizer: weakref.ref | None
    _rate: LearningRate
    _table: EmbeddingTable
    _is_traced: bool
    _make_table: Callable[..., None]
    _followed_here: Callable[[], keras.optimizers.Optimizer | None]
    flush: Callable[[], None]
    has_table: bool

    def _take(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Takes it for the steps that follow; a frozen layer that has rows makes none.

        Raises:
          ValueError: it has no row form, or is another than the one with which functions that were
            traced have trained the table.
        """
        is_new = self._followed() is not optimizer
        if self.optimizer is None or (self.trainable and (is_new or not self._is_for(optimizer))):
            self._take_optimizer(self._row_form(optimizer))
        self._compiled_optimizer = weakref.ref(optimizer)

    def _hear_of(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Takes it if nothing is lost by that: a model that never trains needs no other."""
        known = self.optimizer
        if known is not None and self.trainable and not self._is_for(optimizer):
            is_kind = type(self._row_form(optimizer)) is type(known)
            if not self._is_replaceable() or not (is_kind or self._is_untrained()):
                return
        self._take(optimizer)

    def _check_is_for(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Within a step, when it is too late to take another one."""
        if not self._is_for(optimizer):
            raise self._why_not_taken(self.optimizer, self._row_form(optimizer))
        self._compiled_optimizer = weakref.ref(optimizer)

    def _is_for(self, optimizer: keras.optimizers.Optimizer) -> bool:
        return self._row_form(optimizer).spec() == self.optimizer.spec()

    def _row_form(self, optimizer: keras.optimizers.Optimizer) -> optimizers.Optimizer:
        decays = not self._is_excluded_from_decay(optimizer)
        try:
            return row_optimizers.row_form(optimizer, of_compile=True, decays=decays)
        except ValueError as error:
            raise ValueError(
                f"layer {self.name} takes the optimizer that its model is compiled with: {error}."
                ' Give the layer one of its own, such as HetEmbedding(..., optimizer="adagrad")'
            ) from error

    def _is_excluded_from_decay(self, optimizer: keras.optimizers.Optimizer) -> bool:
        # Keras's layer has its matrix under this name.
        anchor = self.anchor if self.built else None
        return keras_internals.excludes_from_weight_decay(_inner(optimizer), "embeddings", anchor)

    def _take_optimizer(self, optimizer: optimizers.Optimizer) -> None:
        before, self.optimizer = self.optimizer, optimizer
        if not self.built:
            return
        try:
            if not self.has_table:
                self._make_table()
            elif before is None:
                self._put_another_table()
            elif optimizer.spec() != before.spec():
                self._replace_table(before)
        except BaseException:
            self.optimizer = before
            raise
        self._rate.take(optimizer)

    def _replace_table(self, before: optimizers.Optimizer) -> None:
        """Functions that were traced would go on with the table that is there."""
        if not self._is_replaceable():
            raise self._why_not_taken(before, self.optimizer)
        self._put_another_table()

    def _put_another_table(self) -> None:
        """Makes a table with the rows; slots of another kind are as before their first update."""
        replaced = self._table
        self._make_table(replaced)
        self._is_traced = False
        replaced.destroy()

    def _is_replaceable(self) -> bool:
        return not self.built or not self._is_traced or self._is_untrained()

    def _is_untrained(self) -> bool:
        if not self.built:
            return True
        self.flush()
        return not any(rows.clocks.any() for rows in self._table.export_parts())

    def _why_not_taken(self, is_for: optimizers.Optimizer, new: optimizers.Optimizer) -> ValueError:
        return ValueError(
            f'layer {self.name} has optimizer="same" and a table of {is_for}, which functions that'
            f" were traced use, so that it cannot take {new}: make the model once more, compile it"
            " with that, and give its layer the rows, with rows = old.table.export():"
            " new.table.assign(rows.keys, rows.values)"
        )

    def compiled_config(self) -> Any:
        """What "same" is, serialized, or None where nobody knows yet; for `take_compiled`."""
        optimizer = self.optimizer
        if optimizer is None:
            model = call_stack.compiled_model()
            optimizer = None if model is None else self._row_form(model.optimizer)
        return None if optimizer is None else keras.saving.serialize_keras_object(optimizer)

    def take_compiled(self, optimizer: Any) -> None:
        """What "same" was when the layer's config was made: serialized, or None where it is not."""
        if optimizer is not None:
            self.optimizer = row_optimizers.get(optimizer)

    def take_caller_s(self) -> None:
        """Takes that of the model that trains; where none is known yet, of the one that calls.

        A plain `keras.Model` tells nobody that it was compiled. To be called before anything is
        traced that looks up in the table.
        """
        if not self._takes_compiled or not self.built or not self._rate.is_there:
            return
        fitted = call_stack.fitted_model()
        is_new = self.optimizer is None or self._compiled_optimizer is None
        called = call_stack.compiled_model() if fitted is None and is_new else None
        with tf.init_scope():
            if fitted is not None:
                self._take(fitted.optimizer)
            elif called is not None:
                self._hear_of(called.optimizer)

    def _followed(self) -> keras.optimizers.Optimizer | None:
        return None if self._compiled_optimizer is None else self._compiled_optimizer()

    def steps_op(self) -> tf.Tensor | None:
        """How many steps the optimizer of "same" counts, int64 scalar, before it counts this one.

        None: the layer has an optimizer of its own, or follows none that is there.
        """
        followed = self._followed_here() or self._followed()
        if not self._takes_compiled or followed is None:
            return None
        # Read now: the optimizer may count before the rows are trained.
        return tf.convert_to_tensor(keras_internals.step_counter(_inner(followed)).value)

    @property
    def _same_rate(self) -> keras.Variable | None:
        """The variable of that optimizer's rate; None: it follows a schedule."""
        followed = self._followed()
        if followed is None:
            return self._rate.variable
        return keras_internals.learning_rate_variable(_inner(followed))

    def _same_rate_op(self, steps: tf.Tensor | None) -> tf.Tensor:
        """The rate of a step: that of the optimizer, or what was known of it if it is gone."""
        followed = self._followed()
        if followed is None or steps is None:
            return self._rate.step_op()
        rate = keras_internals.learning_rate_of(_inner(followed))
        now = rate.value if isinstance(rate, keras.Variable) else rate(steps)
        return tf.cast(now, tf.float32)


def _inner(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return getattr(optimizer, "inner_optimizer", optimizer)


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
            steps = keras_internals.step_counter(getattr(optimizer, "inner_optimizer", optimizer))
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
        model = None if self._takes_compiled else call_stack.compiled_model()
        if model is not None and call_stack.is_called_by(keras.Model.fit, model):
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
        model = call_stack.compiled_model() if self._table.is_local else None
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
