"""A lookup that is trained by its gradient: rows of ids, as they are or pooled."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from het_tf import ops
from het_tf.layers import prepared
from het_tf.layers.backward import Backward
from het_tf.layers.trained import trained
from het_tf.layers.whole_steps import Update, train
from het_tf.pooling import Bags


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
    found = prepared.take(layer)
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


def _read(layer: Any, found: prepared.Lookup | None, keys: tf.Tensor, fresh: bool) -> Read:
    if not layer.is_cached:
        rows, ticket = layer.table.lookup_op(keys)
    else:
        ticket = _ticket(layer, found, keys, fresh)
        rows = layer.worker_cache.gather_op(ticket)
    return [rows], ticket, None


def _pool(
    layer: Any,
    found: prepared.Lookup | None,
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


def _ticket(layer: Any, found: prepared.Lookup | None, keys: tf.Tensor, fresh: bool) -> tf.Tensor:
    if found is None:
        return layer.worker_cache.installed_op(layer.worker_cache.unique_ids_op(keys), fresh)
    with tf.control_dependencies([ops.check_ids(found.unique_ids, keys)]):
        return tf.identity(found.ticket)
