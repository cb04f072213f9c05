"""What a collection is told of its features and tables, in the shape of keras-rs's configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from het_tf import initializers, lifetimes
from het_tf.layers.embedding import HetEmbedding
from het_tf.lifetimes import Admission, Expiry
from het_tf.runtime.validation import INT64_MAX, MAX_DIM, check_integer
from het_tf.tables import pooling


def tuple_like(like: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple of `values`, with the fields of `like` where that is a namedtuple."""
    return type(like)(*values) if hasattr(like, "_fields") else tuple(values)


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(eq=False)
class TableConfig:
    """A table, for one feature or more.

    Attributes:
      name: unique among the tables of a collection.
      vocabulary_size: how many ids there are: from 0 on. Rows that are never updated take no
        memory.
      embedding_dim: columns of the table.
      initializer: a Keras initializer or its name (`het_tf.initializers.spec`); None: truncated
        normal of variance 1 / embedding_dim, as keras-rs has it.
      optimizer: one of `het_tf.optimizers`, or what `HetEmbedding` takes instead of one.
      combiner: "mean", "sum", "sqrtn", "max", or None: every id has an output.
      admission: which ids get a row; as of `HetEmbedding`.
      expiry: when rows go; as of `HetEmbedding`. A row belongs to its table: features with other
        rules need a table of their own.
      placement: "auto" or "default_device": there is no other.
      max_ids_per_partition: taken and not needed.
      max_unique_ids_per_partition: taken and not needed.

    Raises:
      ValueError: an attribute is out of its range; the message names it and its value.
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = None
    optimizer: Any = "same"
    combiner: str | None = "mean"
    placement: str = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256
    admission: Admission | None = None
    expiry: Expiry | Sequence[Expiry] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"name of a table must be a string that is not empty, not {self.name!r}"
            )
        self.vocabulary_size = check_integer("vocabulary_size", self.vocabulary_size, 1, INT64_MAX)
        self.embedding_dim = check_integer("embedding_dim", self.embedding_dim, 1, MAX_DIM)
        pooling.check_combiner(self.combiner)
        self.expiry = lifetimes.checked(self.admission, self.expiry)
        if self.initializer is None:
            stddev = self.embedding_dim**-0.5 / initializers.TRUNCATED_STDDEV
            self.initializer = keras.initializers.TruncatedNormal(stddev=stddev)
        if self.placement not in ("auto", "default_device"):
            raise ValueError(
                f'placement of table {self.name} must be "auto" or "default_device", not'
                f" {self.placement!r}"
            )

    def get_config(self) -> dict[str, Any]:
        """The arguments, for Keras serialization."""
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("initializer", "optimizer"):
            if not isinstance(config[name], str):
                config[name] = keras.saving.serialize_keras_object(config[name])
        return config | lifetimes.serialized(self.admission, self.expiry)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TableConfig:
        """The inverse of `get_config`."""
        config = dict(config)
        for name in ("initializer", "optimizer"):
            if isinstance(config[name], dict):
                config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**lifetimes.deserialized(config))


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(eq=False)
class FeatureConfig:
    """A feature, and the table that its ids are looked up in.

    Attributes:
      name: for errors.
      table: features that have the same one share its rows.
      input_shape: of the ids, the batch included, for who makes the inputs of a model; not checked.
      output_shape: of the output, the batch included, of which the last dimension is checked.

    Raises:
      ValueError: table is no TableConfig, or output_shape does not end with its width.
    """

    name: str
    table: TableConfig
    input_shape: Sequence[int | None] | None = None
    output_shape: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.table, TableConfig):
            raise ValueError(
                f"table of feature {self.name} must be a TableConfig, not {self.table!r}"
            )
        for name in ("input_shape", "output_shape"):
            shape = getattr(self, name)
            setattr(self, name, None if shape is None else tuple(shape))
        if self.output_shape and self.output_shape[-1] not in (None, self.table.embedding_dim):
            raise ValueError(
                f"output_shape of feature {self.name} is {self.output_shape}, but table"
                f" {self.table.name} has embedding_dim = {self.table.embedding_dim}"
            )

    def get_config(self) -> dict[str, Any]:
        """The arguments, for Keras serialization."""
        return {
            "name": self.name,
            "table": self.table.get_config(),
            "input_shape": self.input_shape and list(self.input_shape),
            "output_shape": self.output_shape and list(self.output_shape),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FeatureConfig:
        """The inverse of `get_config`."""
        return cls(**{**config, "table": TableConfig.from_config(config["table"])})


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
        return tuple(self.nested) if isinstance(self.nested, dict) else ()

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
