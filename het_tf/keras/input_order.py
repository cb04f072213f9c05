"""What a functional model is called with, by the keys of its Inputs.

Keras flattens the dict of Inputs and the one that the model is called with each in its own order:
by sorted keys, or as it was written where it is an OrderedDict.
"""

from __future__ import annotations

import collections
from typing import Any

import keras

from het_tf import _keras
from het_tf._nested import tuple_like


def by_key(model: keras.Model, inputs: Any) -> Any:
    """`inputs`, with dicts of the kind and the order that the model's Inputs have."""
    return _like(model.input, inputs) if isinstance(model, _keras.functional_class()) else inputs


def _like(structure: Any, inputs: Any) -> Any:
    if isinstance(structure, dict) and isinstance(inputs, dict):
        if structure.keys() != inputs.keys():
            return inputs  # Keras says what is missing.
        kind = collections.OrderedDict if isinstance(structure, collections.OrderedDict) else dict
        return kind((key, _like(each, inputs[key])) for key, each in structure.items())
    if isinstance(structure, (list, tuple)) and isinstance(inputs, (list, tuple)):
        if len(structure) != len(inputs):
            return inputs
        values = [_like(each, x) for each, x in zip(structure, inputs, strict=True)]
        return values if isinstance(inputs, list) else tuple_like(inputs, values)
    return inputs
