"""The cache that every worker keeps of an embedding table."""

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
    cache_devices,
    cluster_devices,
    traced_by_device,
    visit,
)
from het_tf.runtime.counters import names_of, sum_stats
from het_tf.runtime.validation import check_float_dtype
from het_tf.tables.table import NO_CACHE, EmbeddingTable

# Attribute of a cache that has as many rows on its device as memory allows.
_AUTO = -1


class Handles:
    """Makes handles of the caches under one name. It knows nothing of the object that has it."""

    def __init__(
        self,
        attributes: dict[str, Any],
        on_coordinator: dict[str, Any],
        devices: dict[Any, str],
        config: CacheConfig | None,
        is_local: bool,
    ):
        """Makes nothing yet.

        Args:
          attributes: of `ops.cache_handle` on a worker.
          on_coordinator: the same there; its caches get another name.
          devices: by task (`task_of`), that which keeps its rows.
          config: of the cache.
          is_local: whether the table is in this process: what leaves a device is there anyway.
        """
        self.on_host = attributes
        self.on_coordinator = on_coordinator | {
            "shared_name": f"{attributes['shared_name']}/coordinator"
        }
        self.devices = devices
        self._is_local = is_local
        if devices:
            assert config is not None  # else there are no devices
            rows = config.device_capacity
            self._on_device = attributes | {"device_capacity": _AUTO if rows == "auto" else rows}
            if is_local:
                self._on_device["capacity"] = 0
            self._kind = config.device

    def make(self) -> tf.Tensor:
        """A handle of the cache of the task under whose device this is called, eagerly."""
        if self.devices:
            task = task_of(host_here())
            if task in self.devices:
                with tf.device(self.devices[task]):
                    return ops.cache_handle(**self._on_device)
            return _on_host(self.on_coordinator if task[0] == COORDINATOR else self.on_host)
        handle = _on_host(self.on_host)
        if task_of(handle.device)[0] != COORDINATOR:
            return handle
        # The device is not known before, so an empty cache that is never used is there too.
        return _on_host(self.on_coordinator)

    def on_every_worker_op(self) -> tf.Tensor | None:
        """A handle in a graph that any worker may run; None if they keep their rows apart."""
        if not self.devices:
            return _on_host(self.on_host)
        if len(self.devices) < len(cluster_devices("worker")):
            return None
        with tf.device(f"/device:{self._kind}:0"):
            return ops.cache_handle(**self._on_device)

    def destroy(self) -> None:
        """Frees the caches on all tasks. A worker that is lost has lost its cache."""

        def destroy() -> None:
            here = [self.make(), *([] if self.devices else [_on_host(self.on_host)])]
            for handle in here:
                tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)

        devices = ["/device:CPU:0"] if self._is_local else cache_devices()
        visit(devices, destroy, is_lost=lambda device, error: True)


def _on_host(attributes: dict[str, Any]) -> tf.Tensor:
    # The handle op runs on GPUs, too, in a build with CUDA.
    with tf.device("/device:CPU:0"):
        return ops.cache_handle(**attributes)


def task_of(device: str) -> tuple[str | None, int | None]:
    """Job and task of a device, by its name; of one of this process alone they may be None."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.job, spec.task


def host_here() -> str:
    """The CPU device of the task under which this is called eagerly."""
    with tf.device("/device:CPU:0"):
        return ops.shard_of(tf.zeros([0], tf.int64), num_shards=1).device


def device_beside(host: str, kind: str) -> str:
    """The device that keeps rows for a task: the first of its kind, since a task has one cache.

    Args:
      host: the task's CPU device.
      kind: "GPU"; or "CPU", which takes a GPU's place in builds without CUDA.

    Returns:
      Its name.

    Raises:
      ValueError: there is none; says why.
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
    found = [name for name in names if task_of(name) in (task_of(host), (None, None))]
    if not found:
        raise ValueError(f"TensorFlow sees no GPU beside {host}")
    return found[0]


def devices_of_rows(name: str, config: CacheConfig | None, is_local: bool) -> dict[Any, str]:
    """By task (`task_of`), the device that keeps the rows of a cache; empty: hosts do.

    Args:
      name: of the cache, for the log.
      config: of the cache.
      is_local: whether the table is in this process.

    Raises:
      ValueError: a task has no such device, nor a capacity to keep rows on its host.
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
        self._attributes: dict[str, Any] = {
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
        table.add_cache(self)
        deferred_destroy.destroy_after(self, self._handles.destroy)

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
    if error is None:
        return False
    if cause_of(error) is Cause.UNKNOWN_DEVICE:
        # TensorFlow forgets a worker that died until it has been started again.
        is_down = device in error.message
    else:
        is_down = isinstance(error, tf.errors.UnavailableError) and not names_job(error, "ps")
    if not is_down:
        return False
    logging.warning("%s is down, and its cache with it: %s", device, error.message)
    return True
