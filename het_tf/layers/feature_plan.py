"""The structure that a collection's features have, and which of them share a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from het_tf._nested import tuple_like
from het_tf.layers.embedding import HetEmbedding
from het_tf.layers.feature_configs import FeatureConfig, TableConfig


@dataclasses.dataclass
class Group:
    """Tables that share a cache.

    Attributes:
      layer: whose table holds theirs.
      offsets: by table name, its first key.
      features: places in the list of all features.
    """

    layer: HetEmbedding
    offsets: dict[str, int]
    features: list[int]


class Plan:
    """Which features and tables there are. Keras would wrap what is in it, were it the layer's.

    Attributes:
      nested: the structure of features; its dicts are plain ones, whatever was given: others, such
        as an OrderedDict, may have an order of their own.
      features: those in it, in its order.
      tables: by name.
      groups: to be filled by whoever makes their layers.
    """

    def __init__(self, feature_configs: Any):
        """Raises a ValueError if there is no feature, keys do not sort, or tables share a name."""
        self.nested = _with_plain_dicts(feature_configs)
        self.features: list[FeatureConfig] = keras.tree.flatten(self.nested)
        self.tables: dict[str, TableConfig] = {}
        self.groups: list[Group] = []
        if not self.features:
            raise ValueError("feature_configs must hold a FeatureConfig at least")
        for feature in self.features:
            if not isinstance(feature, FeatureConfig):
                raise ValueError(
                    f"feature_configs must be a nested structure of FeatureConfig, not {feature!r}"
                )
            if self.tables.setdefault(feature.table.name, feature.table) is not feature.table:
                raise ValueError(
                    f"two tables are called {feature.table.name!r}: let features share one"
                    " TableConfig, or name them apart"
                )

    def check_stacking(self, table_stacking: Any) -> None:
        """Raises a ValueError if keras-rs would not take it."""
        if table_stacking is None or table_stacking == "auto":
            return
        names = table_stacking if isinstance(table_stacking, (list, tuple)) else [None]
        unknown = [name for name in keras.tree.flatten(names) if name not in self.tables]
        if unknown:
            raise ValueError(
                'table_stacking must be "auto", None or lists of names of tables, of which there'
                f" are {list(self.tables)}, not {table_stacking!r}"
            )

    def with_weights(self, inputs: Any, weights: Any) -> tuple[Any, Any]:
        """Inputs and weights, also where the former are what `preprocess` makes of both."""
        is_both = isinstance(inputs, dict) and set(inputs) == {"inputs", "weights"}
        if is_both and weights is None and set(inputs) != set(self._keys):
            return inputs["inputs"], inputs["weights"]
        return inputs, weights

    @property
    def _keys(self) -> Sequence[str]:
        return self.nested.keys() if isinstance(self.nested, dict) else ()

    def flatten(self, what: str, nested: Any) -> list[Any]:
        """A structure like that of the features, by feature."""
        _check_fields(self.nested, nested, what)
        nested = without_tuples(nested)
        try:
            keras.tree.assert_same_structure(without_tuples(self.nested), nested)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{what} must have the structure of feature_configs: {error}"
            ) from error
        return keras.tree.flatten(nested)

    def pack(self, flat: Sequence[Any]) -> Any:
        """The inverse of `flatten`."""
        return keras.tree.pack_sequence_as(self.nested, flat)


def _with_plain_dicts(nested: Any) -> Any:
    if isinstance(nested, dict):
        try:
            sorted(nested)  # Else each dict of inputs would have the order that it was written in.
        except TypeError:
            raise ValueError(
                "keys of feature_configs must be such as can be sorted, strings for example, not"
                f" {list(nested)!r}"
            ) from None
        return {key: _with_plain_dicts(value) for key, value in nested.items()}
    if isinstance(nested, list):
        return [_with_plain_dicts(value) for value in nested]
    if isinstance(nested, tuple):
        return tuple_like(nested, map(_with_plain_dicts, nested))
    return nested


def _check_fields(features: Any, nested: Any, what: str) -> None:
    """Raises a ValueError where namedtuples have other fields, or these in another order."""
    if isinstance(features, dict) and isinstance(nested, dict):
        for key in features.keys() & nested.keys():
            _check_fields(features[key], nested[key], what)
    if isinstance(features, (list, tuple)) and isinstance(nested, (list, tuple)):
        fields, given = getattr(features, "_fields", None), getattr(nested, "_fields", None)
        if None not in (fields, given) and fields != given:
            raise ValueError(
                f"{what} must have the structure of feature_configs, whose fields are {fields}, not"
                f" {given}"
            )
        for feature, each in zip(features, nested, strict=False):
            _check_fields(feature, each, what)


def without_tuples(nested: Any) -> Any:
    """A structure with lists for its tuples: Keras makes them lists when it loads a model."""
    if isinstance(nested, dict):
        return {key: without_tuples(value) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        return [without_tuples(value) for value in nested]
    return nested


def encoded(nested: Any) -> Any:
    """A structure of numbers in a form that JSON keeps: it has no tuples."""
    if isinstance(nested, dict):
        return {"dict": [[key, encoded(value)] for key, value in nested.items()]}
    if isinstance(nested, (list, tuple)):
        kind = "tuple" if isinstance(nested, tuple) else "list"
        return {kind: [encoded(value) for value in nested]}
    return nested


def decoded(form: Any, leaves: Sequence[Any]) -> Any:
    """The inverse of `encoded`, with leaves in the place of their numbers."""
    if not isinstance(form, dict):
        return leaves[form]
    ((kind, values),) = form.items()
    if kind == "dict":
        return {key: decoded(value, leaves) for key, value in values}
    return {"list": list, "tuple": tuple}[kind](decoded(value, leaves) for value in values)
