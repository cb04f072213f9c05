"""Configuration of the features and tables of a collection, compatible with keras-rs."""

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
    """Returns `values` as a tuple, or as a namedtuple of the type of `like` if that is one."""
    return type(like)(*values) if hasattr(like, "_fields") else tuple(values)


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(eq=False)
class TableConfig:
    """Configuration of a table for one or more features.

    Attributes:
      name: name of the table, unique in a collection.
      vocabulary_size: number of ids, which start at 0. Rows without updates need no memory.
      embedding_dim: number of columns of the table.
      initializer: a Keras initializer or its name (see `het_tf.initializers.spec`). None: truncated
        normal with variance 1 / embedding_dim, as in keras-rs.
      optimizer: optimizer of the rows, as in `HetEmbedding`.
      combiner: "mean", "sum", "sqrtn", "max", or None: one output per id.
      admission: rule that selects the ids that get a row, as in `HetEmbedding`.
      expiry: rule that removes rows, as in `HetEmbedding`. Features with different rules need
        separate tables.
      placement: "auto" or "default_device", without effect.
      max_ids_per_partition: accepted without effect.
      max_unique_ids_per_partition: accepted without effect.

    Raises:
      ValueError: an attribute is out of range. The message names the attribute and its value.
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
        """Returns the arguments, for Keras serialization."""
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("initializer", "optimizer"):
            if not isinstance(config[name], str):
                config[name] = keras.saving.serialize_keras_object(config[name])
        return config | lifetimes.serialized(self.admission, self.expiry)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TableConfig:
        """Inverse of `get_config`."""
        config = dict(config)
        for name in ("initializer", "optimizer"):
            if isinstance(config[name], dict):
                config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**lifetimes.deserialized(config))


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(eq=False)
class FeatureConfig:
    """Configuration of a feature: its name, its table and its shapes.

    Attributes:
      name: name of the feature in error messages.
      table: table of the feature's ids. Features with the same `TableConfig` share rows.
      input_shape: shape of the ids with the batch axis, for code that creates inputs. Unchecked.
      output_shape: shape of the output with the batch axis. Only the last dimension is checked.

    Raises:
      ValueError: table is not a TableConfig, or output_shape does not end with its embedding_dim.
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
        """Returns the arguments, for Keras serialization."""
        return {
            "name": self.name,
            "table": self.table.get_config(),
            "input_shape": self.input_shape and list(self.input_shape),
            "output_shape": self.output_shape and list(self.output_shape),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FeatureConfig:
        """Inverse of `get_config`."""
        return cls(**{**config, "table": TableConfig.from_config(config["table"])})


@dataclasses.dataclass
class Group:
    """Tables that share a het_tf table and its caches.

    Attributes:
      layer: layer with the shared table.
      offsets: first key of every table, by table name.
      features: indices of the tables' features in `Plan.features`.
    """

    layer: HetEmbedding
    offsets: dict[str, int]
    features: list[int]


class Plan:
    """Features and tables of a collection. Keras would wrap these if the layer held them itself.

    Attributes:
      nested: structure of the features, with plain dicts. Other dicts, such as an OrderedDict, may
        have an order of their own.
      features: the features in the order of `keras.tree.flatten(nested)`.
      tables: tables by name.
      groups: groups of tables, empty until the collection adds them.
    """

    def __init__(self, feature_configs: Any):
        """Raises a ValueError for no or invalid features, unsortable keys, or equal table names."""
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
        """Raises a ValueError if `table_stacking` is invalid in keras-rs."""
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
        """Returns inputs and weights. Splits `inputs` if they are a result of `preprocess`."""
        is_both = isinstance(inputs, dict) and set(inputs) == {"inputs", "weights"}
        if is_both and weights is None and set(inputs) != set(self._keys):
            return inputs["inputs"], inputs["weights"]
        return inputs, weights

    @property
    def _keys(self) -> Sequence[str]:
        return tuple(self.nested) if isinstance(self.nested, dict) else ()

    def flatten(self, what: str, nested: Any) -> list[Any]:
        """Returns one value per feature of `nested`. Raises a ValueError for another structure."""
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
        """Inverse of `flatten`."""
        return keras.tree.pack_sequence_as(self.nested, flat)


def _with_plain_dicts(nested: Any) -> Any:
    if isinstance(nested, dict):
        try:
            sorted(nested)  # Keras flattens dicts with unsortable keys in insertion order.
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
    """Raises a ValueError if the fields of namedtuples differ, or the order of the fields."""
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
    """Replaces tuples by lists, as Keras does when it loads a model."""
    if isinstance(nested, dict):
        return {key: without_tuples(value) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        return [without_tuples(value) for value in nested]
    return nested


def encoded(nested: Any) -> Any:
    """Encodes a structure of numbers for JSON, which has no tuples."""
    if isinstance(nested, dict):
        return {"dict": [[key, encoded(value)] for key, value in nested.items()]}
    if isinstance(nested, (list, tuple)):
        kind = "tuple" if isinstance(nested, tuple) else "list"
        return {kind: [encoded(value) for value in nested]}
    return nested


def decoded(form: Any, leaves: Sequence[Any]) -> Any:
    """Inverse of `encoded`. Replaces every number by the leaf with this index."""
    if not isinstance(form, dict):
        return leaves[form]
    ((kind, values),) = form.items()
    if kind == "dict":
        return {key: decoded(value, leaves) for key, value in values}
    return {"list": list, "tuple": tuple}[kind](decoded(value, leaves) for value in values)
