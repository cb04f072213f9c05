"""The cache of an embedding table on every worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from het_tf import ops
from het_tf.cache_config import UNBOUNDED, CacheConfig
from het_tf.compat.errors import Cause, cause_of, names_job
from het_tf.compat.function_graphs import handle_from_caller, share_in_graph
from het_tf.runtime import deferred_destroy
from het_tf.runtime.broadcast import (
    COORDINATOR,
    TracedByDevice,
    cache_devices,
    cluster_devices,
    visit,
)
from het_tf.runtime.counters import names_of, sum_stats
from het_tf.runtime.validation import check_float_dtype
from het_tf.tables.table import NO_CACHE, EmbeddingTable

# Value of `capacity` and `device_capacity` in the ops for as many rows as memory allows.
_AUTO = -1


class Handles:
    """Creates handles of the caches of one name. Holds no reference to the `WorkerCache`."""

    def __init__(
        self,
        attributes: dict[str, Any],
        on_coordinator: dict[str, Any],
        devices: dict[Any, str],
        config: CacheConfig | None,
        is_local: bool,
    ):
        """Stores the arguments. Creates no handle.

        Args:
          attributes: attributes of `ops.cache_handle` on a worker.
          on_coordinator: attributes of `ops.cache_handle` on the coordinator. The name of the
            cache is replaced.
          devices: device that stores the rows, by task (`task_of`).
          config: config of the cache.
          is_local: whether the table is in this process. A cache on a device then stores no
            evicted rows on the host, because the table is there.
        """
        self.on_host = attributes
        self.on_coordinator = on_coordinator | {
            "shared_name": f"{attributes['shared_name']}/coordinator"
        }
        self.devices = devices
        self._is_local = is_local
        if devices:
            assert config is not None  # There are no devices without a config.
            rows = config.device_capacity
            self._on_device = attributes | {"device_capacity": _AUTO if rows == "auto" else rows}
            if is_local:
                self._on_device["capacity"] = 0
            self._kind = config.device

    def make(self) -> tf.Tensor:
        """Returns a handle of the cache of the current device's task. Runs eagerly."""
        if self.devices:
            task = task_of(host_here())
            if task in self.devices:
                with tf.device(self.devices[task]):
                    return ops.cache_handle(**self._on_device)
            return _on_host(self.on_coordinator if task[0] == COORDINATOR else self.on_host)
        handle = _on_host(self.on_host)
        if task_of(handle.device)[0] != COORDINATOR:
            return handle
        # Only the handle shows that this is the coordinator. Its empty cache is never used.
        return _on_host(self.on_coordinator)

    def on_every_worker_op(self) -> tf.Tensor | None:
        """Returns a handle for a graph that any worker may run.

        Returns None if some workers store rows on a device and others on the host.
        """
        if not self.devices:
            return _on_host(self.on_host)
        if len(self.devices) < len(cluster_devices("worker")):
            return None
        with tf.device(f"/device:{self._kind}:0"):
            return ops.cache_handle(**self._on_device)

    def destroy(self) -> None:
        """Frees the caches on all tasks. Skips lost workers, whose caches are gone."""

        def destroy() -> None:
            here = [self.make(), *([] if self.devices else [_on_host(self.on_host)])]
            for handle in here:
                tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

        devices = ["/device:CPU:0"] if self._is_local else cache_devices()
        visit(devices, destroy, is_lost=lambda device, error: True)


def _on_host(attributes: dict[str, Any]) -> tf.Tensor:
    # In a build with CUDA, the handle op also runs on GPUs.
    with tf.device("/device:CPU:0"):
        return ops.cache_handle(**attributes)


def task_of(device: str) -> tuple[str | None, int | None]:
    """Returns the job and task index in a device name. Both may be None without a cluster."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.job, spec.task


def host_here() -> str:
    """Returns the CPU device of the current device's task. Runs eagerly."""
    with tf.device("/device:CPU:0"):
        return ops.shard_of(tf.zeros([0], tf.int64), num_shards=1).device


