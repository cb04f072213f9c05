"""The rows of a layer, where they are: in its table, or behind the caches of the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf.layers.optimizer_binding import OptimizerBinding
from het_tf.runtime.counters import with_ratios
from het_tf.storage.checkpoints.keras_files import load_rows, save_rows
from het_tf.tables.table import EmbeddingTable
from het_tf.tables.worker_cache import WorkerCache


class StoredRows:
    """The part of `HetEmbedding` that updates, flushes, counts and saves them."""

    built: bool
    name: str
    nonfinite: str
    _strategy: tf.distribute.Strategy | None
    _table: EmbeddingTable
    _worker_cache: WorkerCache
    _anchor: keras.Variable
    make_table: Callable[..., None]
    binding: OptimizerBinding
    _trainable_variables: list[keras.Variable]
    _non_trainable_variables: list[keras.Variable]

    @property
    def table(self) -> EmbeddingTable:
        """The table. Updates that caches have not sent are not in it: `flush`.

        Raises:
          ValueError: the layer is not built yet.
        """
        self._check_has_table()
        return self._table

    @property
    def worker_cache(self) -> WorkerCache:
        """The cache that every worker keeps of the table.

        Raises:
          ValueError: as for `table`.
        """
        self._check_has_table()
        return self._worker_cache

    @property
    def has_table(self) -> bool:
        """Whether it is made: when what trains the rows is known, or when somebody asks for it."""
        return hasattr(self, "_table")

    def _check_has_table(self) -> None:
        if not self.built:
            raise ValueError(f"layer {self.name} has no table until it is built or called")
        if not self.has_table:
            with tf.init_scope():
                self.make_table()

    @property
    def is_cached(self) -> bool:
        """Whether rows are read and updated through `worker_cache`, and not in the table itself."""
        # A local table is in this process, and is cached only if its rows are wanted elsewhere.
        if self._strategy is not None:
            return True
        cache = getattr(self, "_worker_cache", None)
        return cache is not None and cache.on_device

    def found_op(self, keys: tf.Tensor) -> tf.Tensor:
        """What `update_op` takes as a ticket for keys, int64 [keys], that were not looked up."""
        if self.is_cached:
            cache = self._worker_cache
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
        """One update of each key of a lookup.

        Args:
          ticket: of the lookup; or of `found_op`.
          pooled: of `pool_op`; None: its rows were not pooled.
          gradients: float32 [bags, output_dim] of each feature.
          learning_rate: float32 scalar.
          sends: as of `WorkerCache.update_op`.

        Returns:
          The update, which later ops can be made to wait for; None in eager calls.
        """
        cache, table = self._worker_cache, self._table
        if pooled is not None and not self.is_cached:
            return table.apply_pooled_op(ticket, pooled, gradients, learning_rate, self.nonfinite)
        if pooled is not None:
            return cache.update_pooled_op(ticket, pooled, gradients, learning_rate, sends)
        if not self.is_cached:
            return table.apply_op(ticket, *gradients, learning_rate, self.nonfinite)
        return cache.update_op(ticket, *gradients, learning_rate, sends)

    def flush(self) -> None:
        """Sends what the caches hold back. `fit`, `evaluate` and saving do so anyway.

        Under a strategy those are the workers' and, for steps outside of `coordinator.schedule`,
        the coordinator's.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        if not self.built or not self.has_table or not self.is_cached:
            return
        # A strategy of ours passes over workers that are down, and says what they lost.
        flusher = self._strategy if hasattr(self._strategy, "flush") else self._worker_cache
        flusher.flush()

    def cache_stats(self) -> dict[str, int | float]:
        """Counters of the caches of all workers and of the coordinator, summed, and their ratios.

        Without those of workers that are down. Without a strategy there is a cache only where the
        table's rows are on a GPU, else this is empty.

        Returns:
          A key is an id of which a lookup takes one, however often it occurs. Since the caches were
          made:

          - "lookups"; "ids", occurrences and all; "keys".
          - "hit_ids", "hits": ids and keys whose row was in the cache; "hit_rate": hit_ids / ids;
            "key_hit_rate": hits / keys.
          - "stale_hits": hits whose row was fetched again, since it had passed the read bound;
            "checks_spared": hits that no server was asked about, since it sends the row by itself
            once it has passed the bound; "rows_unasked": rows that came that way; "refreshes":
            stale_hits + rows_unasked.
          - "misses": keys whose row was not there; "initialized": those of them that nobody had
            updated, and that were computed here; "visitors": those whose value came without
            optimizer slots, since they are not worth a line.
          - "updates": one a key and step; "nonfinite_skipped": those left out for NaN or infinity.
          - "rows_pushed": rows sent; "updates_pushed": the updates that they carried;
            "updates_lost": updates whose shard was cleared or restored before it had them.
            "updates_undone": with `exactly_once`, of closures that failed and were run again.
          - "evictions": rows that left a full cache; "dirty_evictions": with updates not yet sent.
            Where rows are on a GPU: "rows_to_host" of them that the host keeps; "rows_from_host":
            misses whose row it had kept, and no server sent.
          - "messages": requests; "bytes_up", "bytes_down": of requests and of replies;
            "bytes_up_push": the part of bytes_up that pushes take.
          - "bytes_to_device", "bytes_from_device": where rows are on a GPU, what the cache copies
            there and back: ids, rows that came; keys that messages name, rows that are pushed.

          Now: "rows" in the caches, "pending" updates that no shard is known to have, and
          "memory_bytes" of rows, unsent updates and index.

        Raises:
          ValueError: as for `table`.
          RuntimeError: the cluster was closed.
        """
        self._check_has_table()
        if not self.is_cached:
            return {}
        getattr(self._strategy, "check_open", lambda: None)()
        return with_ratios(self.worker_cache.stats())

    def save_own_variables(self, store: Any) -> None:
        """Puts the weights and all rows of the table into a Keras weights file.

        In `het_tf.checkpoint.rows_in(folder)` a pointer takes the place of the rows. A layer
        that is not built puts nothing there, as Keras's do.
        """
        if not self.built:
            return
        self._check_has_table()
        self.flush()
        for i, variable in enumerate(self._trainable_variables + self._non_trainable_variables):
            store[str(i)] = 0.0 if variable is self._anchor else variable
        save_rows(store, self.table, self.name)

    def load_own_variables(self, store: Any) -> None:
        """Replaces the weights and all rows of the table; the caches start empty."""
        if not self.built and not store.keys():
            return
        self._check_has_table()
        load_rows(store, self.table, self.name)
        for i, variable in enumerate(self._trainable_variables + self._non_trainable_variables):
            if variable is not self._anchor:
                variable.assign(store[str(i)])
        moved_with = str(i + 1)
        if self.binding.rate_variable is not None and moved_with in set(store.keys()):
            self.binding.load_rate(float(np.asarray(store[moved_with])))
