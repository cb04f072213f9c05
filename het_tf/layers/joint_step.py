"""Updates of rows that wait until the gradients of the whole step are applied.

An optimizer that clips by the norm of all gradients, scales the loss, skips steps or accumulates
them decides about a step as a whole. There the backward pass notes the gradients of the rows, and
`optimizer.apply` trains them with the others. It is the optimizer that the running model is
compiled with, or, in a loop of its own, that which was built with the layer's weight. Keras has no
public place to join in, so this module, and no other, puts a function around `apply` of the one
optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from het_tf import ops
from het_tf.compat import call_stack, keras_internals
from het_tf.compat.function_graphs import current_function, function_of
from het_tf.layers import joint_step
from het_tf.layers.lookahead import Room
from het_tf.runtime import deferred_destroy
from het_tf.runtime.broadcast import cache_devices, visit


class Anchor(keras.Variable):
    """A scalar whose gradient trains a table; its value has no meaning.

    What asks for its value or sets it, as `get_weights`, `set_weights` and `.h5` files do, would
    leave the table out, and is refused.
    """

    def __init__(self, layer_name: str):
        """The anchor of the table of that layer."""
        self.layer_name = layer_name
        self.waiting: weakref.ref | None = None  # the updates that wait for the optimizer
        # By an initializer: a layer may be built in a scope that lets values wait.
        super().__init__(keras.initializers.Zeros(), shape=(), dtype="float32", name="anchor")

    @property
    def value(self) -> Any:
        """The variable of TensorFlow; an optimizer that asks for it is built with it."""
        optimizer = call_stack.optimizer_with(self)
        if optimizer is not None:
            joint_step.build_with(optimizer, self)
        return super().value

    def numpy(self) -> NoReturn:
        """Refused."""
        raise ValueError(
            f"the table of layer {self.layer_name} is no Keras weight: get_weights, set_weights,"
            " .h5 files and EarlyStopping(restore_best_weights=True), which calls get_weights, have"
            " no place for it. Use save_weights(path.weights.h5), save(path.keras),"
            " ModelCheckpoint(path, save_best_only=True), tf.train.Checkpoint, or the layer's"
            " table.export() and import_()"
        )

    def __array__(self, dtype: Any = None) -> NoReturn:
        """Refused."""
        self.numpy()

    def assign(self, value: Any) -> None:
        """Refused, but to optimizers, whose weight decay has no meaning here."""
        if call_stack.caller(keras.optimizers.Optimizer) is None:
            self.numpy()


_ROWS = [tf.int64, tf.float32]  # keys [keys] and their gradients [keys, dim]


@dataclasses.dataclass(frozen=True)
class Update:
    """The gradients of one call of a layer.

    Attributes:
      layer: weak reference to the `HetEmbedding`.
      keys: int64 [any shape], that were looked up.
      ticket: of the lookup.
      pooling: of the lookup, where rows were pooled.
      gradients: float32 [bags, dim] of each feature, as they came: scaled like the loss.
      sends, steps: for `HetEmbedding.update_op`.
      room: of the lookup, where it was begun before its step.
    """

    layer: weakref.ref
    keys: tf.Tensor
    ticket: tf.Tensor
    pooling: tf.Tensor | None
    gradients: list[tf.Tensor]
    sends: bool
    steps: tf.Tensor | None
    room: Room | None

    def map(self, change: Callable[[tf.Tensor], tf.Tensor]) -> Update:
        """The same of gradients that are changed, each by itself."""
        return dataclasses.replace(self, gradients=[change(g) for g in self.gradients])

    def of_keys(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Unique keys, int64 [keys], and the sum of the gradients of each, float32 [keys, dim]."""
        if self.pooling is not None:
            return ops.pooled_sums(self.pooling, self.gradients)
        keys, places = tf.unique(tf.reshape(self.keys, [-1]))
        return keys, tf.math.unsorted_segment_sum(self.gradients[0], places, tf.size(keys))

    def make_op(self) -> None:
        """Makes the update."""
        update = self.layer().update_op(
            self.ticket, self.pooling, self.gradients, self.sends, self.steps
        )
        if self.room is not None:
            self.room.note_update(update)


def _by_layer(updates: Sequence[Update]) -> dict[Any, list[Update]]:
    """The updates of each layer: one for each time that it was called."""
    calls: dict[Any, list[Update]] = {}
    for update in updates:
        calls.setdefault(update.layer(), []).append(update)
    return calls


def _of_calls(updates: Sequence[Update]) -> tuple[tf.Tensor, tf.Tensor]:
    """As `Update.of_keys`, of calls of one layer; keys are unique within each."""
    parts = zip(*(update.of_keys() for update in updates), strict=True)
    keys, sums = (tf.concat(part, 0) for part in parts)
    return keys, sums


