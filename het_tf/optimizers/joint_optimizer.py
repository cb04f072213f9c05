"""One optimizer step for dense variables and for the rows of embedding tables.

A backward pass only deposits the gradients of rows. The gradient of a layer's scalar weight, its
`Anchor`, represents them. The optimizer that applies the anchor's gradient trains the rows.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import keras
import tensorflow as tf

from het_tf.compat import keras_internals
from het_tf.compat.function_graphs import ancestors_of, is_from_outside_branch
from het_tf.compat.tensorflow_internals import SameCheckpointNode

_DEPOSIT = "_het_deposit"  # Attribute of the tensor that is the anchor's gradient.
_MOST_PENDING = 100  # Largest number of eager deposits of a layer.


class RowGradients(Protocol):
    """Gradients of the rows of one call of a layer."""

    call: Any

    def map(self, change: Callable[[tf.Tensor], tf.Tensor]) -> RowGradients:
        """Returns the gradients with `change` applied to each tensor."""
        ...

    def shared(self, share: tf.Tensor) -> RowGradients:
        """Returns the gradients of a synchronous step, which sends their updates at its end."""
        ...

    def are_finite(self) -> tf.Tensor:
        """Returns whether all gradients are finite, bool scalar."""
        ...

    def zero(self) -> tf.Tensor:
        """Returns a new float32 scalar 0 that is not a constant of the graph.

        A `LossScaleOptimizer` would omit a branch over a constant.
        """
        ...


class TrainedRows(Protocol):
    """Interface of one layer's rows for the optimizer that trains them."""

    name: str

    def take(self, optimizer: JointOptimizer) -> None:
        """Prepares the rows for training by an optimizer. Raises a ValueError if they cannot."""

    def check_takes(self, optimizer: JointOptimizer) -> None:
        """Raises a ValueError if the current step cannot train the rows with an optimizer."""

    def rate(self, optimizer: JointOptimizer | None) -> tf.Tensor:
        """Returns the learning rate of a step, float32 scalar. None: the layer's own rate."""
        ...

    def sums(self, calls: Sequence[Any]) -> tf.Tensor:
        """Returns the gradient of each row, summed over all calls, float32 [rows, dim]."""
        ...

    def train(self, calls: Sequence[Any], rate: tf.Tensor) -> None:
        """Updates the rows of each call."""

    def accumulate(
        self, calls: Sequence[Any], rate: tf.Tensor, is_due: tf.Tensor, steps: int
    ) -> None:
        """Accumulates gradients. A due step trains the rows with their mean over `steps` steps."""

    def check_accumulates(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Raises a ValueError if the layer's gradients cannot be accumulated."""


_Rows = tuple[TrainedRows, list[Any]]  # Rows of a layer, and gradients of its calls.


class Anchor(keras.Variable):
    """Scalar weight whose gradient represents the gradients of a layer's rows.

    The value has no meaning. When an optimizer applies the gradient of a variable with
    `overwrite_with_gradient`, Keras assigns the gradient to the variable. `assign` therefore trains
    the rows under every Keras optimizer. Other assignments and reads, such as by `get_weights` and
    `.h5` files, would omit the table and are refused.
    """

    def __init__(self, rows: TrainedRows):
        """Creates the anchor of a layer's rows."""
        self._rows = weakref.ref(rows)
        self.layer_name = rows.name
        self._pending: deque[tuple[tf.Tensor, Any]] = deque(maxlen=_MOST_PENDING)
        # In some scopes, Keras delays initial values that are not initializers.
        zeros = keras.initializers.Zeros()
        super().__init__(zeros, shape=(), dtype="float32", autocast=False, name="anchor")

    @property
    def rows(self) -> TrainedRows:
        """The rows of the layer."""
        rows = self._rows()
        if rows is None:
            raise ValueError(f"layer {self.layer_name} is gone, and its rows with it")
        return rows

    @property
    def overwrite_with_gradient(self) -> bool:
        """Whether an optimizer assigns the gradient instead of stepping the scalar."""
        return not any(anchor is self for anchor in _stepped_anchors.get())

    def deposit(self, gradients: RowGradients) -> tf.Tensor:
        """Keeps the gradients of a backward pass for the optimizer.

        Returns:
          The gradient of the anchor, a float32 scalar. `take` finds the deposit by this gradient.
          In a graph it is 0. Eagerly it is so small that its square is 0.
        """
        if not tf.executing_eagerly():
            gradient = gradients.zero()
        else:
            # Only the value of an eager sum identifies the tensors that were added.
            gradient = tf.constant(2.0**-80 * (1.0 + random.random()), tf.float32)
            self._pending.append((gradient, gradients))
        setattr(gradient, _DEPOSIT, (self, gradients))
        return gradient

    def take(self, gradient: Any) -> list[Any]:
        """Takes the deposits that a gradient of the anchor represents.

        Raises:
          ValueError: the gradient represents no deposit, or the rows of a call were updated
            already.
        """
        if tf.is_symbolic_tensor(gradient):
            deposits = [getattr(t, _DEPOSIT) for t in ancestors_of(gradient, _is_deposit)]
            taken = [kept for owner, kept in deposits if owner is self]
        else:
            taken = self._take_eagerly(float(gradient))
        if not taken:
            raise ValueError(
                f"the gradient of layer {self.layer_name} did not come from its backward pass as"
                " the optimizer got it: another optimizer has applied it already, or it was"
                " accumulated, or clipped or scaled eagerly."
                " het_tf.optimizers.JointOptimizer(inner) accumulates, clips and scales the"
                " gradients of rows with the others"
            )
        graph = tf.compat.v1.get_default_graph()
        for deposit in taken:
            if not deposit.call.note_training(graph):
                raise ValueError(
                    f"rows of layer {self.layer_name} were updated already, by the gradient of"
                    " another loss of the same call: add the losses and ask for the gradient of"
                    " the sum"
                )
        return taken

    def _take_eagerly(self, gradient: float) -> list[Any]:
        """Takes the adjacent deposits of one backward pass, whose sum is `gradient`."""
        pending = list(self._pending)
        values = [float(tensor) for tensor, _ in pending]
        for first in range(len(pending)):
            total = 0.0
            for last in range(first, len(pending)):
                total += values[last]
                # TensorFlow rounds its sum to float32 at each addition.
                if abs(total - gradient) <= 1e-7 * (last - first) * total:
                    self._pending.clear()
                    self._pending.extend(pending[:first] + pending[last + 1 :])
                    return [kept for _, kept in pending[first : last + 1]]
        return []

    def assign(self, value: Any) -> None:
        """Trains the rows with the layer's own optimizer if `value` is a gradient of the anchor.

        Raises:
          ValueError: see `take`; or `value` is not a gradient.
        """
        if not self.overwrite_with_gradient:  # `stepped`: an optimizer steps the scalar.
            return
        if not tf.is_tensor(value):
            self.numpy()
        if is_from_outside_branch(value):
            raise ValueError(
                f"the gradient of layer {self.layer_name} is applied within a branch of tf.cond, as"
                " a LossScaleOptimizer does: make the optimizer"
                " het_tf.optimizers.JointOptimizer(optimizer), which unscales rows"
            )
        rows = self.rows
        rows.train(self.take(value), rows.rate(None))

    def numpy(self) -> NoReturn:
        """Not supported. Raises a ValueError."""
        raise ValueError(
            f"the table of layer {self.layer_name} is no Keras weight: get_weights, set_weights,"
            " .h5 files and EarlyStopping(restore_best_weights=True), which calls get_weights, have"
            " no place for it. Use save_weights(path.weights.h5), save(path.keras),"
            " ModelCheckpoint(path, save_best_only=True), tf.train.Checkpoint, or the layer's"
            " table.export() and import_()"
        )

    def __array__(self, dtype: Any = None) -> NoReturn:
        """Not supported. Raises a ValueError."""
        self.numpy()


_stepped_anchors: contextvars.ContextVar[tuple[Anchor, ...]] = contextvars.ContextVar(
    "het_tf_stepped_anchors", default=()
)


@contextlib.contextmanager
def stepped(variables: Sequence[Any]) -> Iterator[None]:
    """Context in which an optimizer steps anchors like other variables, without assignments."""
    anchors = tuple(variable for variable in variables if isinstance(variable, Anchor))
    token = _stepped_anchors.set(anchors)
    try:
        yield
    finally:
        _stepped_anchors.reset(token)


def _is_deposit(tensor: tf.Tensor) -> bool:
    return hasattr(tensor, _DEPOSIT)


class StepEnd(Protocol):
    """The end of a synchronous step, between the gradients and the step of the optimizer.

    Attributes:
      share: float32 scalar, by which the gradients of rows are multiplied.
    """

    share: tf.Tensor

    def mean_of(self, gradients: Sequence[Any]) -> list[Any]:
        """Sends the updates of the step's rows. Returns the means of gradients over all workers."""
        ...


_step_end: contextvars.ContextVar[StepEnd | None] = contextvars.ContextVar(
    "het_tf_step_end", default=None
)


@contextlib.contextmanager
def ending_with(end: StepEnd) -> Iterator[None]:
    """Context of a synchronous step, which an optimizer ends."""
    token = _step_end.set(end)
    try:
        yield
    finally:
        _step_end.reset(token)


_compiled: contextvars.ContextVar[JointOptimizer | None] = contextvars.ContextVar(
    "het_tf_compiled_optimizer", default=None
)


@contextlib.contextmanager
def compiled_with(optimizer: JointOptimizer) -> Iterator[None]:
    """Context in which a model that is compiled with an optimizer calls its layers.

    A Keras layer has no access to the model that calls it. In nested models, the optimizer of the
    outermost model applies.
    """
    token = _compiled.set(_compiled.get() or optimizer)
    try:
        yield
    finally:
        _compiled.reset(token)


def compiled_optimizer() -> JointOptimizer | None:
    """Returns the optimizer of the compiled model that is being called, or None."""
    return _compiled.get()


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer inside all wrappers, or `optimizer` if it is not a wrapper."""
    while isinstance(optimizer, (JointOptimizer, keras.optimizers.LossScaleOptimizer)):
        optimizer = optimizer.inner_optimizer
    return optimizer


def scaler_of(optimizer: Any) -> keras.optimizers.LossScaleOptimizer | None:
    """Returns the `LossScaleOptimizer` that an optimizer is or wraps, or None."""
    while isinstance(optimizer, JointOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None


# Optimizers that a `JointOptimizer` has built.
_built: weakref.WeakSet[keras.optimizers.Optimizer] = weakref.WeakSet()


def _of_inner(name: str) -> property:
    """Returns a property for an attribute of the wrapped optimizer."""

    def get(self: JointOptimizer) -> Any:
        return getattr(innermost(self), name)

    def set(self: JointOptimizer, value: Any) -> None:
        # Keras's constructor sets the attributes before `inner_optimizer` is set.
        if "inner_optimizer" in vars(self):
            setattr(innermost(self), name, value)

    return property(get, set)


@keras.saving.register_keras_serializable("het_tf")
class JointOptimizer(SameCheckpointNode, keras.optimizers.Optimizer):
    """Optimizer that trains dense variables and embedding rows of a model in one step.

    The inner optimizer updates the dense variables. The row form of the inner optimizer trains the
    rows of layers with `optimizer="same"`. Other layers train their rows with their own optimizer.
    Rows take part in all operations of the inner optimizer on a whole step: the norm of
    `global_clipnorm` includes them, `gradient_accumulation_steps` accumulates them, and
    `loss_scale_factor` or a `LossScaleOptimizer` unscales or skips them.

    The rate of a layer's own optimizer is multiplied by the factor by which the inner optimizer's
    rate has changed since the `JointOptimizer` was created. Callbacks that change the rate of the
    model's optimizer therefore change the rates of all rows.

    `het_tf.keras.Model.compile` wraps its optimizer automatically. A plain `keras.Model` and a
    custom training loop need the wrapper for all of the above:

        optimizer = het_tf.optimizers.JointOptimizer(keras.optimizers.Adam(global_clipnorm=1.0))
        optimizer.build(model.trainable_variables)
        with tf.GradientTape() as tape:
            loss = loss_of(model(x), y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    Without the wrapper, a Keras optimizer that applies the gradient of a layer's weight trains the
    rows with the layer's own optimizer, at the layer's own rate.

    Attributes:
      inner_optimizer: the wrapped optimizer.
      base_learning_rate: the inner rate at which layers use their own rates unchanged. None: the
        inner optimizer has no rate of its own, or follows a schedule.
    """

    inner_optimizer: keras.optimizers.Optimizer
    _built_with: list[Any]

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        base_learning_rate: float | None = None,
        name: str | None = None,
    ):
        """Wraps an optimizer.

        Args:
          inner_optimizer: a Keras optimizer that is not built yet. Wrap a `LossScaleOptimizer`, not
            the reverse: `JointOptimizer(LossScaleOptimizer(inner))`.
          base_learning_rate: the inner rate at which layers use their own rates unchanged. None:
            the current rate of the inner optimizer.
          name: name of the optimizer. None: the name of the inner optimizer.

        Raises:
          ValueError: `inner_optimizer` is not a Keras optimizer, or is a `JointOptimizer`.
        """
        is_optimizer = isinstance(inner_optimizer, keras.optimizers.Optimizer)
        if not is_optimizer or isinstance(inner_optimizer, JointOptimizer):
            raise ValueError(
                "inner_optimizer must be an optimizer of keras.optimizers, for example"
                f" keras.optimizers.Adam(), not {inner_optimizer!r}"
            )
        super().__init__(learning_rate=0.0, name=name or inner_optimizer.name)
        # Assigned to `__dict__`, because Keras tracks attributes that are set normally.
        self.__dict__["inner_optimizer"] = inner_optimizer
        self.__dict__["_built_with"] = []
        step = innermost(inner_optimizer)
        rate = keras_internals.learning_rate_variable(step)
        # In a MultiOptimizer, the inner optimizers have the rates.
        has_rate = rate is not None and not isinstance(step, keras.optimizers.MultiOptimizer)
        if base_learning_rate is None and has_rate:
            base_learning_rate = float(rate.numpy())
        self.base_learning_rate = base_learning_rate

    def checkpoint_node(self) -> Any:
        """Returns the inner optimizer, which replaces this one in a `tf.train.Checkpoint`."""
        return vars(self).get("inner_optimizer")

    @property
    def variables(self) -> list[keras.Variable]:
        """The inner optimizer's variables."""
        return self.inner_optimizer.variables

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        """The number of steps of the inner optimizer."""
        return self.inner_optimizer.iterations

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Applies gradients as `keras.optimizers.Optimizer` does. Returns `iterations`."""
        super().apply_gradients(grads_and_vars)
        return self.iterations

    weight_decay = _of_inner("weight_decay")
    clipnorm = _of_inner("clipnorm")
    clipvalue = _of_inner("clipvalue")
    global_clipnorm = _of_inner("global_clipnorm")
    use_ema = _of_inner("use_ema")
    ema_momentum = _of_inner("ema_momentum")
    ema_overwrite_frequency = _of_inner("ema_overwrite_frequency")
    gradient_accumulation_steps = _of_inner("gradient_accumulation_steps")
    loss_scale_factor = _of_inner("loss_scale_factor")

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, as in Keras's optimizers.

        Raises:
          ValueError: a new `LossScaleOptimizer` sets `loss_scale_factor` to None, to wrap this one.
        """
        if name == "loss_scale_factor" and value is None and "inner_optimizer" in vars(self):
            raise ValueError(
                "a LossScaleOptimizer cannot wrap a JointOptimizer, since rows would not be"
                " unscaled: write JointOptimizer(LossScaleOptimizer(inner)), and compile a plain"
                " keras.Model with auto_scale_loss=False"
            )
        super().__setattr__(name, value)

    def factor(self) -> tf.Tensor | float:
        """Returns the factor by which the inner rate differs from `base_learning_rate`."""
        rate = keras_internals.learning_rate_variable(innermost(self))
        if not self.base_learning_rate or rate is None:
            return 1.0
        return tf.cast(rate.value, tf.float32) / self.base_learning_rate

    def build(self, variables: Sequence[Any]) -> None:
        """Builds the inner optimizer, and prepares the rows of the variables' layers.

        Raises:
          ValueError: the inner optimizer cannot train the rows of a layer, or was built before.
        """
        self._build(list(variables))
        for anchor in self._anchors(variables):
            anchor.rows.take(self)

    def _build(self, variables: list[Any]) -> None:
        inner = self.inner_optimizer
        if not inner.built:
            with stepped(variables):
                inner.build(variables)
            _built.add(inner)
        elif self._anchors(variables) and inner not in _built:
            raise ValueError(
                f"optimizer {inner.name} was built before a JointOptimizer wrapped it, so that it"
                " does not know the tables of layers: build the JointOptimizer instead"
            )
        self.__dict__["_built_with"] = variables
        self.built = True

    @staticmethod
    def _anchors(variables: Sequence[Any]) -> list[Anchor]:
        return [v for v in variables if isinstance(v, Anchor)]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates dense variables and rows, as `keras.optimizers.Optimizer.apply`.

        Raises:
          ValueError: the rows of a layer cannot be trained this way; the message names the remedy.
        """
        if not grads:
            return
        variables = list(self._built_with if trainable_variables is None else trainable_variables)
        if not self.built:
            for anchor in self._anchors(variables):
                anchor.rows.check_takes(self)
            self._build(variables)
        step, scaler = innermost(self), scaler_of(self)
        grads, rows = self._take(list(grads), variables)
        scale = (
            step.loss_scale_factor if scaler is None else tf.identity(scaler.dynamic_scale.value)
        )
        if scale is not None:
            rows = [(r, [call.map(lambda g: g / scale) for call in calls]) for r, calls in rows]
        if (end := _step_end.get()) is not None:
            rows = [(r, [call.shared(end.share) for call in calls]) for r, calls in rows]
            self._training_of(rows)()
            self._step(end.mean_of(grads), variables)
            return
        if rows and step.global_clipnorm:
            grads, rows = self._clip(grads, rows, 1.0 if scale is None else scale)
        train = self._training_of(rows)
        if scaler is None:
            self._step(grads, variables)
            train()
            return
        is_applied = scaler.check_finite([g for g in grads if g is not None])
        self._step(grads, variables)
        if rows:
            tf.cond(is_applied, train, lambda: None)

    def _step(self, grads: list[Any], variables: list[Any]) -> None:
        with stepped(variables):
            self.inner_optimizer.apply(grads, variables)

    def _take(self, grads: list[Any], variables: list[Any]) -> tuple[list[Any], list[_Rows]]:
        """Takes the deposits of rows.

        Returns:
          The gradients for the inner optimizer, and the calls of each layer. A NaN in the gradients
          tells a `LossScaleOptimizer` that gradients of rows are not finite.
        """
        rows: list[_Rows] = []
        for i, (gradient, variable) in enumerate(zip(grads, variables, strict=True)):
            if gradient is None or not isinstance(variable, Anchor):
                continue
            variable.rows.check_takes(self)
            grads[i] = tf.zeros([])
            calls = variable.take(gradient)
            rows.append((variable.rows, calls))
            if scaler_of(self) is not None:
                are_finite = tf.reduce_all([call.are_finite() for call in calls])
                grads[i] = tf.where(are_finite, 0.0, float("nan"))
        self._check(rows)
        return grads, rows

    def _training_of(self, rows: list[_Rows]) -> Callable[[], None]:
        """Returns a function that trains the rows at the current learning rates.

        The inner optimizer may count the step before the function runs.
        """
        step = innermost(self)
        steps = step.gradient_accumulation_steps
        rates = [trained.rate(self) for trained, _ in rows]
        is_due = None
        if steps:
            is_due = tf.equal((keras_internals.step_counter(step).value + 1) % steps, 0)

        def train() -> None:
            for (trained, calls), rate in zip(rows, rates, strict=True):
                if is_due is None:
                    trained.train(calls, rate)
                else:
                    trained.accumulate(calls, rate, is_due, steps)

        return train

    def _check(self, rows: list[_Rows]) -> None:
        optimizer = innermost(self)
        clip, steps = optimizer.global_clipnorm, optimizer.gradient_accumulation_steps
        for trained, _ in rows:
            if clip and steps:
                raise ValueError(
                    f"layer {trained.name} cannot be trained with global_clipnorm={clip!r} and"
                    f" gradient_accumulation_steps={steps!r} together: use one of them"
                )
            if steps:
                trained.check_accumulates(optimizer)

    def _clip(
        self, grads: list[Any], rows: list[_Rows], scale: Any
    ) -> tuple[list[Any], list[_Rows]]:
        """Clips all gradients by their joint norm. The inner optimizer then keeps them."""
        dense = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in grads if g is not None]
        parts = [g / scale for g in dense] + [trained.sums(calls) for trained, calls in rows]
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(part)) for part in parts]))
        limit = innermost(self).global_clipnorm
        factor = limit / tf.maximum(norm, limit)
        grads = [None if g is None else _times(g, factor) for g in grads]
        return grads, [(r, [call.map(lambda g: g * factor) for call in calls]) for r, calls in rows]

    def scale_loss(self, loss: Any) -> Any:
        """Scales the loss as the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Finalizes the variables as the inner optimizer does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Excludes variables from weight decay. Tables have the name "embeddings"."""
        innermost(self).exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the weights of the inner optimizer."""
        self.inner_optimizer.set_weights(weights)

    def save_own_variables(self, store: Any) -> None:
        """Saves nothing: Keras saves the inner optimizer separately."""

    def load_own_variables(self, store: Any) -> None:
        """Loads the inner optimizer from a file that was written before optimizers were wrapped."""
        if store.keys():
            self.inner_optimizer.load_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for Keras serialization."""
        return {
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "base_learning_rate": self.base_learning_rate,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> JointOptimizer:
        """Creates an optimizer from a config of `get_config`."""
        inner = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return cls(**{**config, "inner_optimizer": inner})


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
