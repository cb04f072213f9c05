"""Parameter server strategy with caches on the workers."""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from het_tf.compat.tensorflow_internals import change_class, reconnect
from het_tf.distribute.closure_runner import ClosureNumbers, Coordinator
from het_tf.distribute.cluster.tf_config import (
    TASK_TYPES,
    check_cluster,
    leave_memory_to_workers,
    read_chief_config,
    set_grpc_defaults,
)
from het_tf.distribute.failures import probes, recovery
from het_tf.distribute.failures.cluster_health import ClusterHealth
from het_tf.distribute.failures.connection import (
    is_connected_to,
    own_what_is_on,
    task_devices,
    with_local_chief,
)
from het_tf.distribute.worker_state import HeldUpdates
from het_tf.runtime import deferred_destroy
from het_tf.runtime.broadcast import COORDINATOR
from het_tf.runtime.current_strategy import note_strategy
from het_tf.runtime.validation import INT32_MAX, check_float_dtype, check_integer
from het_tf.storage.checkpoints.manager import Manager
from het_tf.tables.table import EmbeddingTable

_DENSE_STALENESS = 64  # beyond that, a step of a wide & deep model sends few bytes less
_POLL = 1.0  # seconds between checks of closures that waited for a lost parameter server


class HetParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """`tf.distribute.ParameterServerStrategy` with caches on the workers.

    All features of the base class work unchanged. This class adds the strategy's only
    `coordinator`, calls on a given worker, flushes of the workers' caches, and errors that name the
    parameter server that died. `het_tf.keras.Model` trains with this strategy.

    Objects that were made before the strategy, such as datasets, lookup tables and variables, stay
    in this process and keep working. Make models, their layers and optimizers in `scope()`.
    """

    _cluster_resolver: Any  # of the base class

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        variable_partitioner: tf.distribute.experimental.partitioners.Partitioner | None = None,
        *,
        dense_staleness: int | str | None = "auto",
        dense_wire_dtype: str = "float32",
        lost_after: float = probes.LOST_AFTER,
        back_within: float = 600.0,
        exactly_once: bool = False,
        synchronous: bool = False,
        plan: Any = None,
    ):
        """Connects to the cluster. Waits until every task answers, and logs the missing tasks.

        Args:
          cluster_resolver: resolver of the worker and ps tasks, e.g. `LocalCluster(...).resolver`
            or `tf.distribute.cluster_resolver.TFConfigClusterResolver()`.
          variable_partitioner: as in the base class. Keras 3 cannot use partitioned variables.
          dense_staleness: with a number, `het_tf.keras.Model.fit` trains replicas of the dense
            variables. Every worker steps on its own replica and exchanges the changes with the
            parameter servers. The number bounds a worker's unsent steps, and the merged steps of
            other workers that it misses. 0: every step fetches and pushes. None: every step reads
            and writes the dense variables on the parameter servers. "auto": 64, or None for a model
            with a variable that replicas have no rule for, which the log names. docs/dense.md has
            the rule for every kind of variable.
          dense_wire_dtype: dtype of the changes in messages. "bfloat16" halves the bytes of
            "float32", and the rounding error is sent later.
          lost_after: seconds without an answer to any probe after which a task is lost. The steps
            of a lost worker run on another worker. A lost parameter server ends training with an
            error. A server that hangs therefore delays training for this time. The default is far
            above the time of an answer on a busy machine.
          back_within: seconds to wait until a lost parameter server is back, if training can
            continue from a checkpoint (`restore_or_initialize`).
          exactly_once: whether `het_tf.keras.Model.fit` counts the updates of rows exactly once,
            even if steps run again because their worker died. All updates are then pushed at the
            end of their closure (`steps_per_execution` steps), for any write bound, and batches
            pass through the training program. Dense variables are not affected.
          synchronous: whether the steps of all workers count as one, as in TensorFlow's synchronous
            strategies: `het_tf.keras.Model.fit` trains with the gradient of the mean loss over the
            batches of all workers, and every step sees all steps before it. Staleness bounds are
            then 0.
          plan: a `het_tf.planner.Plan` for this cluster. Layers whose `CacheConfig` has no capacity
            get the plan's, and tables are on the servers that the plan has for them.

        Raises:
          TypeError: `cluster_resolver` is not a cluster resolver.
          ValueError: TF_CONFIG or the cluster spec is malformed, has no worker or no ps, or names
            another task than the chief for this process. The message names the malformed part.
        """
        if not isinstance(cluster_resolver, tf.distribute.cluster_resolver.ClusterResolver):
            raise TypeError(
                "cluster_resolver must be a tf.distribute.cluster_resolver.ClusterResolver, such "
                "as LocalCluster(...).resolver or TFConfigClusterResolver(), not "
                f"{cluster_resolver!r}."
            )
        self.dense_is_auto = dense_staleness == "auto"
        if self.dense_is_auto:
            dense_staleness = _DENSE_STALENESS
        elif dense_staleness is not None:
            dense_staleness = check_integer(
                "dense_staleness", dense_staleness, 0, INT32_MAX, ', "auto" or None'
            )
        self.dense_staleness: int | None = dense_staleness
        self.dense_wire_dtype = check_float_dtype("dense_wire_dtype", dense_wire_dtype)
        if not lost_after > 0:
            raise ValueError(f"lost_after must be positive, not {lost_after!r}")
        self.lost_after = lost_after
        if not back_within >= 0:
            raise ValueError(f"back_within must not be negative, not {back_within!r}")
        self.back_within = back_within
        self.exactly_once = exactly_once
        self.synchronous = synchronous
        if synchronous:
            for name, value, default in (
                ("exactly_once", exactly_once, False),
                ("dense_staleness", "auto" if self.dense_is_auto else dense_staleness, "auto"),
                ("dense_wire_dtype", dense_wire_dtype, "float32"),
            ):
                if value != default:
                    raise ValueError(f"{name} = {value!r} and synchronous=True exclude each other")
        self.closure_numbers = ClosureNumbers()
        self._addresses = _checked_addresses(cluster_resolver)
        self.plan = plan
        self._address = cluster_resolver.cluster_spec().as_dict().get("chief", [""])[0]
        self._closed = False
        self._local_cluster = getattr(cluster_resolver, "local_cluster", None)
        set_grpc_defaults()
        leave_memory_to_workers()
        probes.wait_until_up(self._addresses)
        self._on_servers = recovery.OnServers()
        super().__init__(cluster_resolver, variable_partitioner)
        Coordinator(self)  # A strategy has one. TensorFlow would otherwise create its own.
        own_what_is_on(task_devices(), self._address)
        self._marks = recovery.Marks()
        self._recoveries = 0
        self._reached = False
        self._manager: tf.train.CheckpointManager | Manager | None = None
        self._health = ClusterHealth(
            self._addresses,
            _no_log if self._local_cluster is None else self._local_cluster.describe,
            lost_after,
            on_worker_lost=lambda worker: self._held.worker_lost(worker),
        )
        self._held = HeldUpdates(self._join_open, self._health.is_lost)
        if self._local_cluster is not None:
            self._local_cluster.attach(self.idle, self._cluster_closed)
        else:
            deferred_destroy.destroy_at_exit()
        note_strategy(self)

    # The cluster.

    @property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """The strategy's only coordinator, which schedules closures on the workers."""
        return self._cluster_coordinator

    @property
    def num_workers(self) -> int:
        """Number of worker tasks."""
        return sum(task_type == "worker" for task_type, _ in self._addresses)

    @property
    def workers_on_host(self) -> int:
        """Largest number of worker tasks whose addresses name the same host."""
        hosts = [a.rpartition(":")[0] for task, a in self._addresses.items() if task[0] == "worker"]
        return max(collections.Counter(hosts).values(), default=1)

    @property
    def num_ps(self) -> int:
        """Number of parameter server tasks."""
        return sum(task_type == "ps" for task_type, _ in self._addresses)

    @property
    def closed(self) -> bool:
        """Whether the strategy's `LocalCluster` was closed."""
        return self._closed

    @property
    def plan(self) -> Any:
        """The `het_tf.planner.Plan` that layers follow when they are built, or None.

        Raises:
          ValueError: an assigned plan is for another number of servers, or no plan, or the strategy
            is synchronous.
        """
        return self._plan

    @plan.setter
    def plan(self, plan: Any) -> None:
        if plan is not None:
            if not hasattr(plan, "check_servers"):
                raise ValueError(f"plan must be a het_tf.planner.Plan or None, not {plan!r}")
            if self.synchronous:
                raise ValueError("plan and synchronous=True exclude each other")
            plan.check_servers(self.num_ps)
        self._plan = plan

    def check_open(self) -> None:
        """Raises a RuntimeError if this process is no longer connected to the cluster.

        The reason is that the `LocalCluster` was closed, or that a later strategy has connected to
        another cluster.
        """
        if self._closed:
            raise RuntimeError(
                "The LocalCluster of this strategy was closed, and what lived on it is gone: "
                "train, evaluate and save inside `with LocalCluster(...) as cluster:`, or start "
                "another cluster and make a strategy and a model on it."
            )
        if not is_connected_to(self._addresses):
            raise RuntimeError(
                "A strategy that was made after this one has connected this process to another "
                "cluster, and TensorFlow has one at a time: what lived on this one's is out of "
                "reach. Use the later strategy, or one process for each cluster."
            )

    def scope(self) -> Any:
        """Returns the strategy's scope, as the base class does.

        Raises:
          RuntimeError: an error of `check_open`.
        """
        self.check_open()
        return self._noting_variables()

    @contextlib.contextmanager
    def _noting_variables(self) -> Iterator[Any]:
        # The creator scope is entered before the scope of the base class. The creator therefore
        # gets the variables on the servers, and not the variables that are composed of them.
        with tf.variable_creator_scope(self._on_servers.note_variable), super().scope() as scope:
            yield scope

    def note_table(self, table: EmbeddingTable) -> None:
        """Registers a table. Recovery recreates the shards that a parameter server lost."""
        self._on_servers.note_table(table)

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> Any:
        """Distributes a dataset for `coordinator.create_per_worker_dataset`, as the base class."""
        distributed = super().experimental_distribute_dataset(dataset, options)
        kind: Any = type(distributed)
        # `keras.Model.fit` calls this and then iterates over the result, which must raise an error.
        change_class(distributed, _for_workers(kind))
        return distributed

    def idle(self) -> bool:
        """Whether no scheduled closure is waiting or running, and none has failed.

        After a failure, this returns False once and clears the error, as `ClusterCoordinator.done`
        does. No other call raises this error then.
        """
        if self._cluster_coordinator is None:
            return True
        try:
            return self.coordinator.done()
        except Exception:  # A closure raised it.
            return False

    @property
    def health(self) -> ClusterHealth:
        """The health of the cluster's tasks."""
        return self._health

    @property
    def held(self) -> HeldUpdates:
        """The caches and replicas of workers, and what they hold back."""
        return self._held

    def flush(self, *, slots: bool = True) -> None:
        """Pushes all pending updates of the workers and the coordinator to the parameter servers.

        Waits for scheduled closures first. Afterwards the tables and the dense variables contain
        the updates of all workers. A worker that is down is skipped with a warning.

        Args:
          slots: whether to update the slots of Keras optimizers, too, if every worker has its own
            slots (`dense_staleness`).

        Raises:
          RuntimeError: the cluster was closed.
          tf.errors.UnavailableError: a parameter server is down. The message names it.
          Exception: the error of a scheduled closure.
        """
        self._held.flush(slots)

    def dense_stats(self) -> dict[str, int]:
        """Returns the counters of the workers' replicas of dense variables, summed over workers.

        Use it in callbacks (with `dense_staleness`): `fit` creates replicas and frees them when it
        ends. If other code than training changes a variable, replicas are created again and count
        from 0.

        Returns:
          "steps": number of steps. "steps_sent": steps that a parameter server has merged.
          "steps_lost": steps whose parameter server was lost. "pending": steps that are not known
          to be merged, now. "pushes": number of pushed shards. "values": number of fetched shards.
          A server may have several shards of the variables. "bytes_up", "bytes_down": bytes of
          messages.

          The result is empty while there are no replicas. Workers that are down do not count.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        return self._held.dense_stats()

    def explain(self, error: BaseException) -> BaseException:
        """As `ClusterHealth.explain`."""
        return self._health.explain(error)

    def task_states(self) -> dict[tuple[str, int], tuple[str, str]]:
        """Returns the address and state of every task, by task type and index.

        The state is the result of the last probe: "up", or a description of the failure. Tasks are
        probed only while `health.monitor` is started, as under `fit`.
        """
        failing = self._health.monitor.failing()
        return {
            task: (address, failing[task].value if task in failing else "up")
            for task, address in self._addresses.items()
        }

    def worker_device(self, index: int) -> str:
        """Returns the name of a worker's CPU device, for `tf.device`.

        Raises:
          ValueError: there is no such worker.
        """
        if ("worker", index) not in self._addresses:
            count = self.num_workers
            raise ValueError(f"no worker {index!r}: the cluster has {count} worker tasks")
        return f"/job:worker/replica:0/task:{index}/device:CPU:0"

    def run_on_worker(self, index: int, fn: Callable[..., Any], *args: Any) -> Any:
        """Runs `fn(*args)` on a given worker and waits for the result.

        A `shared_name` in `fn` refers to the same resource as in closures on this worker. `fn` must
        not run at the same time as closures that use the same resource, unless the resource allows
        concurrent use.

        Args:
          index: task index of the worker.
          fn: a `tf.function`, or a Python function of ops, which then run one by one.
          *args: arguments of `fn`.

        Returns:
          The result of `fn`, with every tensor copied to this process.

        Raises:
          ValueError: there is no such worker.
          tf.errors.UnavailableError: the worker is down.
        """
        with tf.device(self.worker_device(index)):
            result = fn(*args)
        with tf.device(f"/job:{COORDINATOR}/replica:0/task:0/device:CPU:0"):
            return tf.nest.map_structure(lambda x: tf.identity(x) if tf.is_tensor(x) else x, result)

    # Recovery from a lost parameter server.

    def restore_or_initialize(self, manager: tf.train.CheckpointManager | Manager) -> str | None:
        """Restores the latest checkpoint, if there is one, and turns on recovery in `fit`.

        After this call, `het_tf.keras.Model.fit` recovers from lost parameter servers: it waits
        until the server is back, restores the latest checkpoint and repeats the interrupted epoch.
        If there is no checkpoint, `fit` saves one when it begins. A custom loop calls this function
        after a `tf.errors.UnavailableError`, and then creates its `tf.function`s again.

        Args:
          manager: a `tf.train.CheckpointManager` or `het_tf.checkpoint.Manager` of a
            `tf.train.Checkpoint(model=model, ...)`.

        Returns:
          Path of the restored checkpoint. None: the model has its initial values.

        Raises:
          TypeError: `manager` is no such manager.
          RuntimeError: a parameter server was lost, and there is no checkpoint. Or the cluster was
            closed.
          tf.errors.UnavailableError: a parameter server did not come back in `back_within` seconds.
        """
        if not isinstance(manager, (tf.train.CheckpointManager, Manager)):
            raise TypeError(
                "manager must be a tf.train.CheckpointManager or a het_tf.checkpoint.Manager, not"
                f" {manager!r}"
            )
        self.check_open()
        self._manager = manager
        lost = self.recover()
        latest = manager.restore_or_initialize()
        if latest is not None:
            logging.info("restored %s", latest)
        elif lost:
            raise RuntimeError(
                "What a parameter server held is lost, and"
                f" {manager.directory!r} has no checkpoint. Make the model anew."
            )
        return latest

    @property
    def manager(self) -> tf.train.CheckpointManager | Manager | None:
        """The last argument of `restore_or_initialize`, or None."""
        return self._manager

    @property
    def recoveries(self) -> int:
        """Number of recoveries from lost parameter servers.

        After a recovery, a `tf.function` that was traced before refers to lost variables and
        tables.
        """
        return self._recoveries

    def recover(self) -> bool:
        """Waits until all parameter servers answer, and recreates the objects of lost servers.

        Recreated variables are zeros. Recreated shards of tables are empty.

        Returns:
          Whether any server was lost.

        Raises:
          tf.errors.UnavailableError: a parameter server did not come back in `back_within` seconds.
        """
        until = time.monotonic() + self.back_within
        servers = {task: address for task, address in self._addresses.items() if task[0] == "ps"}
        if not probes.wait_until_up(servers, self.back_within):
            self._health.raise_if_ps_down()
        if not self._marks.any_replaced():
            return False
        while not self.idle():  # Clears the errors of closures that waited for a lost server.
            time.sleep(_POLL)
        reconnect()
        replaced = self._marks.take_replaced(until)
        logging.warning("%s: other processes than before; made anew what they held", replaced)
        own_what_is_on(replaced, self._address)
        self._recoveries += 1
        self._on_servers.make_again(replaced)
        recovery.wait_until_servers_are_reached(replaced, self._health.is_down, until)
        return True

    def wait_until_reached(self) -> None:
        """Waits until the parameter servers can reach this process, as its checkpoints require.

        A server may still have a broken connection to an earlier process at this address. The wait
        also ends if a server was restarted. The next call to that server then fails.

        Raises:
          tf.errors.UnavailableError: a server is down, or cannot reach this process within
            `back_within` seconds.
        """
        self._health.raise_if_ps_down()
        if not self._reached:
            until = time.monotonic() + self.back_within
            self._reached = self._health.call_watched(
                lambda: recovery.wait_until_program_is_reached(
                    lambda server: self._health.is_down(server) or self._marks.any_replaced(), until
                )
            )

    def join(self) -> None:
        """Waits for all scheduled closures, as `coordinator.join()`.

        Raises:
          tf.errors.UnavailableError: a parameter server is down. The message names it.
          Exception: the error of a scheduled closure.
        """
        self._health.call_watched(self.coordinator.join)

    def _join_open(self) -> None:
        self.check_open()
        self.join()

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        # Overrides the base class, which would use the name "chief" (see failures/connection.py).
        resolver = self._cluster_resolver
        cluster = with_local_chief(resolver.cluster_spec())
        self._cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            cluster, rpc_layer=resolver.rpc_layer
        )
        try:
            super()._connect_to_cluster(COORDINATOR)
        finally:
            self._cluster_resolver = resolver

    def _cluster_closed(self) -> None:
        self._closed = True


def _no_log(task_type: str, index: int) -> str:
    return ""


@functools.cache
def _for_workers(dataset_class: type) -> type:
    """Returns a subclass of a dataset class whose iterator explains that only workers read it."""

    class ForWorkers(dataset_class):
        def __iter__(self) -> Iterator[Any]:
            try:
                return super().__iter__()
            except ValueError as error:
                raise ValueError(
                    "keras.Model does not train, evaluate or predict under "
                    "HetParameterServerStrategy: make the model a het_tf.keras.Model or "
                    "het_tf.keras.Sequential. A loop of your own gets its dataset from "
                    "strategy.coordinator.create_per_worker_dataset."
                ) from error

    return ForWorkers


def _checked_addresses(
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
) -> dict[probes.Task, str]:
    if isinstance(resolver, tf.distribute.cluster_resolver.TFConfigClusterResolver):
        cluster = read_chief_config().cluster
    else:
        cluster = check_cluster(resolver.cluster_spec().as_dict())
        task_type = resolver.task_type
        # The task type of a resolver made by hand is empty or "chief".
        if task_type and task_type not in TASK_TYPES:
            raise ValueError(
                f"the resolver's task_type is {task_type!r}, not one of {list(TASK_TYPES)}"
            )
    return {
        (task_type, i): address
        for task_type in ("ps", "worker")
        for i, address in enumerate(cluster[task_type])
    }
