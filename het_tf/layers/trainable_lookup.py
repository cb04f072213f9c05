"""Lookup of rows, pooled or not, whose backward pass deposits the gradients of the rows."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from het_tf import ops
from het_tf.layers import lookahead
from het_tf.layers.row_gradients import Call, CallGradients
from het_tf.tables.pooling import Bags

# Maps gradients with respect to the outputs to gradients with respect to `by`.
GradientFunction = Callable[[list[tf.Tensor]], list["tf.Tensor | None"]]

_BACKWARD = "_het_backward"


def trained(
    rows: list[tf.Tensor], by: list[tf.Tensor], backward: GradientFunction
) -> list[tf.Tensor]:
    """Attaches the gradient function `backward` to rows.

    Args:
      rows: float32 of any shape.
      by: floats of any shape, the tensors that get gradients. The first is created for this call.
      backward: gradient function. A gradient of None stands for zeros.

    Returns:
      The rows.
    """
    # The tape or the graph keeps this tensor as long as it may request a gradient.
    setattr(by[0], _BACKWARD, backward)
    return ops.trained(rows, by)


@tf.RegisterGradient("Het>Trained")
def _gradient(op: Any, *gradients: tf.Tensor) -> list[tf.Tensor | None]:
    by = op.inputs[len(gradients) :]
    found = getattr(by[0], _BACKWARD)(list(gradients))
    of_by = [
        tf.zeros_like(each) if of is None else tf.cast(of, each.dtype)
        for each, of in zip(by, found, strict=True)
    ]
    return [None] * len(gradients) + of_by


def lookup(
    layer: Any, keys: tf.Tensor, features: Sequence[Bags], training: bool | None
) -> list[tf.Tensor]:
    """Looks up the keys of a layer. The backward pass deposits the gradients of their rows.

    Args:
      layer: a `HetEmbedding` with a table.
      keys: int64 [ids], the keys of all features, concatenated.
      features: the bags of each feature.
      training: False: the rows miss no update that the shards have merged.

    Returns:
      float32 [bags, dim] per feature.
    """
    found = lookahead.take(layer)
    call = Call()
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

    def deposit(gradients: list[tf.Tensor]) -> list[tf.Tensor | None]:
        gradients = [tf.cast(gradient, tf.float32) for gradient in gradients]
        of_anchor = None
        if trains:
            room = None if found is None else found.room
            if room is not None:
                gradients = room.before_op(gradients)
            of_call = CallGradients(
                call, weak, keys, ticket, pooling, gradients, found is None, room
            )
            if not _is_within_step(ticket):
                raise ValueError(
                    f"layer {weak().name} is called in a tf.function, a branch or a loop of its"
                    " own, outside of which the tape is: nothing there can wait for an optimizer."
                    " Have the tape, its gradient() and the optimizer in that tf.function, or call"
                    " the layer outside; `fit` needs no tf.function around a model's call"
                )
            of_anchor = weak().anchor.deposit(of_call)
        of_weights = ops.pooling_gradient(pooling, gradients) if weighted else []
        return [of_anchor, *(of_weights[i] for i in weighted)]

    anchor = (tf.identity if trains else tf.stop_gradient)(layer.anchor.value)
    return trained(outputs, [anchor, *weighted.values()], deposit)


def _is_within_step(ticket: tf.Tensor) -> bool:
    """Whether the backward pass that is being built is in the graph of the call.

    TensorFlow builds the backward pass of a function, a branch or a loop in a separate graph, for
    all gradients that may be requested. Nothing in that graph can wait for an optimizer.
    """
    if tf.executing_eagerly():
        return not tf.is_symbolic_tensor(ticket)
    return tf.is_symbolic_tensor(ticket) and ticket.graph is tf.compat.v1.get_default_graph()


def _are_rows(features: Sequence[Bags]) -> bool:
    return len(features) == 1 and not features[0].pools


Read = tuple[list[tf.Tensor], tf.Tensor, tf.Tensor | None]  # Outputs, ticket, pooling.


def _read(layer: Any, found: lookahead.Lookup | None, keys: tf.Tensor, fresh: bool) -> Read:
    if not layer.stored.is_cached:
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
    if not layer.stored.is_cached:
        return layer.table.pool_op(keys, *pool, **layout)
    ticket = _ticket(layer, found, keys, fresh)
    outputs, pooling = layer.worker_cache.pool_op(ticket, *pool, **layout)
    return outputs, ticket, pooling


def _ticket(layer: Any, found: lookahead.Lookup | None, keys: tf.Tensor, fresh: bool) -> tf.Tensor:
    if found is None:
        return layer.worker_cache.installed_op(layer.worker_cache.unique_ids_op(keys), fresh)
    with tf.control_dependencies([ops.check_ids(found.unique_ids, keys)]):
        return tf.identity(found.ticket)
