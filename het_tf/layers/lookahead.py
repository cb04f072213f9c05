"""Look-ahead: lookups that begin before their layer is called (docs/protocol.md, 7).

The code that runs a step records the ids of the layers' calls (`recording`) and looks up the ids in
one exchange. The layers then read the rows of these lookups (`prepared`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from het_tf.tables.exchange import Exchange
from het_tf.tables.worker_cache import WorkerCache, install_complete_op


class Room:
    """Delays a step's first update until the shards have acknowledged enough earlier updates.

    One exchange serves all layers of the step (write back-pressure). It is seldom needed, because
    due updates travel with the lookups of later steps.
    """

    def __init__(self, lookups: Sequence[tuple[WorkerCache, tf.Tensor]]):
        """Stores `lookups`: caches and their tickets, in the graph of the step."""
        # The gradient functions of a graph refer to this object. A graph may outlive the caches.
        self._lookups = [
            (weakref.ref(cache), ticket) for cache, ticket in lookups if cache.makes_room
        ]
        self._made: tf.Tensor | None = None
        self._updates: list[tf.Operation] = []

    def before_op(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the gradients of a layer. They are available once its update has room."""
        if not self._lookups:
            return list(gradients)
        if self._made is None:
            with tf.control_dependencies(gradients):
                self._made = self._make_op()
        with tf.control_dependencies([self._made]):
            return [tf.identity(gradient) for gradient in gradients]

    def note_update(self, update: tf.Operation) -> None:
        """Records an update of the step."""
        self._updates.append(update)

    def updates(self) -> list[tf.Operation]:
        """Returns the recorded updates that are ops of the graph being built."""
        graph = tf.compat.v1.get_default_graph()
        return [update for update in self._updates if update.graph is graph]

    def _make_op(self) -> tf.Tensor:
        caches = [cache() for cache, _ in self._lookups]
        begun = [
            cache.make_room_op(tf.identity(ticket))
            for cache, (_, ticket) in zip(caches, self._lookups, strict=True)
        ]
        exchange = Exchange([cache.table for cache in caches])

        def send(_: tf.Tensor) -> list[tf.Tensor]:
            replies = exchange.send_op([requests for *_, requests in begun])
            tickets = [made for made, *_ in begun]
            complete = install_complete_op(caches, tickets, replies, exchange.send_op)
            with tf.control_dependencies(complete):
                return [tf.constant(False)]

        # A loop, because tf.cond does not pass on captures from the function's caller.
        lacks_room = tf.reduce_any([lacks for _, lacks, _ in begun])
        (lacks_room,) = tf.while_loop(
            lambda more: more, send, [lacks_room], parallel_iterations=1, name="make_room"
        )
        return lacks_room


_local = threading.local()

# Ops whose results depend only on the shape of their inputs. Zeros have the shape of the outputs.
_SHAPES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")
# Ops that return different random numbers in every run.
_DRAWS = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "RngReadAndSkip",
        "StatefulRandomBinomial",
        "StatefulStandardNormal",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatefulUniform",
        "StatefulUniformFullInt",
        "StatefulUniformInt",
        "TruncatedNormal",
    }
)


class CannotLookAhead(Exception):
    """The ids of a layer cannot be determined without running the model."""


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A completed lookup. Its rows are in the cache.

    Attributes:
      layer: the `HetEmbedding` that reads the rows.
      unique_ids: scalar variant of `WorkerCache.unique_ids_op`.
      ticket: scalar variant, the installed ticket.
      room: room of the step. None: no other step overlaps with the step.
    """

    layer: Any
    unique_ids: tf.Tensor
    ticket: tf.Tensor
    room: Room | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a layer.

    Attributes:
      layer: a `HetEmbedding`.
      keys: int64, of any shape.
      fresh: whether the rows may miss no merged update, whatever the staleness bounds.
    """

    layer: Any
    keys: tf.Tensor
    fresh: bool


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Layers called in this context record their calls instead of looking up rows."""
    _local.calls, _local.unknown = [], []
    _local.graph = tf.compat.v1.get_default_graph()
    try:
        yield _local.calls
    finally:
        _local.calls = _local.unknown = None


def is_recording() -> bool:
    """Whether the context of `recording` is active in this thread."""
    return getattr(_local, "calls", None) is not None


def unknown(zeros: tf.Tensor) -> tf.Tensor:
    """Marks zeros that represent values which only the step computes. Returns the zeros."""
    _local.unknown.append(zeros)
    return zeros


def depend_on_unknown(calls: Sequence[Call]) -> list[bool]:
    """Returns for each recorded call whether its keys depend on random or `unknown` tensors."""
    graph = _local.graph
    unknown_ops = {tensor.op for tensor in _local.unknown}

    @functools.cache
    def functions_do() -> bool:
        """Whether functions that the graph calls may contain random or unknown tensors."""
        if any(op.graph is not graph for op in unknown_ops):
            return True
        functions = graph.as_graph_def().library.function
        return any(node.op in _DRAWS for function in functions for node in function.node_def)

    def depends(keys: tf.Tensor) -> bool:
        seen: set[tf.Operation] = set()
        ops = [keys.op]
        while ops:
            op = ops.pop()
            if op in seen or op.type in _SHAPES:
                continue
            seen.add(op)
            calls_one = any(attribute.HasField("func") for attribute in op.node_def.attr.values())
            if op in unknown_ops or op.type in _DRAWS or (calls_one and functions_do()):
                return True
            ops += [tensor.op for tensor in op.inputs]
        return False

    return [depends(call.keys) for call in calls]


@contextlib.contextmanager
def prepared(lookups: Sequence[Lookup]) -> Iterator[None]:
    """Layers called in this context read the rows of these lookups, in the order of calls."""
    before = getattr(_local, "lookups", None), getattr(_local, "graph", None)
    _local.lookups = list(lookups)
    _local.graph = tf.compat.v1.get_default_graph()
    try:
        yield
    finally:
        _local.lookups, _local.graph = before


def record(layer: Any, keys: tf.Tensor, fresh: bool) -> bool:
    """Records a call of a layer. Returns False outside of `recording`.

    Raises:
      CannotLookAhead: the call is within a function or a branch.
    """
    calls = getattr(_local, "calls", None)
    if calls is None:
        return False
    if tf.compat.v1.get_default_graph() is not _local.graph:
        raise CannotLookAhead(f"{layer.name} is called within a tf.function or tf.cond")
    calls.append(Call(layer, keys, fresh))
    return True


def take(layer: Any) -> Lookup | None:
    """Removes and returns the prepared lookup of this call of a layer. None: there is none."""
    lookups = getattr(_local, "lookups", None)
    if not lookups or tf.compat.v1.get_default_graph() is not _local.graph:
        return None
    for i, lookup in enumerate(lookups):
        if lookup.layer is layer:
            return lookups.pop(i)
    return None
