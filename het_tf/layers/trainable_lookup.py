"""A lookup that is trained by its gradient: rows of ids, as they are or pooled."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from het_tf import ops
from het_tf.compat import call_stack
from het_tf.compat.function_graphs import function_of
from het_tf.layers import lookahead
from het_tf.layers.joint_step import Update, train
from het_tf.tables.pooling import Bags


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
        rows_of = call_stack.jacobian_sources()
        if rows_of is not None:
            if not any(source is anchor or source is anchor.value for source in rows_of):
                return False
            raise NotImplementedError(  # TensorFlow puts another in the place of a ValueError
                f"a jacobian cannot be of a weight of layer {self._layer_name}: its"
                " gradient trains rows, and has no values. Ask for that of other weights, or of the"
                " layer's output"
            )
        call = call_stack.gradient_call()
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
        model = call_stack.compiled_model() if is_gradient else None
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


# Gradients with respect to the outputs, to gradients with respect to `by`.
GradientFunction = Callable[[list[tf.Tensor]], list["tf.Tensor | None"]]

_UPDATE = "_het_update"


def trained(
    rows: list[tf.Tensor], by: list[tf.Tensor], update: GradientFunction
) -> list[tf.Tensor]:
    """Has a gradient of rows call `update`.

    Args:
      rows: float32 of any shape.
      by: floats of any shape, what is to have gradients. The first is made for this call.
      update: None in what it returns stands for zeros.

    Returns:
      The rows.
    """
    # The tape or the graph has this tensor as long as it may ask for a gradient.
    setattr(by[0], _UPDATE, update)
    return ops.trained(rows, by)


@tf.RegisterGradient("Het>Trained")
def _gradient(op: Any, *gradients: tf.Tensor) -> list[tf.Tensor | None]:
    by = op.inputs[len(gradients) :]
    found = getattr(by[0], _UPDATE)(list(gradients))
    of_by = [
        tf.zeros_like(each) if of is None else tf.cast(of, each.dtype)
        for each, of in zip(by, found, strict=True)
    ]
    return [None] * len(gradients) + of_by


def lookup(
    layer: Any, keys: tf.Tensor, features: Sequence[Bags], training: bool | None
) -> list[tf.Tensor]:
    """Looks up the keys of a layer; the backward pass updates their rows.

    Args:
      layer: a `HetEmbedding` with a table.
      keys: int64 [ids], those of the features one after the other.
      features: how they are pooled.
      training: False: a read misses nothing that the shards have merged.

    Returns:
      Of each feature float32 [bags, dim].
    """
    found = lookahead.take(layer)
    backward = Backward(layer.name)
    trains = layer.trainable
    weak = weakref.ref(layer)  # A graph may outlive the layer.
    if found is not None:
        found = dataclasses.replace(found, layer=weak)
    weighted = {i: bags.weights for i, bags in enumerate(features) if bags.weights is not None}
    fresh = training is False
    if _are_rows(features):
        outputs, ticket, pooling = _read(layer, found, keys, fresh)
    else:
        outputs, ticket, pooling = _pool(layer, found, keys, features, weighted, fresh)

    def update(gradients: list[tf.Tensor]) -> list[tf.Tensor | None]:
        gradients = [tf.cast(gradient, tf.float32) for gradient in gradients]
        of_anchor = None
        if trains and backward.is_to_update(weak().anchor, ticket):
            weak().check_is_trainable()
            room = None if found is None else found.room
            if room is not None:
                gradients = room.before_op(gradients)
            steps, sends = weak().steps_op(), found is None
            of_anchor = train(Update(weak, keys, ticket, pooling, gradients, sends, steps, room))
        of_weights = ops.pooling_gradient(pooling, gradients) if weighted else []
        return [of_anchor, *(of_weights[i] for i in weighted)]

    anchor = (tf.identity if trains else tf.stop_gradient)(layer.anchor.value)
    return trained(outputs, [anchor, *weighted.values()], update)


def _are_rows(features: Sequence[Bags]) -> bool:
    return len(features) == 1 and not features[0].pools


Read = tuple[list[tf.Tensor], tf.Tensor, tf.Tensor | None]  # outputs, ticket, pooling


def _read(layer: Any, found: lookahead.Lookup | None, keys: tf.Tensor, fresh: bool) -> Read:
    if not layer.is_cached:
        rows, ticket = layer.table.lookup_op(keys)
    else:
        ticket = _ticket(layer, found, keys, fresh)
        rows = layer.worker_cache.gather_op(ticket)
    return [rows], ticket, None


def _pool(
    layer: Any,
    found: lookahead.Lookup | None,
    keys: tf.Tensor,
    features: Sequence[Bags],
    weights: dict[int, tf.Tensor],
    fresh: bool,
) -> Read:
    none = tf.zeros([0])
    pool = [bags.splits for bags in features], [weights.get(i, none) for i in range(len(features))]
    layout = {
        "combiners": [bags.combiner for bags in features],
        "bag_sizes": [bags.size or 1 for bags in features],
    }
    if not layer.is_cached:
        return layer.table.pool_op(keys, *pool, **layout)
    ticket = _ticket(layer, found, keys, fresh)
    outputs, pooling = layer.worker_cache.pool_op(ticket, *pool, **layout)
    return outputs, ticket, pooling


def _ticket(layer: Any, found: lookahead.Lookup | None, keys: tf.Tensor, fresh: bool) -> tf.Tensor:
    if found is None:
        return layer.worker_cache.installed_op(layer.worker_cache.unique_ids_op(keys), fresh)
    with tf.control_dependencies([ops.check_ids(found.unique_ids, keys)]):
        return tf.identity(found.ticket)
