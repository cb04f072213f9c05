"""Tables to plan for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from het_tf import optimizers
from het_tf.cache_config import CacheConfig
from het_tf.layers.embedding import named_embeddings
from het_tf.optimizers import row_forms
from het_tf.row_storage import Storage
from het_tf.runtime.validation import MAX_DIM, check_float_dtype, check_integer


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """What the planner needs to know of a layer. A built model's layers have it.

    Attributes:
      name: name of the layer.
      dim: number of columns of a row.
      optimizer: optimizer of the rows, as `HetEmbedding(optimizer=...)` takes it.
      cache: config of the workers' caches. The plan chooses `capacity` if it is None.
      row_dtype: as for `HetEmbedding`.
      wire_dtype: as for `HetEmbedding`.
      storage: as for `HetEmbedding`. The plan chooses `memory` if it is None. Plans do not have
        the time of the disk.
    """

    name: str
    dim: int
    optimizer: Any = "adagrad"
    cache: CacheConfig | None = dataclasses.field(default_factory=CacheConfig)
    row_dtype: str = "float32"
    wire_dtype: str = "float32"
    storage: Storage | None = None

    def __post_init__(self) -> None:
        check_integer("dim", self.dim, 1, MAX_DIM)
        check_float_dtype("row_dtype", self.row_dtype)
        check_float_dtype("wire_dtype", self.wire_dtype)
        if self.cache is not None and self.cache.device_capacity is not None:
            raise ValueError(
                f"table {self.name!r} has device_capacity = {self.cache.device_capacity!r}, which"
                " the planner has no figures for"
            )

    @property
    def row_optimizer(self) -> optimizers.Optimizer:
        """The optimizer of the rows in the form that tables take."""
        return row_forms.get(self.optimizer)


def tables_of(
    model_or_configs: keras.Model | Sequence[EmbeddingConfig],
) -> dict[str, EmbeddingConfig]:
    """Returns the tables to plan for, by name.

    Args:
      model_or_configs: built and compiled model, or configs.

    Raises:
      ValueError: the model has no built `HetEmbedding`, or a layer without an optimizer, or two
        configs have one name.
    """
    if not isinstance(model_or_configs, keras.Model):
        for config in model_or_configs:
            if not isinstance(config, EmbeddingConfig):
                raise ValueError(f"configs must be EmbeddingConfigs or a model, not {config!r}")
        tables = {config.name: config for config in model_or_configs}
        if len(tables) < len(model_or_configs) or not tables:
            raise ValueError(
                "configs must be at least one EmbeddingConfig, with different names, not"
                f" {[config.name for config in model_or_configs]}"
            )
        return tables
    tables = {}
    for name, layer in named_embeddings(model_or_configs).items():
        if layer.optimizer is None:
            raise ValueError(f"layer {name!r} has no optimizer: compile the model")
        cache: Any = CacheConfig() if layer.cache == "auto" else layer.cache
        tables[name] = EmbeddingConfig(
            name,
            layer.output_dim,
            layer.optimizer,
            cache,
            layer.row_dtype,
            layer.wire_dtype,
            layer.storage,
        )
    if not tables:
        raise ValueError(f"model {model_or_configs.name!r} has no built HetEmbedding")
    return tables