def _trained_sums(updates: Sequence[Update]) -> tf.Tensor:
    """The gradient of each row by all calls of a layer, without what it skips."""
    keys, sums = _of_calls(updates)
    if updates[0].layer().nonfinite == "skip":
        are_finite = tf.math.is_finite(tf.reduce_sum(tf.square(sums), 1, keepdims=True))
        sums = tf.where(are_finite, sums, 0.0)
    if len(updates) == 1:
        return sums
    keys, places = tf.unique(keys)
    return tf.math.unsorted_segment_sum(sums, places, tf.size(keys))


def train(update: Update) -> tf.Tensor:
    """Makes an update, or has it wait for the optimizer that the model is compiled with.

    Returns:
      float32 scalar, the gradient of the layer's weight: 0, or NaN to have the step skipped.
    """
    model, built_with = call_stack.compiled_model(), update.layer().anchor.waiting
    if model is not None:
        waiting = waiting_updates(model.optimizer)
    else:
        waiting = None if built_with is None else built_with()
    if waiting is not None:
        return waiting.add(update)
    update.make_op()
    return tf.zeros([])


class WaitingUpdates:
    """The updates that wait for one optimizer's `apply`."""

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        """Waits for `optimizer`, that a model is compiled with or that is being built."""
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._scaler = weakref.ref(optimizer) if scales else None
        self._optimizer = optimizer.inner_optimizer if scales else optimizer
        self._updates: list[Update] = []
        self._accumulators: weakref.WeakKeyDictionary[Any, _Accumulator]
        self._accumulators = weakref.WeakKeyDictionary()
        self._apply = self._optimizer.apply
        self._optimizer.__dict__["apply"] = self.apply
        if scales:
            self._apply_scaled = optimizer.apply
            optimizer.__dict__["apply"] = self.apply_scaled

    def add(self, update: Update) -> tf.Tensor:
        """Has an update wait.

        Returns:
          float32 scalar, the gradient to give to the optimizer: NaN where it is to skip the step.

        Raises:
          ValueError: the optimizer asks for what cannot be done to rows.
        """
        clip, steps = self._optimizer.global_clipnorm, self._optimizer.gradient_accumulation_steps
        if clip and steps:
            raise ValueError(
                f"layer {update.layer().name} cannot be trained with global_clipnorm={clip!r} and"
                f" gradient_accumulation_steps={steps!r} together: use one of them"
            )
        cowclip = update.layer().optimizer.cowclip
        if cowclip and steps:
            raise ValueError(
                f"layer {update.layer().name} cannot be trained with cowclip={cowclip!r} and"
                f" gradient_accumulation_steps={steps!r} together: what is accumulated does not say"
                " how often an id came"
            )
        self._updates.append(update)
        if self._scaler is None:
            return tf.zeros([])
        are_finite = [tf.reduce_all(tf.math.is_finite(g)) for g in update.gradients]
        return tf.where(tf.reduce_all(are_finite), 0.0, float("nan"))

    def apply_scaled(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """`apply` of a `LossScaleOptimizer`, which calls that of its inner one, or skips it."""
        self._apply_scaled(grads, trainable_variables)
        self._take()

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """`optimizer.apply`, with the rows whose gradients were noted in the same function."""
        scale = self._scale()
        updates = [update.map(lambda g: g / scale) for update in self._take()]
        optimizer = self._optimizer
        self._check_all_waited(grads, trainable_variables, updates)
        if updates and optimizer.global_clipnorm:
            grads, updates = self._clip(grads, updates)
        if not optimizer.gradient_accumulation_steps:
            self._apply(grads, trainable_variables)
            for update in updates:
                update.make_op()
            return
        steps = optimizer.gradient_accumulation_steps
        # `iterations` counts the times that accumulated gradients are applied.
        count = tf.convert_to_tensor(keras_internals.step_counter(optimizer).value)
        is_due = tf.equal((count + 1) % steps, 0)
        self._apply(grads, trainable_variables)
        for layer, calls in _by_layer(updates).items():
            if layer not in self._accumulators:
                self._accumulators[layer] = _Accumulator(layer)
            self._accumulators[layer].add(calls, is_due, steps)

    def _check_all_waited(
        self, grads: Sequence[Any], variables: Any, updates: Sequence[Update]
    ) -> None:
        waited = [update.layer().anchor for update in updates]
        if variables is None:
            variables = keras_internals.variables_of(self._optimizer)
        for gradient, variable in zip(grads, variables, strict=False):
            is_anchor = gradient is not None and hasattr(variable, "waiting")
            if is_anchor and not any(variable is each for each in waited):
                raise _trained_already(self._optimizer, variable.layer_name)

    def _take(self) -> list[Update]:
        here = current_function()
        taken = [u for u in self._updates if function_of(u.ticket) is here]
        self._updates = [u for u in self._updates if function_of(u.ticket) is not here]
        return taken

    def _scale(self) -> tf.Tensor:
        """What the loss was multiplied by; read before the optimizer changes it."""
        if self._scaler is not None:
            return tf.convert_to_tensor(self._scaler().dynamic_scale.value)
        return tf.constant(self._optimizer.loss_scale_factor or 1.0)

    def _clip(self, grads: Sequence[Any], updates: list[Update]) -> tuple[list[Any], list[Update]]:
        """Gradients of the norm that they have together, which the optimizer finds short enough."""
        static = self._optimizer.loss_scale_factor or 1.0
        dense = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in grads if g is not None]
        parts = [g / static for g in dense]
        parts += [_trained_sums(calls) for calls in _by_layer(updates).values()]
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(part)) for part in parts]))
        limit = self._optimizer.global_clipnorm
        factor = limit / tf.maximum(norm, limit)
        grads = [None if g is None else _times(g, factor) for g in grads]
        return grads, [update.map(lambda g: g * factor) for update in updates]