def device_beside(host: str, kind: str) -> str:
    """Returns the device that stores the rows of a task's cache: the task's first of its kind.

    Args:
      host: CPU device of the task.
      kind: "GPU", or "CPU", which replaces a GPU in builds without CUDA.

    Returns:
      Name of the device.

    Raises:
      ValueError: there is no such device. The message has the reason.
    """
    cuda = ops.build()["cuda"]
    if kind == "CPU":
        if cuda is not None:
            raise ValueError(f"the het_tf ops are built with CUDA {cuda}, for GPUs alone")
        return host
    if cuda is None:
        raise ValueError(
            "the het_tf ops are built without CUDA; where there is an nvcc, HET_TF_CUDA=1 builds"
            " them with it"
        )
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    of_task = [name for name in names if task_of(name) in (task_of(host), (None, None))]
    if not of_task:
        raise ValueError(f"TensorFlow sees no GPU beside {host}")
    return of_task[0]


def devices_of_rows(name: str, config: CacheConfig | None, is_local: bool) -> dict[Any, str]:
    """Returns the devices that store the rows of a cache, by task (`task_of`).

    A task without an entry stores its rows on the host.

    Args:
      name: name of the cache, for the log.
      config: config of the cache.
      is_local: whether the table is in this process.

    Raises:
      ValueError: a task has no such device, and there is no `capacity` for rows on the host.
    """
    if config is None or config.device_capacity is None:
        return {}
    devices = {}
    with tf.init_scope():
        hosts = [host_here()] if is_local else cluster_devices("worker")
    for host in hosts:
        try:
            devices[task_of(host)] = device_beside(host, config.device)
        except ValueError as error:
            if config.capacity is None:
                raise ValueError(
                    f"device_capacity = {config.device_capacity!r}: {error}. With a"
                    " capacity beside it, rows are kept on the host then"
                ) from error
            logging.info("rows of %s are on the host %s: %s", name, host, error)
    return devices


