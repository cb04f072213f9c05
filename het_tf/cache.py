"""The cache that every worker keeps of an embedding table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from het_tf import _abandoned, ops
from het_tf._arguments import check_float_dtype
from het_tf._counters import names_of, sum_stats
from het_tf._graph import handle_from_caller, share_in_graph
from het_tf._places import devices_of_rows
from het_tf._visits import cache_devices, cluster_devices, traced_by_device, visit
from het_tf.cache_config import UNBOUNDED, CacheConfig
from het_tf.cache_handles import Handles
from het_tf.table import NO_CACHE, EmbeddingTable


class WorkerCache:
    """Ops on the cache of a table, on the worker where they run.

    Every worker has its own cache under the same name; it is made by the first op that runs there.
    So has the coordinator for what runs outside of `coordinator.schedule`. There a read is as with
    a `read_bound` of 0: whoever looks at a row after training is to see all that was sent. A local
    table's only process is its worker.
    Without a config there is no cache: every lookup fetches its rows, and gradients go to the
    shards, which apply the optimizer.

    With `device_capacity` a worker's rows are in the memory of its first GPU, on which the ops then
    run; the coordinator's are not. So is the cache over a local table, which has no bounds.

    Attributes:
      on_device: whether the cache of a local table, or of some worker, is on a device.
      writes_through: whether updates are sent in the step that makes them.
      makes_room: whether a step may have to wait before its update (`make_room_op`).
      steps_per_message: how many steps may be looked up ahead in one.
      is_watched: whether shards may watch rows for it (ops/core/link/watch.h).
    """

    def __init__(
        self,
        table: EmbeddingTable,
        config: CacheConfig | None,
        nonfinite: str = "error",
        wire_dtype: str = "float32",
    ):
        """Describes the cache; makes nothing yet.

        Args:
          table: the table, local or on parameter servers.
          config: None for no cache.
          nonfinite: "error": NaN or infinity in a gradient fails the step and changes nothing;
            "skip": the keys concerned are skipped and counted.
          wire_dtype: of values, their gradients and their changes in messages, "float32" or
            "bfloat16".

        Raises:
          ValueError: `nonfinite` or `wire_dtype` is neither, or there is no GPU for
            `device_capacity`.
        """
        if nonfinite not in ("error", "skip"):
            raise ValueError(f'nonfinite must be "error" or "skip", not {nonfinite!r}')
        self.table = table
        self.config = config
        self.name = f"{table.shared_name}/{'cache' if config else 'uncached'}"
        self._attributes = {
            "shared_name": self.name,
            "nonfinite": nonfinite,
            "wire_dtype": check_float_dtype("wire_dtype", wire_dtype),
            **table.row_attributes,
        }
        if config is None:
            self._attributes |= NO_CACHE
        else:
            capacity = 0 if config.capacity is None else config.capacity
            self._attributes |= {"capacity": capacity, "policy": config.policy}
            workers = 1 if table.is_local else len(cluster_devices("worker"))
            self._attributes |= config.bound_attributes(max(workers, 1))
        devices = devices_of_rows(self.name, config, table.is_local)
        self.on_device = bool(devices)
        if self.on_device and table.is_local:
            # Nobody else reads or writes the table without a flush.
            self._attributes |= {"read_bound": UNBOUNDED, "write_bound": UNBOUNDED}
        write_bound = self._attributes.get("write_bound", 0)
        self.writes_through = write_bound == 0
        self.makes_room = write_bound > 0 and not self.on_device and not table.is_local
        self.steps_per_message = 1 if config is None else config.steps_per_message(write_bound)
        if config is not None:
            self._attributes["due_bound"] = config.due_bound(write_bound, self.on_device)
        # As CacheConfig::watches in ops/core/cache/row_cache.h, wherever a worker has its rows.
        self.is_watched = (
            self._attributes.get("read_bound", 0) > 0 and self._attributes["clock"] != "lamport"
        )
        bounds = {} if table.is_local else {"read_bound": 0}
        self._handles = Handles(
            self._attributes, self._attributes | bounds, devices, config, table.is_local
        )
        self._functions: dict[str, Any] = {}
        if config is not None:
            table.add_cache(self)
        _abandoned.destroy_after(self, self._handles.destroy)

    def unique_ids_op(self, keys: tf.Tensor) -> tf.Tensor:
        """Keys, int64 of any shape, for `lookup_op`: a scalar variant."""
        return ops.unique_ids(keys, on_device=self.on_device)

    def open_op(self) -> None:
        """At the start of the graph of a function that runs on workers only: its handle is there.

        Otherwise each call of the function asks the worker for it first, in a message of its own.
        """
        handle = None if self.table.is_local else self._handles.on_every_worker_op()
        if handle is not None:
            share_in_graph(self.name, handle)

    def lookup_op(self, unique_ids: tf.Tensor, fresh: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows.

        Args:
          unique_ids: scalar variant of `unique_ids_op`.
          fresh: read as with a `read_bound` of 0.

        Returns:
          rows: float32 [ids, dim].
          ticket: for `update_op`.
        """
        ticket = self.installed_op(unique_ids, fresh)
        return self.gather_op(ticket), ticket

    def installed_op(self, unique_ids: tf.Tensor, fresh: bool = False) -> tf.Tensor:
        """Looks up, without reading: a ticket for `gather_op` or `pool_op`, then an update.

        Arguments as for `lookup_op`.
        """
        ticket, requests = self.request_op(unique_ids, fresh)
        replies = self.table.exchange_op(requests)
        return self._install_complete_op(ticket, replies, of_lookups=True)

    def _install_complete_op(
        self, ticket: tf.Tensor, replies: list[tf.Tensor], of_lookups: bool = False
    ) -> tf.Tensor:
        def send_op(messages: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
            return [self.table.exchange_op(*messages)]

        (ticket,) = install_complete_op([self], [ticket], [replies], send_op, of_lookups)
        return ticket

    # The parts of a lookup, for whoever sends the requests of several caches together.

    def request_op(
        self, unique_ids: tf.Tensor, fresh: bool = False
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Begins a lookup; arguments as for `lookup_op`.

        Returns:
          ticket: for the other parts.
          requests: uint8 [bytes], one for each shard.
        """
        return ops.cache_lookup(
            self._handle_op(), unique_ids, num_shards=self.table.num_shards, fresh=fresh
        )

    def flush_request_op(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Requests that push what is due, like `request_op`."""
        return ops.cache_flush(self._handle_op(), num_shards=self.table.num_shards, all=False)

    def make_room_op(self, ticket: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Before an update where steps overlap: what has to be sent first, for rows of a ticket.

        Returns:
          made: as the ticket of `request_op`.
          lacks_room: bool scalar, whether there is anything.
          requests: as of `request_op`.
        """
        return ops.cache_make_room(self._handle_op(), ticket, num_shards=self.table.num_shards)

    # A closure that counts once: `ops.cache_begin_closure` and those after it.

    def begin_closure_op(self, number: tf.Tensor) -> tf.Tensor:
        """Begins one, int64 scalar `number`; a scalar variant for the other two."""
        return ops.cache_begin_closure(self._handle_op(), number)

    def commit_request_op(
        self, closure: tf.Tensor, done: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Requests that push all that it has updated, like `request_op`."""
        return ops.cache_commit_closure(
            self._handle_op(), closure, done, num_shards=self.table.num_shards
        )

    def end_closure_op(self, closure: tf.Tensor) -> tf.Operation:
        """Ends it, when the replies were installed."""
        return ops.cache_end_closure(self._handle_op(), closure)

    def install_op(
        self, ticket: tf.Tensor, replies: list[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes the replies to requests, one a shard.

        Returns:
          rows: int64 scalar, how many came.
          incomplete: bool scalar, whether shards have to be asked again (`ask_again_op`): after a
            lookup only where `is_watched`, after others where steps overlap.
        """
        return ops.cache_install(self._handle_op(), ticket, replies)

    def ask_again_op(self, ticket: tf.Tensor) -> list[tf.Tensor]:
        """Requests, like those of `request_op`, for what an installed ticket lacks."""
        return ops.cache_ask_again(self._handle_op(), ticket, num_shards=self.table.num_shards)

    def gather_op(self, ticket: tf.Tensor) -> tf.Tensor:
        """The rows of an installed lookup as they are now, float32 [ids, dim]."""
        return ops.cache_gather(self._handle_op(), ticket)

    def update_op(
        self,
        ticket: tf.Tensor,
        gradients: tf.Tensor,
        learning_rate: tf.Tensor,
        sends: bool = True,
    ) -> tf.Operation:
        """One update of each key that was looked up.

        Args:
          ticket: of that lookup; it can be used once.
          gradients: float32 [ids, dim]; those of equal ids are summed.
          learning_rate: float32 scalar.
          sends: whether to send updates that are due in the same step; otherwise the caller does.
        """
        cache = self._handle_op()
        update = ops.cache_update(cache, ticket, gradients, learning_rate)
        return self._write_through_op(update) if sends else update

    def pool_op(
        self,
        ticket: tf.Tensor,
        splits: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        **layout: Any,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The rows of an installed lookup as they are now, pooled, as `ops.cache_pool` does.

        Returns:
          pooled: float32 [bags, dim] of each feature.
          pooling: for `update_pooled_op`.
        """
        return ops.cache_pool(self._handle_op(), ticket, splits, weights, **layout)

    def update_pooled_op(
        self,
        ticket: tf.Tensor,
        pooling: tf.Tensor,
        gradients: Sequence[tf.Tensor],
        learning_rate: tf.Tensor,
        sends: bool = True,
    ) -> tf.Operation:
        """`update_op` of what was pooled. gradients: float32 [bags, dim] of each feature."""
        update = ops.cache_update_pooled(
            self._handle_op(), ticket, learning_rate, pooling, gradients
        )
        return self._write_through_op(update) if sends else update

    def flush_op(self) -> tf.Tensor:
        """Sends every update that was not sent yet."""
        return self._flush_op(self._handle_op(), everything=True)

    def clear_op(self) -> None:
        """Forgets all rows, and updates that were not sent."""
        ops.cache_clear(self._handle_op())

    def stats_op(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Names and values of the counters (`CacheCounter` in ops/core/cache/cache.h)."""
        return ops.cache_stats(self._handle_op())

    def report_op(self) -> tf.Tensor:
        """int64 [2 + counters]: the worker's task index, the cache's id, its counters."""
        return ops.cache_report(self._handle_op())

    @property
    def counter_names(self) -> tuple[str, ...]:
        """Names of the counters of `report_op` (`CacheCounter` in ops/core/cache/cache.h)."""
        return names_of(ops.cache_counter_names)

    # What runs eagerly, on all workers and on the coordinator.

    def flush(self) -> None:
        """Sends every update that was not sent yet. A worker that is down is passed over.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        self._everywhere(self.flush_here)

    def clear(self) -> None:
        """Forgets all rows, and updates that were not sent."""
        self._everywhere(self._function(self.clear_op))

    def stats(self) -> dict[str, int]:
        """Counters (`CacheCounter` in ops/core/cache/cache.h), over workers and coordinator."""
        return sum_stats(self._everywhere(self._function(self.stats_op)))

    @property
    def flush_here(self) -> Callable[[], tf.Tensor]:
        """A function that sends what the device under which it is called holds back.

        It returns that cache's `report_op`.
        """
        return self._function(self._flush_and_report_op)

    def forget_functions(self) -> None:
        """Has functions traced anew, since a parameter server is another process than before."""
        self._functions.clear()

    def _flush_and_report_op(self) -> tf.Tensor:
        with tf.control_dependencies([self.flush_op()]):
            return self.report_op()

    def _function(self, build_ops: Callable[[], Any]) -> Callable[[], Any]:
        # Kept here, since its graph refers to this object: the two are forgotten together.
        if build_ops.__name__ not in self._functions:
            self._functions[build_ops.__name__] = traced_by_device(build_ops)
        return self._functions[build_ops.__name__]

    def _everywhere(self, function: Callable[[], Any]) -> list[Any]:
        if self.table.is_local:
            return [function()]
        return list(visit(cache_devices(), function, _is_down).values())

    @functools.cached_property
    def _local_handle(self) -> tf.Tensor:
        with tf.init_scope():
            return self._handles.make()

    def _handle_op(self) -> tf.Tensor:
        if self.table.is_local:
            return self._local_handle
        # What is made here lives as long as the graph, and must not keep this object as long.
        return handle_from_caller(self.name, self._handles.make)

    def _write_through_op(self, update: tf.Operation | None) -> tf.Operation | None:
        """After an update: sends what must not wait."""
        if not self.writes_through:
            return update
        with tf.control_dependencies([update] if update is not None else []):
            return self._flush_op(self._handle_op(), everything=False)

    def _flush_op(self, cache: tf.Tensor, everything: bool) -> tf.Tensor:
        ticket, requests = ops.cache_flush(cache, num_shards=self.table.num_shards, all=everything)
        replies = self.table.exchange_op(requests)
        if everything:
            return ops.cache_install(cache, ticket, replies).rows
        return self._install_complete_op(ticket, replies)


def install_complete_op(
    caches: Sequence[WorkerCache],
    tickets: Sequence[tf.Tensor],
    replies: Sequence[list[tf.Tensor]],
    send_op: Callable[[list[list[tf.Tensor]]], list[list[tf.Tensor]]],
    of_lookups: bool = False,
) -> list[tf.Tensor]:
    """Takes the replies to requests, and asks again for as long as some ticket is incomplete.

    Args:
      caches: of each ticket.
      tickets: of each; all of lookups, or of updates that were sent and of room that was made.
      replies: uint8 [bytes], by ticket and shard.
      send_op: carries requests of those of `caches` that ask again, in their order, and gives the
        replies, both as `Exchange.send_op`.
      of_lookups: whether they are of lookups. Then only caches that are watched ask again.

    Returns:
      The tickets, when they are complete.
    """
    installed = [
        cache.install_op(ticket, reply)
        for cache, ticket, reply in zip(caches, tickets, replies, strict=True)
    ]
    done = [rows for rows, _ in installed]
    asking = [i for i, cache in enumerate(caches) if cache.is_watched or not of_lookups]
    if asking:

        def ask_again(_: tf.Tensor) -> list[tf.Tensor]:
            requests = [caches[i].ask_again_op(tickets[i]) for i in asking]
            again = [
                caches[i].install_op(tickets[i], reply)
                for i, reply in zip(asking, send_op(requests), strict=True)
            ]
            return [tf.reduce_any([incomplete for _, incomplete in again])]

        incomplete = tf.reduce_any([installed[i][1] for i in asking])
        done += tf.while_loop(
            lambda more: more, ask_again, [incomplete], parallel_iterations=1, name="ask_again"
        )
    with tf.control_dependencies(done):
        return [tf.identity(ticket) for ticket in tickets]


def _is_down(device: str, error: tf.errors.OpError | None) -> bool:
    if isinstance(error, tf.errors.InvalidArgumentError):
        # TensorFlow forgets a worker that died until it has been started again.
        is_down = "unknown device" in error.message and device in error.message
    else:
        is_down = isinstance(error, tf.errors.UnavailableError) and "/job:ps" not in error.message
    if not is_down:
        return False
    logging.warning("%s is down, and its cache with it: %s", device, error.message)
    return True
