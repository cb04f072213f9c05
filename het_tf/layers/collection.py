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

from het_tf import initializers, ops
from het_tf.cache_config import CacheConfig
from het_tf.layers.embedding import HetEmbedding
from het_tf.layers.exporting import served_table
from het_tf.layers.features import (
    FeatureConfig,
    Group,
    Plan,
    TableConfig,
    decoded,
    encoded,
    without_tuples,
)
from het_tf.layers.ids import keys_of, keys_of_stock_ops, map_values
from het_tf.lifetimes import KeyRange
from het_tf.runtime.validation import INT64_MAX
from het_tf.tables import pooling
from het_tf.tables.pooling import Bags


def _interleave(features: Sequence[Bags], outputs: Sequence[tuple[int | None]]) -> bool:
    """Whether their bags can be looked up as those of one feature, in the order of the examples.

    Then its outputs are those of the features as they are to lie: nothing is copied.

    Args:
      features: of one width.
      outputs: their `shapes`.
    """
    # Where an axis but the first is unknown, as many bags need not be bags of the same shape.
    alike = {each.combiner for each in features if each.pools}
    return (
        len(alike) <= 1
        and None not in outputs[0][1:-1]
        and all(each.weights is None and each.splits.shape.rank == 0 for each in features)
    )


def _interleaved(keys: tf.Tensor, features: Sequence[Bags]) -> Bags:
    """The bags of features as those of one.

    Args:
      keys: int64 [ids]: the first bag of each feature, then the second of each, and so on.
      features: those that `interleave`.
    """
    sizes = [each.size for each in features]
    pooled = next((each for each in features if each.pools), features[0])
    count, size = tf.size(keys, tf.int64), sizes[0]
    if len(set(sizes)) > 1:
        apart = sum(sizes)
        begins = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        bounds = tf.range(0, count, apart)[:, tf.newaxis] + begins
        count, size = tf.concat([tf.reshape(bounds, [-1]), [count]], 0), 1

    def restore(outputs: tf.Tensor) -> tf.Tensor:
        width = len(features) * outputs.shape[-1]
        return features[0].restore(tf.reshape(outputs, [-1, width]))

    return dataclasses.replace(pooled, ids=keys, splits=count, size=size, restore=restore)


def _output_shapes(
    features: Sequence[FeatureConfig], inputs: Sequence[Any]
) -> list[tuple[int | None]]:
    """Those of the outputs of features, with what others say of the axes that they share.

    Raises:
      ValueError: one is ragged, or of an unknown number of axes, or they differ in more than their
        last axes.
    """
    outer = tf.TensorShape(None)
    said_by = ""
    widths = []
    for feature, x in zip(features, inputs, strict=True):
        table = feature.table
        if isinstance(x.shape, tf.TensorShape) and x.shape.rank is None:
            raise ValueError(
                f"inputs of feature {feature.name} must have a known number of axes where"
                " concatenate=True"
            )
        *axes, width = pooling.output_shape(x.shape, table.combiner, table.embedding_dim)
        ragged = x.ragged if isinstance(x, keras.KerasTensor) else isinstance(x, tf.RaggedTensor)
        if ragged and len(axes) > 1:
            raise ValueError(
                f"concatenate=True takes dense outputs, but that of feature {feature.name} is"
                " ragged: let its table have a combiner, or leave concatenate out"
            )
        if not outer.is_compatible_with(axes):
            raise ValueError(
                "concatenate=True takes outputs that differ in their last axes alone, but that of"
                f" feature {feature.name} has shape {(*axes, width)}, and {said_by} have"
                f" {(*outer, None)}"
            )
        outer = outer.merge_with(axes)
        said_by = f"{said_by}, {feature.name}" if said_by else f"those of {feature.name}"
        widths.append(width)
    return [(*outer.as_list(), width) for width in widths]


def _joined_shape(outputs: Sequence[tuple[int | None]]) -> tuple[int | None]:
    """The shape of what `shapes` become."""
    return (*outputs[0][:-1], sum(shape[-1] for shape in outputs))