class WorkerCache:
    """Ops on a worker's cache of a table. The ops use the cache of the worker that runs them.

    Every worker has a cache of the same name. The first op that runs on a worker creates it. The
    coordinator also has a cache, for lookups outside of `coordinator.schedule`. The cache of the
    coordinator has a `read_bound` of 0, so that a lookup after training sees all pushed updates.
    With a local table, this process is the only worker.
    Without a config there is no cache. Every lookup fetches its rows, and every update pushes its
    gradients. The shards apply the optimizer.

    With `device_capacity`, the rows of a worker are in the memory of its first GPU, and the ops run
    on this GPU. The coordinator's rows are on the host. With a local table, a cache on a GPU has no
    bounds.

    Attributes:
      on_device: whether the cache of a local table, or of some worker, is on a device.
      writes_through: whether a step pushes its updates before it ends.
      makes_room: whether a step may have to wait before its update (`make_room_op`).
      steps_per_message: number of steps whose lookups may share a message.
      is_watched: whether shards may watch rows for this cache (ops/core/link/watch.h).
    """

    def __init__(
        self,
        table: EmbeddingTable,
        config: CacheConfig | None,
        nonfinite: str = "error",
        wire_dtype: str = "float32",
        workers_on_host: int = 1,
        synchronous: bool = False,
    ):
        """Stores the arguments. The first op creates the cache.

        Args:
          table: the table, local or on parameter servers.
          config: config of the cache, or None for no cache.
          nonfinite: effect of NaN or infinity in a gradient. "error": the step fails and changes
            nothing. "skip": the keys concerned are skipped and counted.
          wire_dtype: dtype in messages of values, their gradients and their changes, "float32" or
            "bfloat16".
          workers_on_host: largest number of workers that share the memory of a host.
          synchronous: whether the steps of all workers count as one. The bounds are then 0.

        Raises:
          ValueError: `nonfinite` or `wire_dtype` is invalid, or there is no GPU for
            `device_capacity`.
        """
        if nonfinite not in ("error", "skip"):
            raise ValueError(f'nonfinite must be "error" or "skip", not {nonfinite!r}')
        self.table = table
        self.config = config
        self.name = f"{table.shared_name}/{'cache' if config else 'uncached'}"
        self._attributes: dict[str, Any] = {
            "shared_name": self.name,
            "nonfinite": nonfinite,
            "wire_dtype": check_float_dtype("wire_dtype", wire_dtype),
            **table.row_attributes,
        }
        if config is None:
            self._attributes |= NO_CACHE
        else:
            capacity = config.capacity
            if capacity is None:
                capacity = _AUTO if config.device_capacity is None else 0
            self._attributes |= {"capacity": capacity, "policy": config.policy}
            self._attributes["workers_on_host"] = workers_on_host
            workers = 1 if table.is_local else len(cluster_devices("worker"))
            self._attributes |= config.bound_attributes(max(workers, 1))
            if synchronous:
                bounds = {"read_bound": 0, "write_bound": 0, "synchronous": True}
                self._attributes |= bounds
        devices = devices_of_rows(self.name, config, table.is_local)
        self.on_device = bool(devices)
        if self.on_device and table.is_local:
            # This cache is the only reader and writer of the table between two flushes.
            self._attributes |= {"read_bound": UNBOUNDED, "write_bound": UNBOUNDED}
        write_bound = self._attributes.get("write_bound", 0)
        self.writes_through = write_bound == 0
        self.makes_room = write_bound > 0 and not self.on_device and not table.is_local
        self.steps_per_message = 1 if config is None else config.steps_per_message(write_bound)
        if config is not None:
            self._attributes["due_bound"] = config.due_bound(write_bound, self.on_device)
        # The same rule as CacheConfig::watches in ops/core/cache/row_cache.h, on host and device.
        self.is_watched = (
            self._attributes.get("read_bound", 0) > 0 and self._attributes["clock"] != "lamport"
        ) or "synchronous" in self._attributes
        bounds = {} if table.is_local else {"read_bound": 0}
        self._handles = Handles(
            self._attributes, self._attributes | bounds, devices, config, table.is_local
        )
        self._functions: dict[str, Any] = {}
        table.add_cache(self)
        deferred_destroy.destroy_after(self, self._handles.destroy)

    def unique_ids_op(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the unique keys for `lookup_op`, a scalar variant. `keys`: int64, any shape."""
        return ops.unique_ids(keys, on_device=self.on_device)

    def open_op(self) -> None:
        """Creates the handle inside the graph of a function that only workers run.

        It must be called at the start of the graph. Without this call, every call of the function
        first requests the handle from the worker, in a separate message.
        """
        handle = None if self.table.is_local else self._handles.on_every_worker_op()
        if handle is not None:
            share_in_graph(self.name, handle)

    def lookup_op(self, unique_ids: tf.Tensor, fresh: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
        """Looks up and reads rows.

        Args:
          unique_ids: scalar variant from `unique_ids_op`.
          fresh: whether to read with a `read_bound` of 0.

        Returns:
          rows: float32 [ids, dim].
          ticket: scalar variant for `update_op`.
        """
        ticket = self.installed_op(unique_ids, fresh)
        return self.gather_op(ticket), ticket

    def installed_op(self, unique_ids: tf.Tensor, fresh: bool = False) -> tf.Tensor:
        """Looks up rows without reading them. Accepts the arguments of `lookup_op`.

        Returns:
          ticket: scalar variant for `gather_op` or `pool_op`, and then for an update.
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

    # The parts of a lookup, for callers that send the requests of several caches together.

    def request_op(
        self, unique_ids: tf.Tensor, fresh: bool = False
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Begins a lookup. Accepts the arguments of `lookup_op`.

        Returns:
          ticket: scalar variant for the other parts of the lookup.
          requests: uint8 [bytes], one per shard.
        """
        return ops.cache_lookup(
            self._handle_op(), unique_ids, num_shards=self.table.num_shards, fresh=fresh
        )

    def flush_request_op(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Builds requests that push the due updates. Returns ticket and requests, see `request_op`.

        An update is due when its row is in the outbox (docs/protocol.md, section 1).
        """
        return ops.cache_flush(self._handle_op(), num_shards=self.table.num_shards, all=False)

    def keep_op(self, keeps: tf.Tensor, keys: tf.Tensor) -> tf.Operation:
        """Decides which updates the next request pushes.

        Args:
          keeps: bool scalar, whether updates stay until their row is pushed by key or leaves the
            cache. False: the next request pushes all unsent updates.
          keys: int64 [keys], rows whose updates the next request pushes.
        """
        cache = self._handle_op()
        with tf.control_dependencies([ops.cache_keep(cache, keeps)]):
            return ops.cache_push(cache, keys)

    def make_room_op(self, ticket: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Builds the requests that must be acknowledged before an update (write back-pressure).

        If steps overlap, a row may already have `write_bound` unacknowledged updates.

        Args:
          ticket: ticket of the lookup whose rows are to be updated.

        Returns:
          made: scalar variant, the ticket of these requests.
          lacks_room: bool scalar, whether there are such requests.
          requests: uint8 [bytes], one per shard.
        """
        return ops.cache_make_room(self._handle_op(), ticket, num_shards=self.table.num_shards)

    # Closures that count once, in the order of the calls.

    def begin_closure_op(self, number: tf.Tensor) -> tf.Tensor:
        """Begins a closure with an int64 scalar number. Returns a scalar variant for its end."""
        return ops.cache_begin_closure(self._handle_op(), number)

    def commit_request_op(
        self, closure: tf.Tensor, done: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Builds requests that push all updates of a closure.

        Args:
          closure: scalar variant from `begin_closure_op`.
          done: int64 scalar. Closures up to this number do not run again.

        Returns:
          Ticket and requests, as `request_op` returns them.
        """
        return ops.cache_commit_closure(
            self._handle_op(), closure, done, num_shards=self.table.num_shards
        )

    def end_closure_op(self, closure: tf.Tensor) -> tf.Operation:
        """Ends a closure after the replies to `commit_request_op` were installed."""
        return ops.cache_end_closure(self._handle_op(), closure)

    def install_op(
        self, ticket: tf.Tensor, replies: list[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Installs the replies to requests.

        Args:
          ticket: ticket of the requests.
          replies: uint8 [bytes], one per shard.

        Returns:
          rows: int64 scalar, number of rows in the replies.
          incomplete: bool scalar, whether the ticket needs more requests (`ask_again_op`). After a
            lookup only if `is_watched`, after other requests only if steps overlap.
        """
        return ops.cache_install(self._handle_op(), ticket, replies)

    def ask_again_op(self, ticket: tf.Tensor) -> list[tf.Tensor]:
        """Builds requests for the missing rows or acknowledgements of an installed ticket."""
        return ops.cache_ask_again(self._handle_op(), ticket, num_shards=self.table.num_shards)

    def gather_op(self, ticket: tf.Tensor) -> tf.Tensor:
        """Reads the current rows of an installed lookup, float32 [ids, dim]."""
        return ops.cache_gather(self._handle_op(), ticket)

    def update_op(
        self,
        ticket: tf.Tensor,
        gradients: tf.Tensor,
        learning_rate: tf.Tensor,
        sends: bool = True,
    ) -> tf.Operation:
        """Updates every key of a lookup once.

        Args:
          ticket: ticket of the lookup. It allows one update.
          gradients: float32 [ids, dim]. Gradients of equal ids are summed.
          learning_rate: float32 scalar.
          sends: whether to push, at once, updates that must not wait for the next step. False if
            the caller pushes them.
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
        """Reads and pools the current rows of an installed lookup.

        Accepts the arguments of `ops.cache_pool`.

        Returns:
          pooled: float32 [bags, dim], one per feature.
          pooling: scalar variant for `update_pooled_op`.
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
        """Updates the keys of a `pool_op` once, as `update_op`.

        `gradients` are float32 [bags, dim], one per feature.
        """
        update = ops.cache_update_pooled(
            self._handle_op(), ticket, learning_rate, pooling, gradients
        )
        return self._write_through_op(update) if sends else update

    def flush_op(self) -> tf.Tensor:
        """Pushes all pending updates and waits until the shards have merged them."""
        return self._flush_op(self._handle_op(), everything=True)

    def clear_op(self) -> None:
        """Drops all rows and pending updates."""
        ops.cache_clear(self._handle_op())

    def stats_op(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns names and values of counters (`CacheCounter` in ops/core/cache/row_cache.h)."""
        return ops.cache_stats(self._handle_op())

    def report_op(self) -> tf.Tensor:
        """Returns int64 [2 + counters]: the worker's task index, the cache's id, the counters."""
        return ops.cache_report(self._handle_op())

    @property
    def counter_names(self) -> tuple[str, ...]:
        """Names of the counters of `report_op` (`CacheCounter` in ops/core/cache/row_cache.h)."""
        return names_of(ops.cache_counter_names)

    # Eager methods. They run on all workers and on the coordinator.

    def flush(self) -> None:
        """Pushes all pending updates and waits until they are merged. Skips workers that are down.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        self._everywhere(self.flush_here)

    def clear(self) -> None:
        """Drops all rows and pending updates."""
        self._everywhere(self._function(self.clear_op))

    def stats(self) -> dict[str, int]:
        """Returns counters (`CacheCounter` in ops/core/cache/row_cache.h), summed over caches."""
        return sum_stats(self._everywhere(self._function(self.stats_op)))

    @property
    def flush_here(self) -> TracedByDevice:
        """A function that flushes the cache of the current device's task.

        The function returns the cache's `report_op`.
        """
        return self._function(self._flush_and_report_op)

    def forget_functions(self) -> None:
        """Drops traced functions. Called after a parameter server was restarted."""
        self._functions.clear()

    def _flush_and_report_op(self) -> tf.Tensor:
        with tf.control_dependencies([self.flush_op()]):
            return self.report_op()

    def _function(self, build_ops: Callable[[], Any]) -> TracedByDevice:
        # Stored in this object, because the graph refers to it. Both are released together.
        if build_ops.__name__ not in self._functions:
            self._functions[build_ops.__name__] = TracedByDevice(build_ops)
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
        # The graph holds the function `make` as long as it exists. `Handles` does not refer to
        # this object, so the graph does not keep this object alive.
        return handle_from_caller(self.name, self._handles.make)

    def _write_through_op(self, update: tf.Operation | None) -> tf.Operation | None:
        """Pushes due updates after `update` if `writes_through`."""
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
    """Installs the replies to requests, and sends further requests until all tickets are complete.

    Args:
      caches: the caches.
      tickets: ticket of each cache. Either all are from lookups, or all are from `flush_request_op`
        and `make_room_op`.
      replies: uint8 [bytes], by ticket and shard.
      send_op: sends the further requests of the caches that have some, in the order of `caches`,
        and returns the replies, as `Exchange.send_op`.
      of_lookups: whether the tickets are from lookups. If so, only watched caches can have further
        requests.

    Returns:
      The tickets, after they are complete.
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
    if error is None:
        return False
    if cause_of(error) is Cause.UNKNOWN_DEVICE:
        # TensorFlow drops the devices of a dead worker until the worker has been restarted.
        is_down = device in error.message
    else:
        is_down = isinstance(error, tf.errors.UnavailableError) and not names_job(error, "ps")
    if not is_down:
        return False
    logging.warning("%s is down, and its cache with it: %s", device, error.message)
    return True