class _Accumulator:
    """The gradients of a layer's rows in steps that were not applied yet.

    They are in a queue of at most one element, in the process that makes the steps: a variable
    would be on a parameter server, where there are some.
    """

    def __init__(self, layer: Any):
        self._queue_op = functools.partial(_queue_op, f"accumulated/{uuid.uuid4().hex}")
        self._devices = ["/device:CPU:0"] if layer.table.is_local else cache_devices()
        layer.table.forgets(self)
        deferred_destroy.destroy_after(
            self, functools.partial(_destroy, self._queue_op, self._devices)
        )

    def clear(self) -> None:
        """Forgets them, since the rows were restored. No step may be under way."""

        def drain() -> None:
            queue = self._queue_op()
            if int(tf.raw_ops.QueueSizeV2(handle=queue)):
                tf.raw_ops.QueueDequeueV2(handle=queue, component_types=_ROWS)

        visit(self._devices, drain, is_lost=lambda device, error: True)

    def add(self, updates: Sequence[Update], is_due: tf.Tensor, steps: int) -> None:
        """Adds those of the layer's calls in a step; where it is due, makes the mean's update."""
        first, layer = updates[0], updates[0].layer()
        queue = self._queue_op()
        keys, gradients = _of_calls(updates)
        shape = [None, layer.output_dim]

        def take() -> list[tf.Tensor]:
            return tf.raw_ops.QueueDequeueV2(handle=queue, component_types=_ROWS)

        there = tf.raw_ops.QueueSizeV2(handle=queue) > 0
        before = tf.cond(there, take, lambda: [keys[:0], gradients[:0]])
        keys = tf.concat([tf.ensure_shape(before[0], [None]), keys], 0)
        gradients = tf.concat([tf.ensure_shape(before[1], shape), gradients], 0)

        def train() -> None:
            found = layer.found_op(keys)
            mean = [gradients / steps]
            if layer.is_cached and not first.sends:
                mean = Room([(layer.worker_cache, found)]).before_op(mean)
            layer.update_op(found, None, mean, first.sends, first.steps)

        def keep() -> None:
            tf.raw_ops.QueueEnqueueV2(handle=queue, components=[keys, gradients])

        tf.cond(is_due, train, keep)


def _queue_op(name: str) -> tf.Tensor:
    with tf.device("/device:CPU:0"):
        return tf.raw_ops.FIFOQueueV2(
            component_types=_ROWS, container=ops.CONTAINER, shared_name=name
        )


def _destroy(queue_op: Callable[[], tf.Tensor], devices: list[str]) -> None:
    def destroy() -> None:
        tf.raw_ops.DestroyResourceOp(resource=queue_op(), ignore_lookup_error=True)

    visit(devices, destroy, is_lost=lambda device, error: True)


def waiting_updates(optimizer: keras.optimizers.Optimizer) -> WaitingUpdates | None:
    """Where updates wait for an optimizer that a model is compiled with; None: they need not."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    inner = optimizer.inner_optimizer if scales else optimizer
    wrapped = getattr(inner.__dict__.get("apply"), "__self__", None)
    if isinstance(wrapped, WaitingUpdates):
        return wrapped
    asks = scales or (
        inner.global_clipnorm or inner.gradient_accumulation_steps or inner.loss_scale_factor
    )
    return WaitingUpdates(optimizer) if asks else None


def build_with(optimizer: keras.optimizers.Optimizer, anchor: Any) -> None:
    """Has the updates of a layer wait for an optimizer, if it is one to wait for.

    Args:
      optimizer: that is being built with the layer's weight, or applied to it.
      anchor: the weight.

    Raises:
      ValueError: it is built while it is applied, so the rows were trained without it.
    """
    is_new = "apply" not in getattr(optimizer, "inner_optimizer", optimizer).__dict__
    waiting = waiting_updates(optimizer)
    if waiting is not None and is_new and call_stack.is_called_by(type(optimizer).apply):
        raise _trained_already(optimizer, anchor.layer_name)
    anchor.waiting = None if waiting is None else weakref.ref(waiting)


def _trained_already(optimizer: keras.optimizers.Optimizer, layer_name: str) -> ValueError:
    return ValueError(
        f"rows of layer {layer_name} were trained by the backward pass, without the"
        f" {type(optimizer).__name__} that scales, clips or accumulates the step: build it before"
        " the first step, optimizer.build(model.trainable_variables)"
    )


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