# How far apart the keys of tables that share one begin: in multiples of it, so that a table keeps
# its keys while others, or itself, grow to as many ids. Not farther: messages give each key as few
# bytes as all keys of a step need, here five for up to 256 tables.
_KEYS_APART = 1 << 32


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
    With concatenate one tensor: those of the features behind one another along the last axis, in
    the order of `keras.tree.flatten` (of a dict: of its sorted keys).

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
        concatenate: bool = False,
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
          concatenate: the output is one tensor. Rows and gradients are not copied to join them,
            unlike with `keras.layers.Concatenate`, if all features are of one width and optimizer,
            those of more than one id of one combiner, and each has a number of ids in every example
            that its `keras.Input` says, and no weights.
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
        if not isinstance(concatenate, bool):
            raise ValueError(f"concatenate must be True or False, not {concatenate!r}")
        self.concatenate = concatenate
        self.supports_jit = False
        self.autocast = False
        self._plan = Plan(feature_configs)
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

    def _make_group(self, number: int, tables: Sequence[TableConfig]) -> Group:
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
            trainable=self.trainable,
            name=f"{self.name}_{number}",
        )
        features = [i for i, f in enumerate(self._plan.features) if f.table.name in offsets]
        return Group(layer, offsets, features)

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
          A structure like that of the features; with concatenate one tensor.

        Raises:
          ValueError: a structure is another, outputs cannot be concatenated, or inputs or weights
            are such that `HetEmbedding` refuses them.
          tf.errors.InvalidArgumentError: an id is not in [0, vocabulary_size), or no whole number,
            or was cast to a type that does not hold it; or outputs that are to be one tensor are of
            different numbers of examples.
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
        if not self.concatenate:
            return self._plan.pack(self._outputs(bags, training))
        shapes = _output_shapes(self._plan.features, given)
        if len(self._plan.groups) > 1 or not _interleave(bags, shapes):
            return tf.concat(self._outputs(bags, training), -1)
        (group,) = self._plan.groups
        keys = self._keys_op(group, [each.ids for each in bags], [each.size for each in bags])
        together = _interleaved(keys, bags)
        (output,) = group.layer.outputs_of(keys, [together], training)
        output = together.restore(output)
        output.set_shape(_joined_shape(shapes))
        return output

    def _outputs(self, bags: Sequence[pooling.Bags], training: bool | None) -> list[Any]:
        """By feature."""
        outputs: list[Any] = [None] * len(bags)
        for group in self._plan.groups:
            features = [bags[i] for i in group.features]
            keys = self._keys_op(group, [each.ids for each in features])
            pooled = group.layer.outputs_of(keys, features, training)
            for i, each, output in zip(group.features, features, pooled, strict=True):
                outputs[i] = each.restore(output)
        return outputs

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

    def _keys_op(
        self, group: Group, ids: Sequence[tf.Tensor], bag_sizes: Sequence[int] = ()
    ) -> tf.Tensor:
        """The keys of features one after the other, or, with the sizes of their bags, by bag."""
        configs = [self._plan.features[i] for i in group.features]
        offsets = [group.offsets[config.table.name] for config in configs]
        sizes = [config.table.vocabulary_size for config in configs]
        names = [config.name for config in configs]
        if served_table(group.layer) is None:
            return ops.stack_ids(
                ids, offsets=offsets, sizes=sizes, names=names, bag_sizes=list(bag_sizes)
            )
        keys = []  # with stock ops
        for each, offset, size, name in zip(ids, offsets, sizes, names, strict=True):
            key = tf.cast(each, tf.int64)
            message = f"ids of feature {name} are not all in [0, {size}):"
            known = tf.reduce_all((key >= 0) & (key < size))
            check = tf.debugging.Assert(known, [message, each])
            with tf.control_dependencies([] if check is None else [check]):
                keys.append(key + offset)
        if not bag_sizes:
            return tf.concat(keys, 0)
        bags = [tf.reshape(key, [-1, n]) for key, n in zip(keys, bag_sizes, strict=True)]
        return tf.reshape(tf.concat(bags, 1), [-1])

    def compute_output_spec(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> Any:
        """The shapes of what `call` returns."""
        inputs, weights = self._plan.with_weights(inputs, weights)
        given = self._plan.flatten("inputs", inputs)
        if self.concatenate:
            shapes = _output_shapes(self._plan.features, given)
            return keras.KerasTensor(_joined_shape(shapes), dtype=self.compute_dtype)
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
            without_tuples(self._plan.nested), keras.KerasTensor, without_tuples(input_shapes)
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

    def place_of(self, table: str) -> tuple[HetEmbedding, range]:
        """Where the rows of a table are: the layer that has them, and their keys there, by id.

        Raises:
          ValueError: there is no table of that name.
        """
        for group in self._plan.groups:
            if table in group.offsets:
                first = group.offsets[table]
                return group.layer, range(first, first + self._plan.tables[table].vocabulary_size)
        raise ValueError(f"table = {table!r}, but layer {self.name} has {list(self._plan.tables)}")

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
            "structure": encoded(self._plan.pack(range(len(features)))),
            "features": features,
            "tables": [table.get_config() for table in self._plan.tables.values()],
            "cache": keras.saving.serialize_keras_object(self.cache),
            "seed": self.seed,
            "nonfinite": self.nonfinite,
            "row_dtype": self.row_dtype,
            "wire_dtype": self.wire_dtype,
            "concatenate": self.concatenate,
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
        made = cls(decoded(config.pop("structure"), features), **config)
        for layer, optimizer in zip(made.layers, compiled, strict=False):
            layer.binding.take_config(optimizer)
        return made
