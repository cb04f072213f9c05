"""What a collection is told of its features and tables, in the shape of keras-rs's configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from het_tf import initializers, lifetimes, pooling
from het_tf._arguments import INT64_MAX, MAX_DIM, check_integer
from het_tf.lifetimes import Admission, Expiry


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
