"""Many features and tables as one layer, in the shape of keras-rs's DistributedEmbedding.

Tables of one width and optimizer lie behind one another in one table of het_tf, which
has one cache on each worker. So what a step looks up in them is one lookup, whatever the number of
features.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf import initializers, lifetimes, ops, pooling
from het_tf._arguments import INT32_MAX, INT64_MAX, check_integer
from het_tf.cache_config import CacheConfig
from het_tf.layers.embedding import HetEmbedding
from het_tf.layers.exporting import served_table
from het_tf.layers.ids import keys_of, keys_of_stock_ops, map_values
from het_tf.lifetimes import Admission, Expiry, KeyRange

# How far apart the keys of tables that share one begin: in multiples of it, so that a table keeps
# its keys while others, or itself, grow to as many ids. Not farther: messages give each key as few
# bytes as all keys of a step need, here five for up to 256 tables.
_KEYS_APART = 1 << 32


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
    optimizer: Any = "adam"
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
        self.embedding_dim = check_integer("embedding_dim", self.embedding_dim, 1, INT32_MAX)
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
      output_shape: of the output, the batch included; None: not checked.

    Raises:
      ValueError: output_shape does not end with the table's width.
    """

    name: str
    table: TableConfig
    input_shape: Sequence[int | None] | None = None
    output_shape: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
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
class _Group:
    """Tables that share a cache.

    Attributes:
      layer: whose table holds theirs.
      offsets: by table name, its first key.
      features: places in the list of all features.
    """

    layer: HetEmbedding
    offsets: dict[str, int]
    features: list[int]


class _Plan:
    """Which features and tables there are. Keras would wrap what is in it, were it the layer's."""

    def __init__(self, feature_configs: Any):
        self.nested = feature_configs
        self.features: list[FeatureConfig] = keras.tree.flatten(feature_configs)
        self.tables: dict[str, TableConfig] = {}
        self.groups: list[_Group] = []
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
        nested = _without_tuples(nested)
        try:
            keras.tree.assert_same_structure(_without_tuples(self.nested), nested)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{what} must have the structure of feature_configs: {error}"
            ) from error
        return keras.tree.flatten(nested)

    def pack(self, flat: Sequence[Any]) -> Any:
        """The inverse of `flatten`."""
        return keras.tree.pack_sequence_as(self.nested, flat)


