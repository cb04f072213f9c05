"""A parameter server strategy that knows about caches on the workers."""

from __future__ import annotations

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
    read_tf_config,
    set_grpc_defaults,
)
from het_tf.distribute.failure_reports import Watching
from het_tf.distribute.failures import probes, recovery
from het_tf.distribute.failures.connection import (
    is_connected_to,
    own_what_is_on,
    task_devices,
    with_local_chief,
)
from het_tf.distribute.worker_state import CacheReports, Flushing
from het_tf.runtime import deferred_destroy
from het_tf.runtime.broadcast import COORDINATOR
from het_tf.runtime.current_strategy import note_strategy
from het_tf.runtime.validation import INT32_MAX, check_float_dtype, check_integer
from het_tf.storage.checkpoints.manager import Manager
from het_tf.tables.table import EmbeddingTable

_POLL = 1.0  # seconds between looks at closures that waited for a lost parameter server


class HetParameterServerStrategy(Flushing, Watching, tf.distribute.ParameterServerStrategy):
    """`tf.distribute.ParameterServerStrategy` with caches on the workers.

    Everything of the base class works as it does there. Added are the one `coordinator`, running
    something on a given worker, flushing the workers' caches, and errors that name the parameter
    server that died. `het_tf.keras.Model` trains with it.

    What was made before it, such as datasets, lookup tables and variables, stays in this process
    and can be used with it. Models, their layers and optimizers are made in its `scope()`.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        variable_partitioner: tf.distribute.experimental.partitioners.Partitioner | None = None,
        *,
        dense_staleness: int | None = None,
        dense_merge: str = "average",
        dense_wire_dtype: str = "float32",
        lost_after: float = probes.LOST_AFTER,
        back_within: float = 600.0,
        exactly_once: bool = False,
    ):
        """Connects to the cluster; waits until every task answers, and says for which it waits.

        Args:
          cluster_resolver: names the worker and ps tasks, e.g. `LocalCluster(...).resolver` or a
            `tf.distribute.cluster_resolver.TFConfigClusterResolver()`.
          variable_partitioner: as in the base class. Keras 3 cannot use partitioned variables.
          dense_staleness: with a number, `het_tf.keras.Model.fit` trains the dense variables on
            replicas: every worker steps on its own, and exchanges what its steps added with the
            parameter servers. The number bounds own steps that are not sent yet, and steps of
            others that a worker may miss; 0: every step reads and writes. None: every step reads
            and writes the variables on the parameter servers. docs/dense.md lists the rule for
            every kind of variable.
          dense_merge: "average": what a worker's steps added counts 1 / workers of itself (local
            SGD: Stich, ICLR 2019); "sum": all of itself, as in asynchronous SGD.
          dense_wire_dtype: "float32", or "bfloat16" for half of the bytes; what rounding takes off
            is sent later.
          lost_after: seconds for which a task must leave every probe unanswered until it counts as
            lost: then the steps of a worker go to another one, and training ends with an error if
            it is a parameter server. The default is far above what a server on a machine with much
            other work needs for an answer, and bounds how long one that hangs holds up training.
          back_within: seconds that a parameter server which was lost may take to come back, where
            training can go on from a checkpoint (`restore_or_initialize`).
          exactly_once: in `het_tf.keras.Model.fit`, the updates that steps make of rows count once,
            also where the steps are run again since their worker died. For this they are sent at
            the end of a closure (of `steps_per_execution` steps), all of them, whatever the write
            bound; batches go through the training program. Dense variables are as without it.

        Raises:
          TypeError: `cluster_resolver` is something else.
          ValueError: TF_CONFIG or the cluster spec is malformed, has no worker or no ps, or says
            that this process is not the chief. The message names the offending part.
        """
        if not isinstance(cluster_resolver, tf.distribute.cluster_resolver.ClusterResolver):
            raise TypeError(
                "cluster_resolver must be a tf.distribute.cluster_resolver.ClusterResolver, such "
                "as LocalCluster(...).resolver or TFConfigClusterResolver(), not "
                f"{cluster_resolver!r}."
            )
        if dense_staleness is not None:
            dense_staleness = check_integer("dense_staleness", dense_staleness, 0, INT32_MAX)
        if dense_merge not in ("average", "sum"):
            raise ValueError(f'dense_merge must be "average" or "sum", not {dense_merge!r}')
        self.dense_staleness = dense_staleness
        self.dense_merge = dense_merge
        self.dense_wire_dtype = check_float_dtype("dense_wire_dtype", dense_wire_dtype)
        if not lost_after > 0:
            raise ValueError(f"lost_after must be positive, not {lost_after!r}")
        self.lost_after = lost_after
        if not back_within >= 0:
            raise ValueError(f"back_within must not be negative, not {back_within!r}")
        self.back_within = back_within
        self.exactly_once = exactly_once
        self.closure_numbers = ClosureNumbers()
        self._addresses = _checked_addresses(cluster_resolver)
        self._address = cluster_resolver.cluster_spec().as_dict().get("chief", [""])[0]
        self._closed = False
        self._local_cluster = getattr(cluster_resolver, "local_cluster", None)
        set_grpc_defaults()
        leave_memory_to_workers()
        probes.wait_until_up(self._addresses)
        self._on_servers = recovery.OnServers()
        super().__init__(cluster_resolver, variable_partitioner)
        Coordinator(self)  # There is one per strategy: else TensorFlow would make its own.
        own_what_is_on(task_devices(), self._address)
        self._marks = recovery.Marks()
        self._recoveries = 0
        self._reached = False
        self._manager: tf.train.CheckpointManager | Manager | None = None
        self._reports = CacheReports(self._ended_holders)
        self._monitor = probes.HealthMonitor(self._addresses, self._task_down, lost_after)
        if self._local_cluster is not None:
            self._local_cluster.attach(self.idle, self._cluster_closed)
        else:
            deferred_destroy.destroy_at_exit()
        note_strategy(self)

    # The cluster.

    @property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """The coordinator that schedules closures on the workers; one per strategy."""
        return self._cluster_coordinator

    @property
    def num_workers(self) -> int:
        """Number of worker tasks."""
        return sum(task_type == "worker" for task_type, _ in self._addresses)

    @property
    def num_ps(self) -> int:
        """Number of parameter server tasks."""
        return sum(task_type == "ps" for task_type, _ in self._addresses)

    @property
    def closed(self) -> bool:
        """Whether the `LocalCluster` was closed that the strategy was made for."""
        return self._closed

    def check_open(self) -> None:
        """Raises a RuntimeError if what lived on this strategy's cluster is out of reach.

        Its `LocalCluster` was closed, or a strategy that was made later has another cluster.
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
        """As in the base class.

        Raises:
          RuntimeError: as of `check_open`.
        """
        self.check_open()
        return self._noting_variables()

    @contextlib.contextmanager
    def _noting_variables(self) -> Iterator[Any]:
        # Entered before the scope of the base class, the creator gets the variables that are
        # placed on servers, and not those that are made of them.
        with tf.variable_creator_scope(self._on_servers.note_variable), super().scope() as scope:
            yield scope

    def note_table(self, table: EmbeddingTable) -> None:
        """Has a table made anew where its shards are lost with a parameter server."""
        self._on_servers.note_table(table)

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> Any:
        """As in the base class, for `coordinator.create_per_worker_dataset`."""
        made = super().experimental_distribute_dataset(dataset, options)
        # `keras.Model.fit` comes here first, and reads it next.
        change_class(made, _for_workers(type(made)))
        return made

    def idle(self) -> bool:
        """Whether no scheduled closure is waiting, running or has failed.

        Like `ClusterCoordinator.done`, this takes the error of a closure that failed: False once,
        and nothing else raises that error any more.
        """
        if self._cluster_coordinator is None:
            return True
        try:
            return self.coordinator.done()
        except Exception:  # What a closure raised.
            return False

    @property
    def health(self) -> probes.HealthMonitor:
        """Monitor of all tasks. It probes only between its `start` and `stop`."""
        return self._monitor

    def task_states(self) -> dict[tuple[str, int], tuple[str, str]]:
        """Task type and index -> address, and what the last probe says: "up", or what is wrong.

        Tasks are probed only while `health` is started, as it is under `fit`.
        """
        failing = self._monitor.failing()
        return {
            task: (address, failing[task].value if task in failing else "up")
            for task, address in self._addresses.items()
        }

    def worker_device(self, index: int) -> str:
        """Name of the CPU device of a worker, for `tf.device`.

        Raises:
          ValueError: there is no such worker.
        """
        if ("worker", index) not in self._addresses:
            count = self.num_workers
            raise ValueError(f"no worker {index!r}: the cluster has {count} worker tasks")
        return f"/job:worker/replica:0/task:{index}/device:CPU:0"

    def run_on_worker(self, index: int, fn: Callable[..., Any], *args: Any) -> Any:
        """Runs `fn(*args)` on one given worker and waits for its result.

        Resources that `fn` names by `shared_name` are those that closures of the coordinator see on
        that worker. It must not run at the same time as closures that use the same resources
        unless those resources allow it.

        Args:
          index: task index of the worker.
          fn: a `tf.function`, or a Python function of ops, which then run one by one.
          *args: arguments of `fn`.

        Returns:
          What `fn` returns, with every tensor copied to this process.

        Raises:
          ValueError: there is no such worker.
          tf.errors.UnavailableError: the worker is down.
        """
        with tf.device(self.worker_device(index)):
            result = fn(*args)
        with tf.device(f"/job:{COORDINATOR}/replica:0/task:0/device:CPU:0"):
            return tf.nest.map_structure(lambda x: tf.identity(x) if tf.is_tensor(x) else x, result)

    # Going on after a parameter server was lost.

    def restore_or_initialize(self, manager: tf.train.CheckpointManager | Manager) -> str | None:
        """Restores the latest checkpoint, if there is one.

        From then on `het_tf.keras.Model.fit` calls it when a parameter server is lost: it waits
        until the server is back, and runs the epoch again that was interrupted, from the latest
        checkpoint; where there is none, it saves one when it begins. A loop of your own calls it
        when it gets a `tf.errors.UnavailableError`, and then makes its `tf.function`s anew.

        Args:
          manager: of a `tf.train.Checkpoint(model=model, ...)`: TensorFlow's, or a
            `het_tf.checkpoint.Manager`.

        Returns:
          The path of what was restored. None: the model is as it was initialized.

        Raises:
          TypeError: `manager` is something else.
          RuntimeError: a parameter server was lost, and there is no checkpoint; or the cluster was
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
        """What `restore_or_initialize` was called with last."""
        return self._manager

    @property
    def recoveries(self) -> int:
        """How often something was made anew since a parameter server was lost.

        A `tf.function` that was traced when it was less has variables and tables that are gone.
        """
        return self._recoveries

    def recover(self) -> bool:
        """Waits until all parameter servers answer, and makes anew what those that were lost held.

        That is variables, which then are zeros, and shards of tables, which are empty.

        Returns:
          Whether any was lost.

        Raises:
          tf.errors.UnavailableError: a parameter server did not come back in `back_within` seconds.
        """
        until = time.monotonic() + self.back_within
        servers = {task: address for task, address in self._addresses.items() if task[0] == "ps"}
        if not probes.wait_until_up(servers, self.back_within):
            self._raise_if_ps_down()
        if not self._marks.any_replaced():
            return False
        while not self.idle():  # Takes the errors of closures that waited for a lost one.
            time.sleep(_POLL)
        reconnect()
        replaced = self._marks.take_replaced(until)
        logging.warning("%s: other processes than before; made anew what they held", replaced)
        own_what_is_on(replaced, self._address)
        self._recoveries += 1
        self._on_servers.make_again(replaced)
        recovery.wait_until_servers_are_reached(replaced, self.is_down, until)
        return True

    def wait_until_reached(self) -> None:
        """Returns when the parameter servers reach this process, as its checkpoints need it.

        They may have asked the one before it at its address while that was gone. Where one of them
        was restarted it returns, too: what is called next fails.

        Raises:
          tf.errors.UnavailableError: one is down, or does not in `back_within` seconds.
        """
        self._raise_if_ps_down()
        if not self._reached:
            until = time.monotonic() + self.back_within
            self._reached = self.call_watched(
                lambda: recovery.wait_until_program_is_reached(
                    lambda server: self.is_down(server) or self._marks.any_replaced(), until
                )
            )

    # Waiting.

    def join(self) -> None:
        """`coordinator.join()`, with an error that names the parameter server if one died.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
          Exception: what a scheduled closure raised.
        """
        self.call_watched(self.coordinator.join)

    # Inside.

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        # Of the base class, which would take the name "chief": see failures/connection.py.
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


@functools.cache
def _for_workers(dataset_class: type) -> type:
    """A class of datasets that only workers read, with an error that says so."""

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
        task = read_tf_config()
        if task.task_type != "chief":
            raise ValueError(
                f'TF_CONFIG["task"]["type"] is "{task.task_type}", but a strategy is made by the '
                "chief. Worker and ps tasks run `python -m het_tf.server`."
            )
        cluster = task.cluster
    else:
        cluster = check_cluster(resolver.cluster_spec().as_dict())
        task_type = resolver.task_type
        # Those of a resolver made by hand say nothing, or that this process is the chief.
        if task_type and task_type not in TASK_TYPES:
            raise ValueError(
                f"the resolver's task_type is {task_type!r}, not one of {list(TASK_TYPES)}"
            )
    return {
        (task_type, i): address
        for task_type in ("ps", "worker")
        for i, address in enumerate(cluster[task_type])
    }
