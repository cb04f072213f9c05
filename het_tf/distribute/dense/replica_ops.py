"""Ops on a worker's replica of the dense variables, for functions that run on the worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from het_tf import ops
from het_tf.compat.function_graphs import handle_from_caller, share_in_graph
from het_tf.compat.tensorflow_internals import ResourceVariable, identity_of
from het_tf.distribute.dense.server_copy import DenseCopy
from het_tf.runtime.counters import names_of
from het_tf.tables.exchange import Exchange


class ReplicaVariable(ResourceVariable):
    """A worker's replica of a variable. Keras uses it in place of the variable on the server.

    Attributes:
      assigned: whether an op was built that writes the variable.
    """

    def __init__(self, native: tf.Variable, find_handle: Callable[[], tf.Tensor]):
        """Copies the attributes of the variable on the server.

        Args:
          native: variable on the parameter server.
          find_handle: returns the handle to use in the current graph.
        """
        self._find_handle = find_handle
        self.assigned = False
        super().__init__(
            trainable=native.trainable,
            shape=native.shape,
            dtype=native.dtype,
            handle_name=native.name.split(":")[0],
            in_graph_mode=False,
            **identity_of(native),
        )

    @property
    def handle(self) -> tf.Tensor:
        """The handle in the current graph."""
        return self._find_handle()

    @property
    def device(self) -> str:
        """Empty: the device is the worker that runs the graph, which is unknown here."""
        return ""


def _noting(name: str) -> Any:
    method = getattr(ResourceVariable, name)

    @functools.wraps(method)
    def note(self: ReplicaVariable, *args: Any, **kwargs: Any) -> Any:
        self.assigned = True
        return method(self, *args, **kwargs)

    return note


for _name in (
    *("assign", "assign_add", "assign_sub", "batch_scatter_update"),
    *(f"scatter_{verb}" for verb in ("add", "sub", "max", "min", "mul", "div", "update")),
    *(f"scatter_nd_{verb}" for verb in ("add", "sub", "update", "max", "min")),
):
    setattr(ReplicaVariable, _name, _noting(_name))


class ReplicaOps:
    """The part of `DenseReplicas` that builds ops for functions on workers.

    Attributes:
      name: unique name.
      devices: the parameter servers.
    """

    _make_handle: Callable[[], tf.Tensor]

    def __init__(self, name: str, natives: Sequence[tf.Variable], copy: DenseCopy):
        """Stores the arguments. Creates no replica.

        Args:
          name: unique name.
          natives: variables on the parameter servers.
          copy: copy of the variables with which the replicas exchange contributions.
        """
        self.name = name
        self._natives = list(natives)
        self._dtypes = [native.dtype for native in natives]
        self._shapes = [native.shape for native in natives]
        self._variables = [
            ReplicaVariable(native, functools.partial(self._find_handle, i))
            for i, native in enumerate(natives)
        ]
        self._copy = copy
        self.devices = copy.servers
        self._exchange = Exchange([self])

    @property
    def variables(self) -> dict[int, ReplicaVariable]:
        """The replica variables, by the `id` of the variable on a parameter server."""
        return {id(n): v for n, v in zip(self._natives, self._variables, strict=True)}

    def open_op(self) -> None:
        """Makes the replica variables usable in a graph. Called at the start of the graph."""
        replica = self._handle_op()
        handles = ops.replica_variables(
            replica, n=len(self._natives), dtypes=self._dtypes, shapes=self._shapes
        )
        for i, handle in enumerate(handles):
            share_in_graph(f"{self.name}/{i}", handle)

    def settle_op(
        self,
        steps: tf.Tensor,
        reads: bool,
        carrier: Callable[[], list[tf.Operation]] | None = None,
    ) -> None:
        """Applies the received values and exchanges due contributions. Called between two steps.

        Args:
          steps: int64 scalar, number of steps since the last call.
          reads: whether a step follows.
          carrier: sends messages of other parties that include the messages of `request_op` and
            `receive_op`. Returns ops after which the replies were received.
        """
        must = self._settle_op(steps, reads)
        none = tf.constant(0, tf.int64)
        if carrier is not None:
            with tf.control_dependencies([must]):
                received = carrier()
            with tf.control_dependencies(received):
                must = self._settle_op(none, False)
        self._exchange_while(must, lambda: self._settle_op(none, False))

    def exchange_loop_op(self) -> None:
        """Exchanges urgent contributions in a loop, from `open_loop_op` to `close_loop_op`.

        A contribution is urgent if no message of a step has carried it in half of the available
        time.
        """

        def body(urgent: tf.Tensor) -> list[tf.Tensor]:
            urgent = ops.replica_urgent(self._handle_op())

            def exchange() -> tf.Tensor:
                with tf.control_dependencies(self._exchange_op()):
                    return tf.constant(True)

            return [tf.cond(urgent, exchange, lambda: tf.constant(False))]

        tf.while_loop(lambda urgent: urgent, body, [tf.constant(True)], parallel_iterations=1)

    def open_loop_op(self) -> tf.Operation:
        """Allows `exchange_loop_op` to wait. It must run before that loop."""
        return ops.replica_close(self._handle_op(), closed=False)

    def close_loop_op(self) -> tf.Operation:
        """Ends `exchange_loop_op`."""
        return ops.replica_close(self._handle_op(), closed=True)

    def request_op(self, asks: bool = False) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Builds the due requests, for callers that send the requests of several parties together.

        Args:
          asks: whether to ask for the number of missed steps, in a few bytes, if no other request
            is due.

        Returns:
          ticket: scalar variant for `receive_op`.
          requests: uint8 [bytes], one per server.
        """
        ticket, requests = ops.replica_request(
            self._handle_op(), num_shards=self._copy.num_shards, asks=asks
        )
        return ticket, self._copy.pack(requests)

    def receive_op(self, ticket: tf.Tensor, replies: list[tf.Tensor]) -> tf.Operation:
        """Stores the replies to requests, one per server. `settle_op` applies them."""
        return ops.replica_receive(self._handle_op(), ticket, self._copy.unpack(replies))

    def flush_op(self) -> tf.Tensor:
        """Pushes all steps, then returns the replica's `report_op`."""
        zero = tf.constant(0, tf.int64)
        must = self._settle_op(zero, False, everything=True)
        done = self._exchange_while(must, lambda: self._settle_op(zero, False, everything=True))
        with tf.control_dependencies([done]):
            return self.report_op()

    def report_op(self) -> tf.Tensor:
        """Returns int64 [2 + counters]: the worker's task index, the replica's id, the counters."""
        return ops.replica_report(self._handle_op())

    @property
    def counter_names(self) -> tuple[str, ...]:
        """Names of the counters of `report_op` (`ReplicaCounter` in ops/core/dense/replica.h)."""
        return names_of(ops.replica_counter_names)

    def stats_op(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns names and values of counters (`ReplicaCounter` in ops/core/dense/replica.h)."""
        return ops.replica_stats(self._handle_op())

    def serve_op(self, shard: int, request: tf.Tensor) -> tf.Tensor:
        """Returns a server's reply to a request of a replica. `shard` is the server's index."""
        return self._copy.serve_op(shard, request)

    def _handle_op(self) -> tf.Tensor:
        return handle_from_caller(self.name, self._make_handle)

    def _find_handle(self, index: int) -> tf.Tensor:
        def make() -> tf.Tensor:
            raise RuntimeError(f"{self._natives[index].name} is used outside of a step")

        return handle_from_caller(f"{self.name}/{index}", make)

    def _settle_op(self, steps: tf.Tensor, reads: bool, everything: bool = False) -> tf.Tensor:
        handles = [self._find_handle(i) for i in range(len(self._natives))]
        return ops.replica_settle(self._handle_op(), handles, steps, reads=reads, all=everything)

    def _exchange_op(self) -> list[tf.Operation]:
        ticket, requests = self.request_op()
        (replies,) = self._exchange.send_op([requests])
        return [self.receive_op(ticket, replies)]

    def _exchange_while(self, must: tf.Tensor, settle: Callable[[], tf.Tensor]) -> tf.Tensor:
        def body(_: tf.Tensor) -> list[tf.Tensor]:
            with tf.control_dependencies(self._exchange_op()):
                return [settle()]

        return tf.while_loop(lambda must: must, body, [must], parallel_iterations=1)[0]