@keras.saving.register_keras_serializable("het_tf")
class HetEmbeddingCollection(keras.layers.Layer):
    """Looks up many features in many tables, and pools each one's rows.

    It takes the place of `keras_rs.layers.DistributedEmbedding`. Tables of one embedding_dim and
    optimizer share one table and one cache: a step has one lookup and one update for all of their
    features, and one message to each parameter server.

    What was saved is restored to tables of the same names, whose vocabularies may have grown. New
    tables come behind those of before, in the order of the features (of a dict: of its keys).

    Input: a structure like feature_configs; of each feature integers, dense of any rank, ragged or
    sparse, and if there are weights, a structure of weights like it.
    Output: the same structure; of each feature what `HetEmbedding` with its table's combiner gives.

    Attributes:
      layers: the `HetEmbedding` that hold the tables, for their `table`, `cache_stats` and so on.
    """

    def __init__(
        self,
        feature_configs: Any,
        *,
        cache: CacheConfig | None = None,
        seed: int | None = None,
        nonfinite: str = "error",
        row_dtype: str = "float32",
        wire_dtype: str = "float32",
        table_stacking: str | Sequence[Any] | None = "auto",
        update_stats: bool = False,
        **kwargs: Any,
    ):
        """Describes the layer; the tables are made when it is built.

        Args:
          feature_configs: a nested structure of `FeatureConfig`.
          cache: of each table that others share; as of `HetEmbedding`.
          seed: of the initial values; None: drawn now.
          nonfinite: as of `HetEmbedding`.
          row_dtype: as of `HetEmbedding`.
          wire_dtype: as of `HetEmbedding`.
          table_stacking: "auto", None or lists of tables' names, as of keras-rs; taken and not
            needed: tables of one embedding_dim and optimizer share one in any case.
          update_stats: False: there is nothing to be tuned by statistics.
          **kwargs: of `keras.layers.Layer`.

        Raises:
          ValueError: an argument is out of its range; the message names it.
        """
        super().__init__(**kwargs)
        if update_stats:
            raise ValueError(
                f"update_stats must be False, not {update_stats!r}: no sizes are tuned by it;"
                " cache_stats() of each of `layers` counts what its caches do"
            )
        self.cache = cache
        self.seed = random.getrandbits(62) if seed is None else seed
        self.nonfinite = nonfinite
        self.row_dtype, self.wire_dtype = row_dtype, wire_dtype
        self.supports_jit = False
        self.autocast = False
        self._plan = _Plan(feature_configs)
        self._plan.check_stacking(table_stacking)
        alike: dict[str, list[TableConfig]] = {}
        for table in self._plan.tables.values():
            config = table.get_config()
            key = [config["embedding_dim"], config["optimizer"]]
            alike.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(table)
        for tables in alike.values():
            self._plan.groups.append(self._make_group(len(self._plan.groups), tables))
        layout = tuple(
            (name, number, offset)
            for number, group in enumerate(self._plan.groups)
            for name, offset in group.offsets.items()
        )
        for group in self._plan.groups:
            group.layer.layout = layout
        # TensorFlow's checkpoints do not see into the list that Keras would make of a list.
        self.layers = tuple(group.layer for group in self._plan.groups)

    @property
    def feature_configs(self) -> Any:
        """The structure of `FeatureConfig`."""
        return self._plan.nested

    def _make_group(self, number: int, tables: Sequence[TableConfig]) -> _Group:
        offsets = {}
        end = 0
        for table in tables:
            offsets[table.name] = first = -(-end // _KEYS_APART) * _KEYS_APART
            end = first + table.vocabulary_size
        if end > INT64_MAX:
            raise ValueError(f"vocabulary_size of tables alike comes to {end}, beyond int64")
        # One for all, or for each table its own, with its vocabulary_size.
        kinds = [keras.initializers.get(table.initializer) for table in tables]
        specs = {
            initializers.spec(kind, table.vocabulary_size, table.embedding_dim)
            for kind, table in zip(kinds, tables, strict=True)
        }
        differ = len(specs) > 1 or initializers.depends_on_shape(kinds[0])
        key_ranges = [
            KeyRange(
                offsets[table.name],
                offsets[table.name] + table.vocabulary_size - 1,
                table.admission,
                table.expiry,
                kind if differ else None,
            )
            for table, kind in zip(tables, kinds, strict=True)
            if differ or table.admission is not None or table.expiry
        ]
        layer = HetEmbedding(
            tables[0].embedding_dim,
            optimizer=tables[0].optimizer,
            embeddings_initializer="zeros" if differ else kinds[0],
            seed=(self.seed + number) % 2**63,
            cache=self.cache,
            nonfinite=self.nonfinite,
            row_dtype=self.row_dtype,
            wire_dtype=self.wire_dtype,
            key_ranges=key_ranges,
            dtype=self.dtype_policy,
            name=f"{self.name}_{number}",
        )
        features = [i for i, f in enumerate(self._plan.features) if f.table.name in offsets]
        return _Group(layer, offsets, features)

    def build(self, input_shapes: Any = None) -> None:
        """Makes the tables. Raises as `HetEmbedding.build` does."""
        for layer in self.layers:
            if not layer.built:
                layer.build()
        self.built = True

    def call(self, inputs: Any, weights: Any = None, training: bool | None = None) -> Any:
        """Looks all features up; under a gradient tape, the backward pass updates their rows.

        Args:
          inputs: a structure like that of the features, of integers; or what `preprocess` returns.
          weights: a structure like it, of what `HetEmbedding` takes as weights; None: ones.
          training: as of Keras.

        Returns:
          A structure like that of the features.

        Raises:
          ValueError: a structure is another, or inputs or weights are such that `HetEmbedding`
            refuses them.
          tf.errors.InvalidArgumentError: an id is not in [0, vocabulary_size), or no whole number,
            or was cast to a type that does not hold it.
        """
        inputs, weights = self._plan.with_weights(inputs, weights)
        given = self._plan.flatten("inputs", inputs)
        weighted = [None] * len(given)
        if weights is not None:
            weighted = self._plan.flatten("weights", weights)
        bags = []
        for x, w, config in zip(given, weighted, self._plan.features, strict=True):
            name = f"feature {config.name}"
            exact = self._exact(x, f"ids of {name}")
            bags.append(pooling.bags_of(exact, w, config.table.combiner, None, name))
        outputs: list[Any] = [None] * len(bags)
        for group in self._plan.groups:
            features = [bags[i] for i in group.features]
            keys = self._keys_op(group, [each.ids for each in features])
            pooled = group.layer.outputs_of(keys, features, training)
            for i, each, output in zip(group.features, features, pooled, strict=True):
                outputs[i] = each.restore(output)
        return self._plan.pack(outputs)

    def preprocess(self, inputs: Any, weights: Any = None, training: bool = False) -> Any:
        """Inputs and weights as the layer takes them as one; nothing has to be prepared.

        In keras-rs it is called in a dataset's `map`.

        Args:
          inputs: as of `call`.
          weights: as of `call`.
          training: not needed.

        Returns:
          inputs; with weights `{"inputs": inputs, "weights": weights}`.
        """
        return inputs if weights is None else {"inputs": inputs, "weights": weights}

    def _exact(self, inputs: Any, name: str) -> Any:
        convert = keys_of if served_table(self.layers[0]) is None else keys_of_stock_ops
        return map_values(inputs, lambda ids: convert(ids, name))

    def _keys_op(self, group: _Group, ids: Sequence[tf.Tensor]) -> tf.Tensor:
        configs = [self._plan.features[i] for i in group.features]
        offsets = [group.offsets[config.table.name] for config in configs]
        sizes = [config.table.vocabulary_size for config in configs]
        names = [config.name for config in configs]
        if served_table(group.layer) is None:
            return ops.stack_ids(ids, offsets=offsets, sizes=sizes, names=names)
        keys = []  # with stock ops
        for each, offset, size, name in zip(ids, offsets, sizes, names, strict=True):
            key = tf.cast(each, tf.int64)
            message = f"ids of feature {name} are not all in [0, {size}):"
            known = tf.reduce_all((key >= 0) & (key < size))
            check = tf.debugging.Assert(known, [message, each])
            with tf.control_dependencies([] if check is None else [check]):
                keys.append(key + offset)
        return tf.concat(keys, 0)

    def compute_output_spec(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> Any:
        """The shapes of what `call` returns."""
        inputs, weights = self._plan.with_weights(inputs, weights)
        given = self._plan.flatten("inputs", inputs)
        return self._plan.pack(
            [
                pooling.output_spec(
                    x, config.table.combiner, config.table.embedding_dim, self.compute_dtype
                )
                for x, config in zip(given, self._plan.features, strict=True)
            ]
        )

    def compute_output_shape(self, input_shapes: Any) -> Any:
        """The shapes of what `call` returns, of ids of these, in the structure of the features."""
        # A shape is a structure itself: it ends where a feature is.
        specs = keras.tree.map_structure_up_to(
            _without_tuples(self._plan.nested), keras.KerasTensor, _without_tuples(input_shapes)
        )
        return keras.tree.map_structure(lambda spec: spec.shape, self.compute_output_spec(specs))

    def get_embedding_tables(self) -> dict[str, np.ndarray]:
        """The rows of all tables, float32 [vocabulary_size, embedding_dim], by name.

        Updates that workers have not sent are not in them: flush before (`HetEmbedding.flush`).

        Raises:
          ValueError: the layer is not built yet.
          tf.errors.UnavailableError: a parameter server is down.
        """
        tables = {}
        for group in self._plan.groups:
            for name, offset in group.offsets.items():
                keys = np.arange(self._plan.tables[name].vocabulary_size, dtype=np.int64)
                tables[name] = group.layer.table.lookup(keys + offset)
        return tables

    def get_config(self) -> dict[str, Any]:
        """The arguments, for Keras serialization. Features that share a table share it again."""
        names = list(self._plan.tables)
        features = [
            feature.get_config() | {"table": names.index(feature.table.name)}
            for feature in self._plan.features
        ]
        taken = [layer.get_config().get("compiled_optimizer") for layer in self.layers]
        return super().get_config() | {
            "compiled_optimizers": taken,
            "structure": _encoded(self._plan.pack(range(len(features)))),
            "features": features,
            "tables": [table.get_config() for table in self._plan.tables.values()],
            "cache": keras.saving.serialize_keras_object(self.cache),
            "seed": self.seed,
            "nonfinite": self.nonfinite,
            "row_dtype": self.row_dtype,
            "wire_dtype": self.wire_dtype,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HetEmbeddingCollection:
        """The inverse of `get_config`."""
        config = dict(config)
        tables = [TableConfig.from_config(table) for table in config.pop("tables")]
        features = [
            FeatureConfig(**{**feature, "table": tables[feature["table"]]})
            for feature in config.pop("features")
        ]
        if isinstance(config["cache"], dict):
            config["cache"] = keras.saving.deserialize_keras_object(config["cache"])
        compiled = config.pop("compiled_optimizers", ())
        made = cls(_decoded(config.pop("structure"), features), **config)
        for layer, optimizer in zip(made.layers, compiled, strict=False):
            layer.take_compiled(optimizer)
        return made


def _without_tuples(nested: Any) -> Any:
    """A structure with lists for its tuples: Keras makes them lists when it loads a model."""
    if isinstance(nested, dict):
        return {key: _without_tuples(value) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        return [_without_tuples(value) for value in nested]
    return nested


def _encoded(nested: Any) -> Any:
    """A structure of numbers in a form that JSON keeps: it has no tuples."""
    if isinstance(nested, dict):
        return {"dict": [[key, _encoded(value)] for key, value in nested.items()]}
    if isinstance(nested, (list, tuple)):
        kind = "tuple" if isinstance(nested, tuple) else "list"
        return {kind: [_encoded(value) for value in nested]}
    return nested


def _decoded(encoded: Any, leaves: Sequence[Any]) -> Any:
    """The inverse of `_encoded`, with leaves in the place of their numbers."""
    if not isinstance(encoded, dict):
        return leaves[encoded]
    ((kind, values),) = encoded.items()
    if kind == "dict":
        return {key: _decoded(value, leaves) for key, value in values}
    return {"list": list, "tuple": tuple}[kind](_decoded(value, leaves) for value in values)
