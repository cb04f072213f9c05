"""Layer for many features and tables, with the interface of keras-rs's DistributedEmbedding.

Tables with the same width and optimizer are consecutive key ranges of one het_tf table. This table
has one cache per worker. A step therefore needs one lookup for all features of these tables.
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
from het_tf.row_storage import Storage
from het_tf.runtime.validation import INT64_MAX
from het_tf.tables import pooling
from het_tf.tables.pooling import Bags


def _interleave(features: Sequence[Bags], outputs: Sequence[tuple[int | None]]) -> bool:
    """Whether features can be looked up as one feature, with their bags in the order of examples.

    The outputs of this one feature are the concatenated outputs. No copy is needed.

    Args:
      features: features of one width.
      outputs: result of `_output_shapes`.
    """
    # If an inner axis is unknown, equal numbers of bags do not imply equal shapes.
    alike = {each.combiner for each in features if each.pools}
    return (
        len(alike) <= 1
        and None not in outputs[0][1:-1]
        and all(each.weights is None and each.splits.shape.rank == 0 for each in features)
    )


def _interleaved(keys: tf.Tensor, features: Sequence[Bags]) -> Bags:
    """Returns the bags of several features as the bags of one feature.

    Args:
      keys: int64 [ids]: the first bag of every feature, then the second bag of every feature, etc.
      features: features for which `_interleave` is true.
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
    """Returns the output shape of every feature. Known outer axes of one feature apply to all.

    Raises:
      ValueError: an output is ragged, the number of axes of inputs is unknown, or the outputs
        differ in an axis before the last.
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
    """Returns the shape of the concatenated outputs."""
    return (*outputs[0][:-1], sum(shape[-1] for shape in outputs))


# The key range of every table begins at a multiple of this number. The keys of a table thus stay
# the same while the tables grow up to this number of ids. A larger distance would need longer
# messages: the largest key of a step sets the bytes per key, here 5 bytes for up to 256 tables.
_KEYS_APART = 1 << 32


@keras.saving.register_keras_serializable("het_tf")
class HetEmbeddingCollection(keras.layers.Layer):
    """Embedding layer for many features and tables. Pools the rows of every feature.

    The layer replaces `keras_rs.layers.DistributedEmbedding`. Tables with the same embedding_dim
    and optimizer share one het_tf table and one cache. A step needs one lookup, one update and one
    message to each parameter server for all features of these tables.

    Rows are restored by table name. Vocabularies may have grown since the layer was saved. New
    tables must follow the saved tables in the order of the features (of a dict: its sorted keys).

    Input: a structure like feature_configs. Every feature has integers: dense of any rank, ragged
    or sparse. Optional weights have the same structure.
    Output: the same structure. The output of a feature equals the output of a `HetEmbedding` with
    the combiner of the feature's table. With concatenate: one tensor, the outputs joined along the
    last axis in the order of `keras.tree.flatten` (of a dict: its sorted keys).

    Attributes:
      layers: the `HetEmbedding` layers of the shared tables, with `table`, `cache_stats` etc.
    """

    def __init__(
        self,
        feature_configs: Any,
        *,
        cache: CacheConfig | str | None = "auto",
        seed: int | None = None,
        nonfinite: str = "error",
        row_dtype: str = "float32",
        wire_dtype: str = "float32",
        storage: Storage | None = None,
        concatenate: bool = False,
        table_stacking: str | Sequence[Any] | None = "auto",
        update_stats: bool = False,
        **kwargs: Any,
    ):
        """Configures the layer. The tables are created when the layer is built.

        Args:
          feature_configs: a nested structure of `FeatureConfig`.
          cache: the cache of every shared table, as in `HetEmbedding`.
          seed: seed of the initial values. None: a random seed.
          nonfinite: as in `HetEmbedding`.
          row_dtype: as in `HetEmbedding`.
          wire_dtype: as in `HetEmbedding`.
          storage: as in `HetEmbedding`, for every shared table.
          concatenate: whether the output is one tensor. Unlike `keras.layers.Concatenate`, this
            copies no rows or gradients if all features have one width and one optimizer, features
            with several ids per example have one combiner, every `keras.Input` states the number of
            ids per example, and no weights are passed.
          table_stacking: "auto", None or lists of table names, as in keras-rs. No effect: tables
            with the same embedding_dim and optimizer always share a het_tf table.
          update_stats: must be False. No statistics are needed for tuning.
          **kwargs: arguments of `keras.layers.Layer`.

        Raises:
          ValueError: an argument is invalid; the message names it.
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
        self.row_dtype, self.wire_dtype, self.storage = row_dtype, wire_dtype, storage
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
        # Not a list: Keras would wrap it, and TensorFlow's checkpoints do not track the wrapper.
        self.layers = tuple(group.layer for group in self._plan.groups)

    @property
    def feature_configs(self) -> Any:
        """The nested structure of `FeatureConfig`."""
        return self._plan.nested

    def _make_group(self, number: int, tables: Sequence[TableConfig]) -> Group:
        offsets = {}
        end = 0
        for table in tables:
            offsets[table.name] = first = -(-end // _KEYS_APART) * _KEYS_APART
            end = first + table.vocabulary_size
        if end > INT64_MAX:
            raise ValueError(f"vocabulary_size of tables alike comes to {end}, beyond int64")
        # Tables need their own initializers if these differ or depend on vocabulary_size.
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
            storage=self.storage,
            key_ranges=key_ranges,
            dtype=self.dtype_policy,
            trainable=self.trainable,
            name=f"{self.name}_{number}",
        )
        features = [i for i, f in enumerate(self._plan.features) if f.table.name in offsets]
        return Group(layer, offsets, features)

    def build(self, input_shapes: Any = None) -> None:
        """Creates the tables. Raises the errors of `HetEmbedding.build`."""
        for layer in self.layers:
            if not layer.built:
                layer.build()
        self.built = True

    def call(self, inputs: Any, weights: Any = None, training: bool | None = None) -> Any:
        """Looks up all features. An optimizer that applies the gradients trains the rows.

        Args:
          inputs: a structure of integers, like feature_configs; or the result of `preprocess`.
          weights: a structure of weights, like feature_configs, with the weights of every feature
            as in `HetEmbedding.call`. None: all weights are 1.
          training: as in `HetEmbedding.call`.

        Returns:
          A structure like feature_configs. With concatenate: one tensor.

        Raises:
          ValueError: a structure differs from feature_configs, outputs cannot be concatenated, or
            inputs or weights are invalid for `HetEmbedding`.
          tf.errors.InvalidArgumentError: an id is not in [0, vocabulary_size), is not a whole
            number, or was cast to a dtype that is too small; or outputs to be concatenated have
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
        """Returns the output of every feature."""
        outputs: list[Any] = [None] * len(bags)
        for group in self._plan.groups:
            features = [bags[i] for i in group.features]
            keys = self._keys_op(group, [each.ids for each in features])
            pooled = group.layer.outputs_of(keys, features, training)
            for i, each, output in zip(group.features, features, pooled, strict=True):
                outputs[i] = each.restore(output)
        return outputs

    def preprocess(self, inputs: Any, weights: Any = None, training: bool = False) -> Any:
        """Returns inputs and weights as one argument of `call`. Changes nothing else.

        keras-rs calls this method in a dataset's `map`.

        Args:
          inputs: as in `call`.
          weights: as in `call`.
          training: no effect.

        Returns:
          inputs, or with weights: `{"inputs": inputs, "weights": weights}`.
        """
        return inputs if weights is None else {"inputs": inputs, "weights": weights}

    def _exact(self, inputs: Any, name: str) -> Any:
        convert = keys_of if served_table(self.layers[0]) is None else keys_of_stock_ops
        return map_values(inputs, lambda ids: convert(ids, name))

    def _keys_op(
        self, group: Group, ids: Sequence[tf.Tensor], bag_sizes: Sequence[int] = ()
    ) -> tf.Tensor:
        """Returns the keys of features, int64 [ids]: by feature, or by bag if sizes are given."""
        configs = [self._plan.features[i] for i in group.features]
        offsets = [group.offsets[config.table.name] for config in configs]
        sizes = [config.table.vocabulary_size for config in configs]
        names = [config.name for config in configs]
        if served_table(group.layer) is None:
            return ops.stack_ids(
                ids, offsets=offsets, sizes=sizes, names=names, bag_sizes=list(bag_sizes)
            )
        keys = []
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
        """Returns the shapes and the dtype of the result of `call`."""
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
        """Returns the shapes of the result of `call` for ids of shapes `input_shapes`."""
        # A shape is itself a structure. The structure of the features tells where a shape begins.
        specs = keras.tree.map_structure_up_to(
            without_tuples(self._plan.nested), keras.KerasTensor, without_tuples(input_shapes)
        )
        return keras.tree.map_structure(lambda spec: spec.shape, self.compute_output_spec(specs))

    def get_embedding_tables(self) -> dict[str, np.ndarray]:
        """Returns the rows of all tables by name, float32 [vocabulary_size, embedding_dim].

        Updates that workers have not sent are missing: call `HetEmbedding.flush` first.

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
        """Returns the layer that holds a table's rows, and the keys of the rows in it, by id.

        Raises:
          ValueError: no table has this name.
        """
        for group in self._plan.groups:
            if table in group.offsets:
                first = group.offsets[table]
                return group.layer, range(first, first + self._plan.tables[table].vocabulary_size)
        raise ValueError(f"table = {table!r}, but layer {self.name} has {list(self._plan.tables)}")

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for Keras serialization. Shared tables remain shared."""
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
            "storage": keras.saving.serialize_keras_object(self.storage),
            "concatenate": self.concatenate,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HetEmbeddingCollection:
        """Inverse of `get_config`."""
        config = dict(config)
        tables = [TableConfig.from_config(table) for table in config.pop("tables")]
        features = [
            FeatureConfig(**{**feature, "table": tables[feature["table"]]})
            for feature in config.pop("features")
        ]
        for name in ("cache", "storage"):
            if isinstance(config.get(name), dict):
                config[name] = keras.saving.deserialize_keras_object(config[name])
        compiled = config.pop("compiled_optimizers", ())
        made = cls(decoded(config.pop("structure"), features), **config)
        for layer, optimizer in zip(made.layers, compiled, strict=False):
            layer.binding.take_config(optimizer)
        return made
