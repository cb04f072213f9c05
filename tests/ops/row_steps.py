"""A training step of rows alone, as a Keras optimizer makes one."""

from __future__ import annotations

import tensorflow as tf


def train_rows(tape: tf.GradientTape, loss: tf.Tensor, *layers, of_loss=None) -> None:
    """Asks for the gradients of layers' weights and applies them, each with its own optimizer.

    A Keras optimizer assigns the gradient to such a weight, too.
    """
    variables = [variable for layer in layers for variable in layer.trainable_variables]
    gradients = tape.gradient(loss, variables, of_loss)
    for variable, gradient in zip(variables, gradients, strict=True):
        if gradient is not None:
            variable.assign(gradient)
