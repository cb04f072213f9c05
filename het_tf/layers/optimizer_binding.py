"""Binding of a layer's rows to their optimizer: the layer's own, or that of its compiled model.

het_tf/optimizers/joint_optimizer.py decides when the rows are trained.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from het_tf.compat import keras_internals
from het_tf.layers.row_gradients import Accumulator, CallGradients, sums_of_rows
from het_tf.optimizers import JointOptimizer, Optimizer, row_forms
from het_tf.optimizers.joint_optimizer import innermost

Schedule = keras.optimizers.schedules.LearningRateSchedule


class LearningRate(tf.Module):
    """Rate of a layer's own optimizer: a variable, or a schedule of the layer's own steps.

    The class is a module so that `tf.train.Checkpoint` finds its variables.

    Attributes:
      schedule: the schedule. None: the rate is a number.
      variable: the rate. None: the rate follows a schedule.
    """

    def __init__(self, add_weight: Callable[..., keras.Variable], optimizer: Optimizer):
        """Creates the variables with `add_weight` of the layer."""
        super().__init__()
        rate = optimizer.learning_rate
        self.schedule = rate if isinstance(rate, Schedule) else None
        self._iterations = self._own = None
        if self.schedule is not None:
            self._iterations = add_weight(
                shape=(), initializer="zeros", dtype="int64", trainable=False, name="iterations"
            )
        else:
            self._own = add_weight(
                shape=(),
                initializer=keras.initializers.Constant(rate),
                dtype="float32",
                autocast=False,
                trainable=False,
                name="learning_rate",
            )

    @property
    def variable(self) -> keras.Variable | None:
        """The rate. None: the rate follows a schedule."""
        return self._own

    def step_op(self, factor: tf.Tensor | float) -> tf.Tensor:
        """Returns the rate of a step, float32 scalar. `factor` does not apply to schedules."""
        if self.schedule is None:
            return tf.convert_to_tensor(self._own.value) * factor
        rate = tf.cast(self.schedule(self._iterations.value), tf.float32)
        self._iterations.value.assign_add(1)
        return rate


class OptimizerBinding:
    """Binding of the rows of one `HetEmbedding` to their optimizer.

    Attributes:
      name: name of the layer.
      takes_compiled: whether the layer has `optimizer="same"`.
      optimizer: optimizer of the rows. None: that of a `JointOptimizer` that is not known yet.
      is_traced: whether a traced function looks up rows in the table.
    """

    def __init__(self, layer: Any, optimizer: Any):
        """Creates the binding of a layer. `optimizer` is the layer's argument."""
        self._layer = layer
        self.name = layer.name
        self.takes_compiled = optimizer is None or (
            isinstance(optimizer, str) and optimizer == "same"
        )
        self.optimizer: Optimizer | None = None if self.takes_compiled else row_forms.get(optimizer)
        self.is_traced = False
        self._rate: LearningRate | None = None
        self._joint: weakref.ref[JointOptimizer] | None = None
        self._accumulators: weakref.WeakKeyDictionary[JointOptimizer, Accumulator]
        self._accumulators = weakref.WeakKeyDictionary()

    def make_rate(self) -> LearningRate | None:
        """Creates the variables of a layer that is being built, if it has its own optimizer."""
        if not self.takes_compiled:
            self._rate = LearningRate(self._layer.add_weight, self.optimizer)
        return self._rate

    def take_config(self, optimizer: Any) -> None:
        """Restores the row form of "same" from the layer's config: serialized, or None."""
        if optimizer is not None:
            self.optimizer = row_forms.get(optimizer)

    @property
    def joint(self) -> JointOptimizer | None:
        """The `JointOptimizer` that last trained the rows, or will train them."""
        return None if self._joint is None else self._joint()

    # The choice of the optimizer.

    def offer(self, optimizer: JointOptimizer) -> None:
        """Takes the optimizer that a model of the layer is compiled with, if the rows lose nothing.

        Otherwise the rows keep their optimizer. A model that never trains needs no other.

        Raises:
          ValueError: the layer's optimizer is "same", and `optimizer` has no row form.
        """
        if not self.takes_compiled:
            if self._layer.trainable and self.joint is not optimizer:
                self._warn_of_what_rows_lack(optimizer)
            self._joint = weakref.ref(optimizer)
            return
        known = self.optimizer
        if known is not None and self._layer.trainable and not self._is_for(optimizer):
            is_kind = type(self._row_form(optimizer)) is type(known)
            if not self._is_replaceable() or not (is_kind or self._is_untrained()):
                return
        self.take(optimizer)

    def take(self, optimizer: JointOptimizer) -> None:
        """Prepares the rows for training by an optimizer. A frozen layer keeps its optimizer.

        Raises:
          ValueError: the optimizer has no row form, or traced functions have trained the table with
            another optimizer.
        """
        is_new = self.joint is not optimizer
        if not self.takes_compiled:
            if is_new:
                self.offer(optimizer)
            return
        if self.optimizer is None or (
            self._layer.trainable and (is_new or not self._is_for(optimizer))
        ):
            self._take_row_form(self._row_form(optimizer))
        self._joint = weakref.ref(optimizer)

    def check_takes(self, optimizer: JointOptimizer) -> None:
        """Checks, within a step, that an optimizer trains the rows.

        Raises:
          ValueError: another optimizer trains the rows, or none was known when rows were looked up.
        """
        if not self.takes_compiled:
            self._joint = weakref.ref(optimizer)
            return
        if self.optimizer is None:
            raise ValueError(
                f"rows of layer {self.name} were looked up before it was known what trains them:"
                " call optimizer.build(model.trainable_variables) before the first step"
            )
        if self.joint is optimizer and tf.executing_eagerly():
            return
        if not self._is_for(optimizer):
            raise self._why_not_taken(self.optimizer, self._row_form(optimizer, rate=0.0))
        self._joint = weakref.ref(optimizer)

    def _is_for(self, optimizer: JointOptimizer) -> bool:
        # The comparison ignores the rate, which a step of a worker cannot read.
        return self._row_form(optimizer, rate=0.0).spec() == self.optimizer.spec()

    def _row_form(self, optimizer: JointOptimizer, rate: float | None = None) -> Optimizer:
        decays = not self._is_excluded_from_decay(optimizer)
        try:
            return row_forms.row_form(
                innermost(optimizer), of_compile=True, decays=decays, rate=rate
            )
        except ValueError as error:
            raise ValueError(
                f"layer {self.name} takes the optimizer that its model is compiled with: {error}."
                ' Give the layer one of its own, such as HetEmbedding(..., optimizer="adagrad")'
            ) from error

    def _is_excluded_from_decay(self, optimizer: JointOptimizer) -> bool:
        # The name of the matrix of Keras's layer.
        anchor = self._layer.anchor if self._layer.built else None
        return keras_internals.excludes_from_weight_decay(
            innermost(optimizer), "embeddings", anchor
        )

    def _take_row_form(self, optimizer: Optimizer) -> None:
        layer, replaced = self._layer, self.optimizer
        self.optimizer = optimizer
        if not layer.built:
            return
        try:
            if not layer.stored.exists:
                layer.make_table()
            elif replaced is None:
                self._put_another_table()
            elif optimizer.spec() != replaced.spec():
                # Traced functions would continue to use the old table.
                if not self._is_replaceable():
                    raise self._why_not_taken(replaced, optimizer)
                self._put_another_table()
        except BaseException:
            self.optimizer = replaced
            raise

    def _put_another_table(self) -> None:
        """Creates a table with the same rows. Slots of another kind get their initial values."""
        replaced = self._layer.table
        self._layer.make_table(replaced)
        self.is_traced = False
        replaced.destroy()

    def _is_replaceable(self) -> bool:
        return not self._layer.built or not self.is_traced or self._is_untrained()

    def _is_untrained(self) -> bool:
        if not self._layer.built:
            return True
        self._layer.flush()
        return not any(rows.clocks.any() for rows in self._layer.table.export_parts())

    def _why_not_taken(self, known: Optimizer, new: Optimizer) -> ValueError:
        return ValueError(
            f'layer {self.name} has optimizer="same" and a table of {known}, which functions that'
            f" were traced use, so that it cannot take {new}: make the model once more, compile it"
            " with that, and give its layer the rows, with rows = old.table.export():"
            " new.table.assign(rows.keys, rows.values)"
        )

    def _warn_of_what_rows_lack(self, joint: JointOptimizer) -> None:
        optimizer, own = innermost(joint), self.optimizer
        lacks = {}
        follows_schedule = keras_internals.learning_rate_variable(optimizer) is None
        if follows_schedule and not isinstance(own.learning_rate, Schedule):
            lacks["a schedule as learning_rate"] = 'give the layer one, or optimizer="same"'
        decays = optimizer.weight_decay and not self._is_excluded_from_decay(joint)
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
                stacklevel=5,
            )
        if joint.base_learning_rate == 0 and isinstance(own.learning_rate, float):
            rate = own.learning_rate
            if self.rate_variable is not None:
                rate = float(tf.convert_to_tensor(self.rate_variable.value))
            warnings.warn(
                f"compile's optimizer has a learning rate of 0, but layer {self.name} trains with"
                f" its own optimizer {type(own).__name__}, at {rate:g}: give it"
                ' optimizer="same" or trainable=False if it should not',
                stacklevel=5,
            )

    # The learning rate.

    @property
    def rate_variable(self) -> keras.Variable | None:
        """The variable of the layer's own rate. None: no own rate, a schedule, or not built yet."""
        return None if self._rate is None else self._rate.variable

    @property
    def learning_rate(self) -> keras.Variable:
        """The variable of the learning rate.

        Raises:
          ValueError: the layer is not built yet, or its learning rate follows a schedule.
        """
        rate = self.rate_variable
        if self.takes_compiled and self.joint is not None:
            rate = keras_internals.learning_rate_variable(innermost(self.joint))
        if rate is None:
            raise ValueError(
                f"layer {self.name} has no learning rate until it is built, nor with a schedule"
            )
        return rate

    def load_rate(self, moved_with: float) -> None:
        """Corrects a rate from a file that was written before 2026-11-27.

        In such files, the layer's rate had changed with the rate of `compile`'s optimizer.

        Args:
          moved_with: rate of that optimizer. If 0: minus its earlier rate over the layer's rate.
        """
        base = None if self.joint is None else self.joint.base_learning_rate
        rate = self.rate_variable
        if base and moved_with > 0:
            rate.assign(rate.value * (base / moved_with))
        elif base and moved_with < 0:
            rate.assign(base / -moved_with)

    # Methods of `het_tf.optimizers.joint_optimizer.TrainedRows`.

    def rate(self, optimizer: JointOptimizer | None) -> tf.Tensor:
        """Returns the learning rate of a step, float32 scalar. None: the layer's own rate.

        Raises:
          ValueError: `optimizer` is None, and the layer has no rate of its own.
        """
        if not self.takes_compiled:
            return self._rate.step_op(1.0 if optimizer is None else optimizer.factor())
        if optimizer is None:
            raise ValueError(
                f"layer {self.name} has no optimizer of its own, since it takes that of a"
                " JointOptimizer, and another one is applied here. Give the layer its own, such as"
                ' HetEmbedding(..., optimizer="adagrad"); or make the optimizer'
                " het_tf.optimizers.JointOptimizer(optimizer), as het_tf.keras.Model.compile does"
            )
        return tf.cast(tf.convert_to_tensor(innermost(optimizer).learning_rate), tf.float32)

    def sums(self, calls: Sequence[CallGradients]) -> tf.Tensor:
        """Returns the gradient of each row, summed over all calls, float32 [rows, dim]."""
        return sums_of_rows(calls, self._layer.nonfinite)

    def train(self, calls: Sequence[CallGradients], rate: tf.Tensor) -> None:
        """Updates the rows of each call."""
        for call in calls:
            call.update_op(rate)

    def accumulate(
        self, calls: Sequence[CallGradients], rate: tf.Tensor, is_due: tf.Tensor, steps: int
    ) -> None:
        """Accumulates gradients. A due step trains the rows with their mean over `steps` steps."""
        joint = self.joint
        if joint not in self._accumulators:
            self._accumulators[joint] = Accumulator(self._layer)
        self._accumulators[joint].add_op(calls, rate, is_due, steps)

    def check_accumulates(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Raises a ValueError if the layer's gradients cannot be accumulated."""
        if cowclip := self.optimizer.cowclip:
            raise ValueError(
                f"layer {self.name} cannot be trained with cowclip={cowclip!r} and"
                f" gradient_accumulation_steps={optimizer.gradient_accumulation_steps!r} together:"
                " what is accumulated does not say how often an id came"
            )
