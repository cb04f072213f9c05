"""Storage of a layer's rows: a table, accessed directly or through a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from het_tf import lifetimes, ops, optimizers, row_storage
from het_tf.cache_config import CacheConfig
from het_tf.layers.keras_parity import check_cache_hears
from het_tf.optimizers.rows import constrained
from het_tf.runtime.counters import with_ratios
from het_tf.runtime.current_strategy import parameter_servers, warn_of_idle_cluster
from het_tf.storage.checkpoints.keras_files import load_rows, save_rows
from het_tf.tables.table import EmbeddingTable
from het_tf.tables.worker_cache import WorkerCache


class LayerTable:
    """The table of one `HetEmbedding`, and the cache of the table.

    The table is created when the optimizer of the rows is known, or at the first access.

    Attributes:
      first_values: float32 [n, output_dim], the values of the keys 0 .. n - 1. None: there are
        none, or the table contains them.
    """

    def __init__(self, layer: Any, first_values: np.ndarray | None):
        """Creates the storage of a layer that is not built yet."""
        self._layer = layer
        self.first_values = first_values
        self._strategy: tf.distribute.Strategy | None = None
        self._devices: list[str] = []
        self._planned: Any = None  # `het_tf.planner.TablePlan`
        self._table: EmbeddingTable | None = None
        self._worker_cache: WorkerCache | None = None

    def place(self, strategy: tf.distribute.Strategy) -> None:
        """Chooses the place of the table: the parameter servers or this process.

        Raises:
          ValueError: the strategy is not a ParameterServerStrategy and has several replicas.
        """
        self._devices = parameter_servers(strategy)
        self._strategy = strategy if self._devices else None
        plan = getattr(self._strategy, "plan", None)
        if plan is not None:
            self._planned = plan.table_of(self._layer.path, self._layer.name)
            self._devices = [self._devices[server] for server in self._planned.servers]
        if not self._devices:
            warn_of_idle_cluster(f"Layer {self._layer.name!r} is built")

    @property
    def cache(self) -> CacheConfig | None:
        """The config of the workers' caches, where the table was placed. None: without a cache."""
        cache = self._layer.cache
        if cache == "auto":
            cache = CacheConfig() if hasattr(self._strategy, "held") else None
        if self._planned is not None and cache is not None and cache.capacity is None:
            cache = dataclasses.replace(cache, capacity=self._planned.capacity)
        return cache

    @property
    def exists(self) -> bool:
        """Whether the table has been created."""
        return self._table is not None

    @property
    def table(self) -> EmbeddingTable:
        """The table. An access creates the table if necessary.

        Raises:
          ValueError: the layer is not built yet.
        """
        self.ensure()
        return self._table

    @property
    def worker_cache(self) -> WorkerCache:
        """The cache of the table that every worker keeps. Created and raises as `table`."""
        self.ensure()
        return self._worker_cache

    def ensure(self) -> None:
        """Creates the table if it does not exist.

        Raises:
          ValueError: the layer is not built yet.
        """
        layer = self._layer
        if not layer.built:
            raise ValueError(f"layer {layer.name} has no table until it is built or called")
        if not self.exists:
            with tf.init_scope():
                layer.make_table()

    def make(self, replaced: EmbeddingTable | None) -> EmbeddingTable:
        """Creates the table. It imports the rows of `replaced`, and slots of the same kind."""
        layer, devices = self._layer, self._devices
        synchronous = getattr(self._strategy, "synchronous", False)
        if synchronous:
            if self.cache is not None:
                self.cache.check_synchronous(layer.name)
            if layer.wire_dtype != "float32":
                raise ValueError(
                    f"layer {layer.name} has wire_dtype = {layer.wire_dtype!r}, which"
                    " synchronous=True of the strategy excludes: rounded gradients would make"
                    " another row of it on each worker"
                )
        if devices:
            check_cache_hears(layer.name, self.cache, layer.expiry, layer.key_ranges)
        table = EmbeddingTable(
            layer.output_dim,
            # Rows have no slots until their optimizer is known.
            constrained(layer.optimizer or optimizers.SGD(), layer.embeddings_constraint),
            initializer=layer.row_initializer,
            seed=layer.seed,
            clock=self.cache.clock if self.cache and devices else "count",
            devices=devices,
            name=layer.name,
            input_dim=layer.input_dim,
            row_dtype=layer.row_dtype,
            lifetimes=lifetimes.spec(layer.admission, layer.expiry, layer.key_ranges),
            storage=row_storage.spec(
                layer.storage, None if self._planned is None else self._planned.memory
            ),
            key_initializers=layer.key_initializers(),
            layout=layer.layout,
        )
        if replaced is not None:
            table.import_table(replaced)
        elif self.first_values is not None:
            table.assign(np.arange(len(self.first_values)), self.first_values)
            self.first_values = None
        self._table = table
        self._worker_cache = WorkerCache(
            table,
            self.cache,
            layer.nonfinite,
            layer.wire_dtype,
            workers_on_host=getattr(self._strategy, "workers_on_host", 1),
            synchronous=synchronous,
        )
        if hasattr(self._strategy, "held"):
            self._strategy.held.register_cache(self._worker_cache)
        return table

    @property
    def is_cached(self) -> bool:
        """Whether rows are read and updated through `worker_cache`, not in the table itself."""
        # A table of this process is only cached if its rows are on a GPU.
        if self._strategy is not None:
            return True
        return self._worker_cache is not None and self._worker_cache.on_device

    def found_op(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns a ticket for `update_op`, for keys that were not looked up, int64 [keys]."""
        if self.is_cached:
            cache = self.worker_cache
            return cache.installed_op(cache.unique_ids_op(keys))
        return ops.unique_ids(keys)

    def update_op(
        self,
        ticket: tf.Tensor,
        pooled: tf.Tensor | None,
        gradients: Sequence[tf.Tensor],
        learning_rate: tf.Tensor,
        sends: bool,
    ) -> tf.Operation | None:
        """Updates each key of a lookup once.

        Args:
          ticket: ticket of the lookup or of `found_op`.
          pooled: scalar variant of `pool_op`. None: the rows were not pooled.
          gradients: float32 [bags, output_dim] per feature.
          learning_rate: float32 scalar.
          sends: see `WorkerCache.update_op`.

        Returns:
          The update op, for control dependencies of later ops. None in eager calls.
        """
        cache, table, nonfinite = self.worker_cache, self.table, self._layer.nonfinite
        if pooled is not None and not self.is_cached:
            return table.apply_pooled_op(ticket, pooled, gradients, learning_rate, nonfinite)
        if pooled is not None:
            return cache.update_pooled_op(ticket, pooled, gradients, learning_rate, sends)
        (of_ids,) = gradients
        if not self.is_cached:
            return table.apply_op(ticket, of_ids, learning_rate, nonfinite)
        return cache.update_op(ticket, of_ids, learning_rate, sends)

    def flush(self) -> None:
        """See `HetEmbedding.flush`."""
        if not self.exists or not self.is_cached:
            return
        # A strategy of het_tf skips workers that are down, and reports their lost updates.
        flusher = self._strategy if hasattr(self._strategy, "flush") else self._worker_cache
        flusher.flush()

    def stats(self) -> dict[str, int | float]:
        """See `HetEmbedding.cache_stats`."""
        self.ensure()
        if not self.is_cached:
            return {}
        getattr(self._strategy, "check_open", lambda: None)()
        return with_ratios(self.worker_cache.stats())

    def save(self, store: Any) -> None:
        """Writes all rows, or a pointer to them, to a Keras weights file."""
        self.ensure()
        self.flush()
        save_rows(store, self.table, self._layer.name)

    def load(self, store: Any) -> None:
        """Replaces all rows, and empties the caches."""
        load_rows(store, self.table, self._layer.name)
