"""Keras's optimizers on replicas, each step of a variable one op.

Keras writes a step as a chain of elementwise ops, each of which goes through memory of the
variable's size: 7 for Adagrad, 1.8 of 9.5 ms of a worker's CPU for 0.93 million dense weights
(benchmarks/netns_cluster.py under perf). TensorFlow has ops for Keras's SGD and momentum. Its
Adagrad and Adam round, or place epsilon, otherwise than Keras's, so those are ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from het_tf import _keras, ops

# From an optimizer, a variable, its gradient and the learning rate: the ops of a step.
_Step = Callable[[Any, tf.Variable, tf.Tensor, tf.Tensor], None]


@contextlib.contextmanager
def fused_steps(model: keras.Model) -> Iterator[None]:
    """In this context a model's optimizer steps by fused ops, if there are such for it.

    It is for building a graph in which the optimizer's and the trained variables are float32
    resource variables on the device of the step.
    """
    optimizer = model.optimizer
    # Straight into the instance: Keras would track the attribute as part of the model.
    model.__dict__["optimizer"] = _stand_in(optimizer)
    try:
        yield
    finally:
        model.__dict__["optimizer"] = optimizer


def _stand_in(optimizer: Any) -> Any:
    """The same optimizer, with all that it has, of a subclass whose `update_step` is fused."""
    kind = type(optimizer)  # A subclass of Keras's may step otherwise.
    step = _STEPS.get(kind)
    if step is None or getattr(optimizer, "amsgrad", False):
        return optimizer

    class Fused(kind):
        def update_step(
            self, gradient: Any, variable: tf.Variable, learning_rate: tf.Tensor
        ) -> None:
            if isinstance(gradient, tf.IndexedSlices):
                super().update_step(gradient, variable, learning_rate)
                return
            rate = tf.cast(learning_rate, variable.dtype)
            step(self, variable, tf.cast(gradient, variable.dtype), rate)

    stand_in = object.__new__(Fused)
    object.__setattr__(stand_in, "__dict__", optimizer.__dict__)
    return stand_in


def _sgd(optimizer: Any, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    if not optimizer.momentum:
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=_slot(optimizer, "momentums", variable),
        lr=rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, rate.dtype),
        use_nesterov=optimizer.nesterov,
    )


def _adam(optimizer: Any, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    count = tf.cast(optimizer.iterations + 1, tf.float32)
    left_1 = 1 - tf.pow(tf.constant(optimizer.beta_1, tf.float32), count)
    left_2 = 1 - tf.pow(tf.constant(optimizer.beta_2, tf.float32), count)
    ops.apply_adam(
        variable.handle,
        _slot(optimizer, "momentums", variable),
        _slot(optimizer, "velocities", variable),
        gradient,
        rate * tf.sqrt(left_2) / left_1,
        one_minus_beta_1=1 - optimizer.beta_1,
        one_minus_beta_2=1 - optimizer.beta_2,
        epsilon=optimizer.epsilon,
    )


def _adagrad(optimizer: Any, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    ops.apply_adagrad(
        variable.handle,
        _slot(optimizer, "accumulators", variable),
        gradient,
        rate,
        epsilon=optimizer.epsilon,
    )


def _slot(optimizer: Any, name: str, variable: tf.Variable) -> tf.Tensor:
    return _keras.slot_of(optimizer, name, variable).value.handle


_STEPS: dict[type[keras.optimizers.Optimizer], _Step] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adagrad: _adagrad,
}
