"""Embedding tables: rows by int64 key, on parameter servers or in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import uuid
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from het_tf import initializers, lifetimes, ops, optimizers
from het_tf.runtime import deferred_destroy
from het_tf.runtime.counters import add_up, sum_stats
from het_tf.runtime.current_strategy import current_strategy, servers_named
from het_tf.runtime.validation import (
    INT64_MAX,
    MAX_DIM,
    check_clock,
    check_float_dtype,
    check_integer,
)
from het_tf.tables.exchange import Exchange

# Attributes of a cache op that stores no rows. Lookups fetch rows, and updates push gradients.
NO_CACHE = {"capacity": 0}

# Approximate size of a part of an export.
_EXPORT_PART_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class TableExport:
    """Rows of a table, in no particular order.

    Attributes:
      keys: int64 [rows].
      values: float32 [rows, dim].
      slots: float32 [rows, slot_dim], the optimizer's.
      clocks: int64 [rows], the number of updates merged into each row.
    """

    keys: np.ndarray
    values: np.ndarray
    slots: np.ndarray
    clocks: np.ndarray


class EmbeddingTable:
    """A table of embedding rows with one shard per device.

    The first update of a key creates its row, unless `lifetimes` has another rule. An import also
    creates rows. `lifetimes` may make rows expire. A key without a row needs no memory. A read of
    such a key returns its initial value, a function of (seed, key, column).

    Attributes:
      time: the time that `expire` was given last, or None.
      layout: the argument `layout`.
    """

    def __init__(
        self,
        dim: int,
        optimizer: optimizers.Optimizer,
        *,
        initializer: str = "uniform",
        seed: int = 0,
        clock: str = "count",
        devices: Sequence[str] = (),
        name: str = "table",
        input_dim: int | None = None,
        row_dtype: str = "float32",
        lifetimes: str = "",
        storage: str = "",
        key_initializers: Sequence[tuple[int, int, Any]] = (),
        layout: Sequence[tuple[str, int, int]] = (),
    ):
        """Creates the shards.

        Args:
          dim: number of columns of a row's value, at least 1.
          optimizer: one of `het_tf.optimizers`.
          initializer: a Keras initializer or its name (see `het_tf.initializers.spec`).
          seed: seed of the initial values, int64.
          clock: "count": a row's clock counts its updates. "lamport": the rule of the HET paper.
            "drift": a row's clock is the distance that its value has moved.
          devices: devices of the shards, in the order of the shards. Empty: one shard in this
            process.
          name: name of the table in errors. Several tables may have the same name.
          input_dim: number of keys, for initializers that depend on it. Not a bound of the keys.
          row_dtype: dtype of stored values, "float32" or "bfloat16".
          lifetimes: rules of admission and expiry (`het_tf.lifetimes.spec`). Empty: the first
            update of a key creates its row, and rows do not expire.
          storage: place of the rows (`het_tf.row_storage.spec`). Empty: memory.
          key_initializers: key ranges that have their own initializer, as (first key, last key,
            initializer).
          layout: for a collection that stores its tables in one or several `EmbeddingTable`s. One
            entry per table of the collection: name, index of the `EmbeddingTable`, first key.

        Raises:
          ValueError: an argument is out of its range.
          tf.errors.NotFoundError: a parameter server has not loaded the ops.
          tf.errors.InvalidArgumentError: `lifetimes` is not empty although clock is "lamport", or
            a server cannot make a file in the folder of `storage`.
        """
        dim = check_integer("dim", dim, 1, MAX_DIM)
        seed = check_integer("seed", seed, -INT64_MAX - 1, INT64_MAX)
        check_clock(clock)
        self.dim = dim
        self.optimizer = optimizer
        self.devices = tuple(devices)
        # The name must be unique in this process and on the parameter servers. TensorFlow rejects
        # names that begin with an underscore.
        self.shared_name = f"{'table' if name.startswith('_') else ''}{name}/{uuid.uuid4().hex}"
        self.row_attributes: dict[str, Any] = {
            "dim": dim,
            "optimizer": optimizer.spec(),
            "initializer": initializers.spec(initializer, input_dim, dim, key_initializers),
            "seed": seed,
            "clock": clock,
            "num_shards": self.num_shards,
            "row_dtype": check_float_dtype("row_dtype", row_dtype),
        }
        self.lifetimes = lifetimes
        self.storage = storage
        self.layout = tuple(layout)
        self.time: int | None = None
        deferred_destroy.destroy_all()
        self._handles = [self._create(shard) for shard in range(self.num_shards)]
        self._exchange = Exchange([self])
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        if self.devices and (strategy := current_strategy()) is not None:
            strategy.note_table(self)
        deferred_destroy.destroy_after(self, functools.partial(_destroy, self._handles))

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return max(1, len(self.devices))

    @property
    def is_local(self) -> bool:
        """Whether the table is in this process."""
        return not self.devices

    @functools.cached_property
    def slot_dim(self) -> int:
        """Number of columns of a row's optimizer slots."""
        # Exports the first of INT64_MAX parts, which has almost no rows, for its shape.
        return int(ops.table_export(self._handles[0], 0, INT64_MAX)[2].shape[1])

    def handle(self, shard: int) -> tf.Tensor:
        """Returns the handle of a shard for eager ops. They run on the shard's device."""
        return self._handles[shard]

    # Ops, in graphs and eagerly.

    def handle_op(self, shard: int) -> tf.Tensor:
        """Returns a handle of a shard on the current device."""
        return ops.table_handle(
            shared_name=f"{self.shared_name}/{shard}",
            shard=shard,
            lifetimes=self.lifetimes,
            storage=self.storage,
            **self.row_attributes,
        )

    def serve_op(self, shard: int, request: tf.Tensor) -> tf.Tensor:
        """Returns a shard's reply to a request of a cache. Runs on the shard's device.

        Args:
          shard: index of the shard.
          request: uint8 [bytes]. 0 bytes: no request.

        Returns:
          uint8 [bytes]. 0 bytes: there was no request.
        """
        return ops.table_sync(self.handle_op(shard), request)

    def exchange_op(self, requests: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends the requests of a cache to the shards and waits for the replies.

        Args:
          requests: uint8 [bytes], one per shard.

        Returns:
          The replies, uint8 [bytes], for `ops.cache_install`.
        """
        if self.is_local:
            return [
                ops.table_sync(handle, request)
                for handle, request in zip(self._handles, requests, strict=True)
            ]
        (replies,) = self._exchange.send_op([requests])
        return replies

    def lookup_op(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows of a local table.

        Args:
          ids: int64, of any shape.

        Returns:
          rows: float32 [ids, dim].
          found: scalar variant for `apply_op`.
        """
        return ops.table_lookup(self._handles[0], ids)

    def apply_op(
        self, found: tf.Tensor, gradients: tf.Tensor, learning_rate: tf.Tensor, nonfinite: str
    ) -> tf.Operation:
        """Updates every key of a lookup once, in a local table.

        Args:
          found: from `lookup_op`, or from `ops.unique_ids` for an update without a lookup.
          gradients: float32 [ids, dim].
          learning_rate: float32 scalar.
          nonfinite: "error" or "skip", see `WorkerCache`.
        """
        return ops.table_apply(
            self._handles[0], found, gradients, learning_rate, nonfinite=nonfinite
        )

    def pool_op(
        self,
        ids: tf.Tensor,
        splits: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        **layout: Any,
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Reads and pools rows of a local table. Accepts the arguments of `ops.table_pool`.

        Returns:
          pooled: float32 [bags, dim], one per feature.
          found: scalar variant for `apply_pooled_op`.
          pooling: scalar variant for `apply_pooled_op`.
        """
        return ops.table_pool(self._handles[0], ids, splits, weights, **layout)

    def apply_pooled_op(
        self,
        found: tf.Tensor,
        pooling: tf.Tensor,
        gradients: Sequence[tf.Tensor],
        learning_rate: tf.Tensor,
        nonfinite: str,
    ) -> tf.Operation:
        """Updates the keys of a `pool_op` once, as `apply_op`.

        `gradients` are float32 [bags, dim], one per feature.
        """
        return ops.table_apply_pooled(
            self._handles[0], found, learning_rate, pooling, gradients, nonfinite=nonfinite
        )

    # Methods for users. They run eagerly.

    @servers_named()
    def size(self) -> int:
        """Returns the number of rows.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        return sum(int(ops.table_size(handle)) for handle in self._handles)

    @servers_named()
    def lookup(self, keys: Any) -> np.ndarray:
        """Reads rows. Creates no rows.

        Args:
          keys: integers of any shape.

        Returns:
          float32 [*keys.shape, dim]. A key without a row has its initial value.

        Raises:
          ValueError: keys are not integers or exceed int64, or the call is in a graph.
          tf.errors.UnavailableError: a parameter server is down.
        """
        if not tf.executing_eagerly():
            name = self.shared_name.rpartition("/")[0]
            raise ValueError(
                f"lookup of table {name} reads rows now, and so not in a graph (a tf.function or"
                " the map of a dataset): call the layer on the ids there"
            )
        keys = tf.convert_to_tensor(_int64("keys", keys))
        local = self.is_local
        rows = self.lookup_op(keys)[0] if local else self._remote_lookup(keys)
        return rows.numpy().reshape(*keys.shape, self.dim)

    @servers_named()
    def export(self) -> TableExport:
        """Reads all rows. To include pending updates of caches, flush the caches first.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        parts = list(self.export_parts())
        columns = [field.name for field in dataclasses.fields(TableExport)]
        return TableExport(*(np.concatenate([getattr(p, c) for p in parts]) for c in columns))

    def export_parts(self, max_age: int = INT64_MAX) -> Iterator[TableExport]:
        """Reads all rows as `export` does, in parts of about 64 MB.

        Args:
          max_age: where rows expire, leaves out the rows whose last update is longer ago. The unit
            is that of the table's ages.
        """
        for handle in self._handles:
            row_bytes = 16 + 4 * (self.dim + self.slot_dim)  # 16 for key and clock
            parts = 1 + int(ops.table_size(handle)) * row_bytes // _EXPORT_PART_BYTES
            for part in range(parts):
                columns = ops.table_export(handle, part, parts, max_age=max_age)
                yield TableExport(*(x.numpy() for x in columns))

    @servers_named()
    def import_(self, rows: TableExport, *, initial_slots: bool = False) -> None:
        """Sets rows and replaces existing rows. Clears the caches of the table.

        Args:
          rows: rows from `export` of a table with the same dim and optimizer. The number of shards
            may differ.
          initial_slots: whether to set the slots to their initial values. The slots in `rows` then
            have the shape [rows, 0], and the optimizer may differ.

        Raises:
          ValueError: keys or clocks are not integers or exceed int64, or the columns differ in
            length. The table is unchanged.
          tf.errors.InvalidArgumentError: shapes do not match the table. Every shard has then
            imported all of its rows or none.
          tf.errors.ResourceExhaustedError: a parameter server has too little memory.
          tf.errors.UnavailableError: a parameter server is down.
        """
        rows = _checked(rows)
        shard_of = ops.shard_of(rows.keys, num_shards=self.num_shards).numpy()
        try:
            for shard, handle in enumerate(self._handles):
                mine = shard_of == shard
                ops.table_import(
                    handle,
                    rows.keys[mine],
                    rows.values[mine],
                    rows.slots[mine],
                    rows.clocks[mine],
                    initial_slots=initial_slots,
                )
        finally:
            self.clear_caches()

    def import_table(self, other: EmbeddingTable) -> None:
        """Imports all rows of another table of the same dim, in parts, as `import_` does.

        If the optimizers differ in kind, the slots get their initial values.
        """
        is_kind = type(other.optimizer) is type(self.optimizer)
        has_slots = is_kind and other.slot_dim == self.slot_dim
        for rows in other.export_parts():
            slots = rows.slots if has_slots else rows.slots[:, :0]
            rows = dataclasses.replace(rows, slots=slots)
            self.import_(rows, initial_slots=not has_slots)

    def assign(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Sets the values of rows. Slots and clocks get their initial values.

        Args:
          keys: int64 [rows].
          values: float32 [rows, dim].

        Raises: the errors of `import_`.
        """
        keys = _int64("keys", keys)
        slots = np.zeros((keys.size, 0), np.float32)
        rows = TableExport(keys, values, slots, np.zeros(keys.size, np.int64))
        self.import_(rows, initial_slots=True)

    @servers_named()
    def clear(self) -> None:
        """Drops all rows. Clears the caches of the table.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        try:
            for handle in self._handles:
                ops.table_clear(handle)
        finally:
            self.clear_caches()

    @servers_named()
    def expire(self, now: int | None = None) -> int:
        """Drops expired rows. Other threads and workers can use the table at the same time.

        Rows whose ages are in seconds also expire without this call. Rows whose time is given
        expire in this call only. `now` becomes the time of the table and of later updates. The
        first call starts the time and makes no row older.

        Args:
          now: the new time, if the time is given: an integer from 0 to `2**63 - 1`. It must be at
            least the previous time and less than `2**31 - 1` above the first. None: the time does
            not change.

        Returns:
          Number of dropped rows.

        Raises:
          ValueError: `now` is no such integer, or ages are in seconds.
          tf.errors.InvalidArgumentError: `now` is less than the previous time. No server's time has
            changed, except possibly on a server that was restarted.
          tf.errors.FailedPreconditionError: rows of this table do not expire.
          tf.errors.UnavailableError: a parameter server is down.
        """
        if now is not None:
            now = check_integer("now", now, 0, INT64_MAX)
            if self.age_time == "seconds":
                raise ValueError(f"now = {now}, but ages in this table are in seconds")
        expired = sum(
            int(ops.table_expire(handle, -1 if now is None else now)) for handle in self._handles
        )
        self.time = self.time if now is None else now
        return expired

    @property
    def admission(self) -> str:
        """The admission rules in `lifetimes`. Empty: every updated key gets a row."""
        return lifetimes.admission_of(self.lifetimes)

    @property
    def age_time(self) -> str | None:
        """The time of the rows' ages: "seconds" or "given". None: rows do not expire."""
        return lifetimes.time_of(self.lifetimes)

    def stats(self) -> dict[str, int]:
        """Returns counters, summed over the shards (`TableCounter` in ops/core/table/table.h).

        Returns:
          Counts since the shards were created: "requests", "bytes_received", "bytes_sent",
          "pushes_merged", "pushes_repeated", "pushes_skipped", "pushes_counted" (pushes of a
          closure of which another run was merged), "rows_merged", "rows_checked", "rows_sent",
          "nonfinite_skipped", "rows_created" (by updates), "updates_refused" (of keys that were not
          admitted), "rows_expired", "reads_missing_N" (checked reads of cached rows that missed N
          to 2N - 1 updates of other workers, in the unit of the clock; N = 0: no updates).

          Current values: "rows", "memory_bytes", "candidates" (keys without a row that admission
          counts), "rows_watched" (rows that caches need not check, summed over the caches),
          "disk_bytes" (size of the files of rows). With a storage, "pages_read" and "pages_let_go"
          count pages of 4096 bytes that the servers read, and that left memory.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        return add_up(self.shard_stats())

    @servers_named()
    def shard_stats(self) -> list[dict[str, int]]:
        """Returns the counters of `stats` for every shard. Raises the errors of `stats`."""
        return [sum_stats([ops.table_stats(handle)]) for handle in self._handles]

    def destroy(self) -> None:
        """Frees the rows. Functions that were traced with a local table fail afterwards."""
        _destroy(self._handles)

    def make_again(self, devices: Sequence[str]) -> None:
        """Creates the shards on `devices` again, after a server was restarted without its rows.

        Functions that were traced earlier do not reach the new shards. The caches trace their
        functions again.
        """
        for cache in tuple(self._caches):
            cache.forget_functions()
        for shard, device in enumerate(self.devices):
            if device in devices:
                self._handles[shard] = self._create(shard)
        self._exchange = Exchange([self])
        vars(self).pop("_remote_lookup", None)

    def add_cache(self, cache: Any) -> None:
        """Registers a cache, which is cleared when rows are replaced. Holds a weak reference."""
        self._caches.add(cache)

    def forgets(self, waiting: Any) -> None:
        """Registers an object that `note_restored` clears. Holds a weak reference."""
        self._waiting.add(waiting)

    def note_restored(self) -> None:
        """Drops the work that was waiting for the rows before a restore (see `forgets`)."""
        for waiting in tuple(self._waiting):
            waiting.clear()

    def clear_caches(self) -> None:
        """Clears all caches after rows were replaced."""
        # The next reply of a shard would also clear its rows, but an unbounded cache may never
        # send a request.
        for cache in tuple(self._caches):
            if cache.config is not None:
                cache.clear()

    def _create(self, shard: int) -> tf.Tensor:
        device = self.devices[shard] if self.devices else "/device:CPU:0"
        try:
            # `init_scope`: Keras may build layers while it traces a model.
            with tf.init_scope(), tf.device(device):
                return self.handle_op(shard)
        except tf.errors.NotFoundError as error:
            raise tf.errors.NotFoundError(
                None,
                None,
                f"{device} does not know the het_tf ops: start the parameter servers and workers"
                f" with `python -m het_tf.server` ({error.message})",
            ) from error

    @functools.cached_property
    def _remote_lookup(self) -> Any:
        with tf.init_scope(), tf.device("/device:CPU:0"):
            reader = ops.cache_handle(
                shared_name=f"{self.shared_name}/reader", **NO_CACHE, **self.row_attributes
            )
        deferred_destroy.destroy_after(self, functools.partial(_destroy, [reader]))

        @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)], autograph=False)
        def lookup(keys: tf.Tensor) -> tf.Tensor:
            ticket, requests = ops.cache_lookup(
                reader, ops.unique_ids(keys), num_shards=self.num_shards
            )
            installed = ops.cache_install(reader, ticket, self.exchange_op(requests))
            with tf.control_dependencies([installed.rows]):
                return ops.cache_gather(reader, ticket)

        return lookup


def _int64(name: str, numbers: Any) -> np.ndarray:
    """Returns the numbers as int64 after checking that they are integers in its range."""
    numbers = np.asarray(numbers)
    if numbers.size and not np.issubdtype(numbers.dtype, np.integer):
        given = numbers.tolist() if numbers.dtype == object else numbers.dtype
        raise ValueError(f"{name} must be int64 integers, not {given}")
    if numbers.size and numbers.max() > INT64_MAX:
        raise ValueError(f"{name} must be at most 2**63 - 1, not {numbers.max()}")
    return numbers.astype(np.int64, copy=False)


def _checked(rows: TableExport) -> TableExport:
    """Returns the rows as arrays of the right dtypes after checking ranks and lengths."""
    keys, clocks = _int64("keys", rows.keys), _int64("clocks", rows.clocks)
    values, slots = np.asarray(rows.values, np.float32), np.asarray(rows.slots, np.float32)
    shapes = [column.shape for column in (keys, values, slots, clocks)]
    if [len(shape) for shape in shapes] != [1, 2, 2, 1] or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            "keys, values, slots and clocks must be of shapes [rows], [rows, dim],"
            f" [rows, slot_dim] and [rows], not {', '.join(map(str, shapes))}"
        )
    return TableExport(keys, values, slots, clocks)


def _destroy(handles: list[tf.Tensor]) -> None:
    for handle in handles:
        # An error means that the parameter server is gone, and its shard with it.
        with contextlib.suppress(tf.errors.OpError):
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
