"""What TensorFlow's checkpoints find of a model: not what is in lists and dicts.

Keras makes containers of its own of them, which hide what they hold.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from het_tf import _keras


def layers_in_containers(model: keras.Model) -> dict[str, Any]:
    """A model's attributes that are lists or dicts of layers, as checkpoints can see them."""
    # The same each time, as long as they hold the same. Straight from the instance, as Keras would
    # track an attribute.
    before = vars(model).setdefault("_het_containers", {})
    found = {}
    for name, value in [*vars(model).items()]:
        layers: dict[str, Any] = {}
        is_own = name == "_het_containers" or name in _names_of_keras()
        for path, layer in [] if is_own else _layers_within(value):
            while path in layers:  # a dict may have 1 and "1"
                path += "'"
            layers[path] = layer
        if not layers:
            continue
        held, known = before.get(name, ({}, None))
        if list(held) != list(layers) or any(held[path] is not layers[path] for path in held):
            known = tf.train.Checkpoint()
            for path, layer in layers.items():
                setattr(known, f".{path}", layer)
            before[name] = layers, known
        # TensorFlow has what it sees of a tuple under its name.
        found[f"{name}.lists" if isinstance(value, tuple) else name] = known
    return found


def _layers_within(
    value: Any, path: str = "", seen: bool = True, around: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """The layers that containers hide, by keys and places.

    Args:
      value: of an attribute, or a part of one.
      path: to it.
      seen: whether TensorFlow sees it: it sees what is in tuples.
      around: the containers that it is in.
    """
    if isinstance(value, keras.layers.Layer):
        if not seen:
            yield path, value
        return
    if not isinstance(value, (list, tuple, dict)) or id(value) in around:
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, (keras.layers.Layer, list, tuple, dict)):
            inner = f"{path}.{key}" if path else str(key)
            within = seen and isinstance(value, tuple)
            yield from _layers_within(each, inner, within, (*around, id(value)))


@functools.cache
def _names_of_keras() -> frozenset[str]:
    """Attributes that Keras gives models, in some of which it notes their layers, too."""
    ids = keras.Input((1,), name="ids")
    models = [keras.Model(name="m"), keras.Sequential(name="s"), keras.Model(ids, ids, name="f")]
    return frozenset(name for model in models for name in vars(model))


def warn_of_missing(checkpoint: tf.train.Checkpoint, path: str) -> None:
    """Logs which layers a checkpoint, which was just restored, had no rows for."""
    for layer in tf.train.TrackableView(checkpoint).descendants():
        state = getattr(layer, "_table_state", None)
        if state is not None and state.shape.path != path:
            logging.warning(
                "%s has no rows for layer %s, which are as they were: that layer may be new, or"
                " layers have another order or nesting than when it was saved",
                path,
                layer.name,
            )


def warn_of_unbuilt(checkpoint: tf.train.Checkpoint) -> None:
    """Logs which optimizers, of a checkpoint that is to be restored, have no slots to restore."""
    for each in tf.train.TrackableView(checkpoint).descendants():
        if isinstance(each, keras.optimizers.Optimizer) and not each.built:
            logging.warning(
                "optimizer %s is not built, so that not all of its slots are restored: call its"
                " build(model.trainable_variables) before",
                each.name,
            )


def check_reached(checkpoint: tf.train.Checkpoint) -> None:
    """Checks that the tables of all models of a checkpoint are in it.

    Raises:
      ValueError: one is not; names its layer.
    """
    reached = tf.train.TrackableView(checkpoint).descendants()
    numbers = {id(each) for each in reached}
    for model in reached:
        if not isinstance(model, keras.layers.Layer):
            continue
        for layer in _keras.nested_layers(model):
            if hasattr(layer, "_table_state") and id(layer) not in numbers:
                raise ValueError(
                    f"layer {layer.name} is in a list or dict of a layer of {model.name}, into"
                    " which TensorFlow's checkpoints do not see: have it in an attribute of its"
                    " own, or in a tuple"
                )
