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

# Attributes of a cache op that keeps no rows: lookups fetch them, gradients go to the shards.
NO_CACHE = {"capacity": 0}

# Rows are exported in parts of about this size.
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
    """A table of embedding rows, one shard a device.

    A row comes into being by its first update, or as `lifetimes` say, after which it may also go.
    Without one a key reads as its initial value, which depends on (seed, key, column) alone, and
    takes no memory.

    Attributes:
      time: what `expire` was given last; None: nothing yet.
      layout: as given.
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
        key_initializers: Sequence[tuple[int, int, Any]] = (),
        layout: Sequence[tuple[str, int, int]] = (),
    ):
        """Makes the shards.

        Args:
          dim: columns of a row's value, at least 1.
          optimizer: one of `het_tf.optimizers`.
          initializer: a Keras initializer or its name (see `het_tf.initializers.spec`).
          seed: of the initial values, int64.
          clock: "count": a row's clock counts its updates; "lamport": the rule of the HET paper;
            "drift": it is the distance that the row's value has moved.
          devices: where the shards live, in their order; empty: one shard in this process.
          name: for errors; it need not be unique.
          input_dim: how many keys there are, for initializers that depend on it; not a bound.
          row_dtype: what values are kept as, "float32" or "bfloat16".
          lifetimes: which keys get a row, and when rows go (`het_tf.lifetimes.spec`); empty: all
            do at their first update, and they stay.
          key_initializers: first and last key of ranges that have another initializer, and that.
          layout: of a collection whose rows are in this table and others: of each of its tables the
            name, the number of the table that has its rows, and their first key.

        Raises:
          ValueError: an argument is out of its range.
          tf.errors.NotFoundError: a parameter server has not loaded the ops.
          tf.errors.InvalidArgumentError: the clock has no such lifetimes.
        """
        dim = check_integer("dim", dim, 1, MAX_DIM)
        seed = check_integer("seed", seed, -INT64_MAX - 1, INT64_MAX)
        check_clock(clock)
        self.dim = dim
        self.optimizer = optimizer
        self.devices = tuple(devices)
        # Two tables must not meet under one name, in this process or on a parameter server.
        # TensorFlow takes no name that begins with an underscore.
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
        self.layout = tuple(layout)
        self.time: int | None = None
        deferred_destroy.destroy_all()
        self._handles = [self._create(shard) for shard in range(self.num_shards)]
        self._exchange = Exchange(self.devices, [self])
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
        """Whether the table lives in this process."""
        return not self.devices

    @functools.cached_property
    def slot_dim(self) -> int:
        """Columns of a row's optimizer slots."""
        # A part of next to nothing.
        return int(ops.table_export(self._handles[0], 0, INT64_MAX)[2].shape[1])

    def handle(self, shard: int) -> tf.Tensor:
        """The handle of a shard, for eager ops, which run where the shard is."""
        return self._handles[shard]

    # Ops, for graphs and eagerly.

    def handle_op(self, shard: int) -> tf.Tensor:
        """A handle of a shard, on the device where this is called."""
        return ops.table_handle(
            shared_name=f"{self.shared_name}/{shard}",
            shard=shard,
            lifetimes=self.lifetimes,
            **self.row_attributes,
        )

    def serve_op(self, shard: int, request: tf.Tensor) -> tf.Tensor:
        """On the device of a shard: its reply to a cache's request.

        Args:
          shard: which one.
          request: uint8 [bytes]; 0 bytes: nothing was asked.

        Returns:
          uint8 [bytes]; 0 bytes if nothing was asked.
        """
        return ops.table_sync(self.handle_op(shard), request)

    def exchange_op(self, requests: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Carries a cache's requests to the shards and their replies back.

        Args:
          requests: uint8 [bytes], one for each shard.

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
          found: for `apply_op`.
        """
        return ops.table_lookup(self._handles[0], ids)

    def apply_op(
        self, found: tf.Tensor, gradients: tf.Tensor, learning_rate: tf.Tensor, nonfinite: str
    ) -> tf.Operation:
        """One update of each key in a local table.

        Args:
          found: of `lookup_op`, or of `ops.unique_ids` where nothing was looked up.
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
        """Reads rows of a local table, pooled, as `ops.table_pool` does.

        Returns:
          pooled: float32 [bags, dim] of each feature.
          found: for `apply_pooled_op`.
          pooling: for `apply_pooled_op`.
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
        """`apply_op` of what was pooled. gradients: float32 [bags, dim] of each feature."""
        return ops.table_apply_pooled(
            self._handles[0], found, learning_rate, pooling, gradients, nonfinite=nonfinite
        )

    # What a user calls, eagerly.

    @servers_named()
    def size(self) -> int:
        """Number of rows that have been updated or imported.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        return sum(int(ops.table_size(handle)) for handle in self._handles)

    @servers_named()
    def lookup(self, keys: Any) -> np.ndarray:
        """Reads rows without adding any.

        Args:
          keys: integers of any shape.

        Returns:
          float32 [*keys.shape, dim]; unknown keys have their initial value.

        Raises:
          ValueError: keys are not integers, or one is not an int64; or this is called in a graph.
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
        """Reads all rows. Updates that caches have not sent are not in it: flush before.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        parts = list(self.export_parts())
        columns = [field.name for field in dataclasses.fields(TableExport)]
        return TableExport(*(np.concatenate([getattr(p, c) for p in parts]) for c in columns))

    def export_parts(self, max_age: int = INT64_MAX) -> Iterator[TableExport]:
        """Reads all rows, as `export`, a part of about 64 MB at a time.

        Args:
          max_age: rows that were not updated for longer are left out, where rows expire.
        """
        for handle in self._handles:
            row_bytes = 16 + 4 * (self.dim + self.slot_dim)  # with key and clock
            parts = 1 + int(ops.table_size(handle)) * row_bytes // _EXPORT_PART_BYTES
            for part in range(parts):
                columns = ops.table_export(handle, part, parts, max_age=max_age)
                yield TableExport(*(x.numpy() for x in columns))

    @servers_named()
    def import_(self, rows: TableExport, *, initial_slots: bool = False) -> None:
        """Sets rows, replacing those that exist. Caches of the table drop what they hold.

        Args:
          rows: from `export` of a table with the same dim and optimizer; the shards may differ.
          initial_slots: slots are to be as before a row's first update; those of rows are of shape
            [rows, 0], and the optimizer may differ.

        Raises:
          ValueError: keys or clocks are not integers, or one is not an int64, or there is not one
            of each column for every row. The table is as it was.
          tf.errors.InvalidArgumentError: shapes do not match the table. Then a shard has taken all
            of its rows or none.
          tf.errors.ResourceExhaustedError: a parameter server has not the memory.
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
        """Sets all rows of another table of the same dim, as `import_`, a part at a time.

        Slots of another kind of optimizer are left out: they are as before a row's first update.
        """
        is_kind = type(other.optimizer) is type(self.optimizer)
        has_slots = is_kind and other.slot_dim == self.slot_dim
        for rows in other.export_parts():
            slots = rows.slots if has_slots else rows.slots[:, :0]
            rows = dataclasses.replace(rows, slots=slots)
            self.import_(rows, initial_slots=not has_slots)

    def assign(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Sets the values of rows, which are then as before their first update.

        Args:
          keys: int64 [rows].
          values: float32 [rows, dim].

        Raises: as for `import_`.
        """
        keys = _int64("keys", keys)
        slots = np.zeros((keys.size, 0), np.float32)
        rows = TableExport(keys, values, slots, np.zeros(keys.size, np.int64))
        self.import_(rows, initial_slots=True)

    @servers_named()
    def clear(self) -> None:
        """Drops all rows. Caches of the table drop what they hold.

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
        """Drops the rows that have expired by now. Others use the table meanwhile.

        Where ages are in seconds, this happens by itself. Where their time is given, it happens
        here: `now` is the time from here on, of the updates that come, too. Time begins with the
        first call, so that it makes no row older.

        Args:
          now: the time, where it is given: an integer from 0 to `2**63 - 1`, not less than the last
            one, and less than `2**31 - 1` above the first; None: it stands still.

        Returns:
          How many rows were dropped.

        Raises:
          ValueError: now is no such integer, or given though ages are in seconds.
          tf.errors.InvalidArgumentError: now goes back. No time has changed, but possibly that of a
            server that was restarted.
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
        """What of `lifetimes` says which keys get a row; empty: all do."""
        return lifetimes.admission_of(self.lifetimes)

    @property
    def age_time(self) -> str | None:
        """What ages of rows are in: "seconds" or "given"; None: rows stay."""
        return lifetimes.time_of(self.lifetimes)

    def stats(self) -> dict[str, int]:
        """Counters, summed over the shards (`TableCounter` in the core's table.h).

        Returns:
          Since the shards were made: "requests", "bytes_received", "bytes_sent", "pushes_merged",
          "pushes_repeated", "pushes_skipped", "pushes_counted" (of closures that another run of
          was merged), "rows_merged", "rows_checked", "rows_sent", "nonfinite_skipped";
          "rows_created" by updates, "updates_refused" of keys that were not admitted,
          "rows_expired"; and "reads_missing_N": reads of cached rows that were checked and missed
          from N to 2N - 1 of the other workers' updates (0: none), in the unit of the clock. Now:
          "rows", "memory_bytes"; "candidates": keys without a row that are counted;
          "rows_watched": rows that caches need not check, those of every cache counted.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        return add_up(self.shard_stats())

    @servers_named()
    def shard_stats(self) -> list[dict[str, int]]:
        """The counters of `stats`, by shard. Raises as `stats` does."""
        return [sum_stats([ops.table_stats(handle)]) for handle in self._handles]

    def destroy(self) -> None:
        """Frees the rows. What was traced with the table fails where it is in this process."""
        _destroy(self._handles)

    def make_again(self, devices: Sequence[str]) -> None:
        """Makes the shards on `devices` anew, whose rows were lost with the server they were on.

        Functions that were traced before do not reach them; those of the caches are traced anew.
        """
        for cache in tuple(self._caches):
            cache.forget_functions()
        for shard, device in enumerate(self.devices):
            if device in devices:
                self._handles[shard] = self._create(shard)
        self._exchange = Exchange(self.devices, [self])
        vars(self).pop("_remote_lookup", None)

    def add_cache(self, cache: Any) -> None:
        """Notes a cache for as long as it exists: to be cleared when the rows were replaced."""
        self._caches.add(cache)

    def forgets(self, waiting: Any) -> None:
        """Has `note_restored` call `waiting.clear()`, for as long as that exists."""
        self._waiting.add(waiting)

    def note_restored(self) -> None:
        """What was to be done to the rows that were there before is not done to those restored."""
        for each in tuple(self._waiting):
            each.clear()

    def clear_caches(self) -> None:
        """Has all caches drop what they hold, after the rows were replaced."""
        # Caches find out by themselves when they hear from a shard, but one without a bound may
        # have no reason to ask.
        for cache in tuple(self._caches):
            if cache.config is not None:
                cache.clear()

    # Inside.

    def _create(self, shard: int) -> tf.Tensor:
        device = self.devices[shard] if self.devices else "/device:CPU:0"
        try:
            # Layers may be built while Keras traces a model.
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
    """The numbers as int64, if they are integers that it holds."""
    numbers = np.asarray(numbers)
    if numbers.size and not np.issubdtype(numbers.dtype, np.integer):
        given = numbers.tolist() if numbers.dtype == object else numbers.dtype
        raise ValueError(f"{name} must be int64 integers, not {given}")
    if numbers.size and numbers.max() > INT64_MAX:
        raise ValueError(f"{name} must be at most 2**63 - 1, not {numbers.max()}")
    return numbers.astype(np.int64, copy=False)


def _checked(rows: TableExport) -> TableExport:
    """The rows as arrays of the types that they are to have, one of each column for every row."""
    keys, clocks = _int64("keys", rows.keys), _int64("clocks", rows.clocks)
    values, slots = np.asarray(rows.values, np.float32), np.asarray(rows.slots, np.float32)
    shapes = [each.shape for each in (keys, values, slots, clocks)]
    if [len(each) for each in shapes] != [1, 2, 2, 1] or len({each[0] for each in shapes}) > 1:
        raise ValueError(
            "keys, values, slots and clocks must be of shapes [rows], [rows, dim],"
            f" [rows, slot_dim] and [rows], not {', '.join(map(str, shapes))}"
        )
    return TableExport(keys, values, slots, clocks)


def _destroy(handles: list[tf.Tensor]) -> None:
    for handle in handles:
        # An error: the parameter server is gone, and the shard with it.
        with contextlib.suppress(tf.errors.OpError):
            tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
