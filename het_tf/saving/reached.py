"""What TensorFlow's checkpoints find of a model: not what is in lists and dicts.

Keras makes containers of its own of them, which hide what they hold.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from het_tf import _keras


def layers_in_containers(model: keras.Model) -> dict[str, Any]:
    """A model's attributes that are lists or dicts of layers, as checkpoints can see them."""
    # The same each time, as long as they hold the same. Straight from the instance, as Keras would
    # track an attribute.
    before = vars(model).setdefault("_het_containers", {})
    found = {}
    for name, value in [*vars(model).items()]:
        if name.startswith("_") or not isinstance(value, (list, dict)):
            continue
        items = value.items() if isinstance(value, dict) else enumerate(value)
        layers = {str(key): each for key, each in items if isinstance(each, keras.layers.Layer)}
        if not layers:
            continue
        known = before.get(name)
        if known is None or {key: getattr(known, key, None) for key in layers} != layers:
            known = before[name] = tf.train.Checkpoint()
            for key, layer in layers.items():
                setattr(known, key, layer)
        found[name] = known
    return found


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
