"""When the backward pass of a layer's call is to update rows."""

from __future__ import annotations

import weakref

import keras
import tensorflow as tf

from het_tf._graph import function_of
from het_tf.layers import callers


class Backward:
    """The backward passes of one call of a layer, of which one may update its rows.

    A tape calls the gradients of all that it recorded. A backward pass counts if the tape was asked
    for the gradient of the layer's own weight, and the first of equal ones does.
    """

    def __init__(self, layer_name: str):
        """A call of the layer of that name."""
        self._layer_name = layer_name
        self._targets: list[weakref.ref] | None = None  # of the pass that updated the rows

    def is_to_update(self, anchor: keras.Variable, ticket: tf.Tensor) -> bool:
        """Whether the pass that runs is to update the rows; notes that it did.

        Args:
          anchor: the layer's weight.
          ticket: of the lookup.

        Raises:
          NotImplementedError: a jacobian is asked for.
          ValueError: rows were updated by the gradient of another loss; or it cannot be known what
            was asked for.
        """
        rows_of = callers.jacobian_sources()
        if rows_of is not None:
            if not any(source is anchor or source is anchor.value for source in rows_of):
                return False
            raise NotImplementedError(  # TensorFlow puts another in the place of a ValueError
                f"a jacobian cannot be of a weight of layer {self._layer_name}: its"
                " gradient trains rows, and has no values. Ask for that of other weights, or of the"
                " layer's output"
            )
        call = callers.gradient_call()
        if call is None or function_of(ticket) is not function_of(call[0][0]):
            return self._is_asked_by_keras(call is not None)
        targets, sources = call
        if not any(source is anchor or source is anchor.value for source in sources):
            return False
        if self._targets is not None:
            before = [target() for target in self._targets]
            if len(before) == len(targets) and all(map(_is_same, before, targets)):
                return False
            raise ValueError(
                f"rows of layer {self._layer_name} were updated already, by the gradient of another"
                " loss of the same call: add the losses and ask for the gradient of the sum"
            )
        self._targets = [weakref.ref(target) for target in targets]
        return True

    def _is_asked_by_keras(self, is_gradient: bool) -> bool:
        """For a call in a function of its own, whose backward pass is built for all askers."""
        model = callers.compiled_model() if is_gradient else None
        if model is not None and type(model).train_step is keras.Model.train_step:
            return True
        raise ValueError(
            f"layer {self._layer_name} is called in a tf.function of its own, outside of which the"
            " tape is: TensorFlow does not say there which gradients are asked for, and only those"
            " of the layer's weights may train it; have the tape and its gradient() in that"
            " tf.function"
        )


def _is_same(one: object, other: object) -> bool:
    return one is other
