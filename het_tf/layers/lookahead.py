"""Lookups that are begun before their layer is called (docs/protocol.md, 7).

Whoever runs a step finds out which ids the layers will be called with (`recording`), looks them up
in one exchange, and has the layers take the rows from there (`prepared`).
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

from het_tf.runtime.broadcast import cluster_devices
from het_tf.tables.exchange import Exchange
from het_tf.tables.worker_cache import WorkerCache, install_complete_op


class Room:
    """Has the first update of a step wait until the shards have enough of the updates before it.

    That is, for all layers of the step at once. They seldom lack it: what is due travels with the
    lookups of later steps.
    """

    def __init__(self, lookups: Sequence[tuple[WorkerCache, tf.Tensor]]):
        """lookups: caches and their tickets, in the graph of the step."""
        # TensorFlow never forgets the gradient of which this is a part. It must not keep the cache.
        self._lookups = [
            (weakref.ref(cache), ticket) for cache, ticket in lookups if cache.makes_room
        ]
        self._made: tf.Tensor | None = None
        self._updates: list[tf.Operation] = []

    def before_op(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The gradients of a layer, when there is room for its update."""
        if not self._lookups:
            return list(gradients)
        if self._made is None:
            with tf.control_dependencies(gradients):
                self._made = self._make_op()
        with tf.control_dependencies([self._made]):
            return [tf.identity(gradient) for gradient in gradients]

    def note_update(self, update: tf.Operation) -> None:
        """Takes note of an update of the step."""
        self._updates.append(update)

    def updates(self) -> list[tf.Operation]:
        """Those updates that are ops of the graph being built."""
        graph = tf.compat.v1.get_default_graph()
        return [update for update in self._updates if update.graph is graph]

    def _make_op(self) -> tf.Tensor:
        caches = [cache() for cache, _ in self._lookups]
        begun = [
            cache.make_room_op(tf.identity(ticket))
            for cache, (_, ticket) in zip(caches, self._lookups, strict=True)
        ]
        exchange = Exchange(cluster_devices("ps"), [cache.table for cache in caches])

        def send(_: tf.Tensor) -> list[tf.Tensor]:
            replies = exchange.send_op([requests for *_, requests in begun])
            tickets = [made for made, *_ in begun]
            complete = install_complete_op(caches, tickets, replies, exchange.send_op)
            with tf.control_dependencies(complete):
                return [tf.constant(False)]

        # A loop: it hands on what comes from the function's caller, which tf.cond does not.
        lacks_room = tf.reduce_any([lacks for _, lacks, _ in begun])
        (lacks_room,) = tf.while_loop(
            lambda more: more, send, [lacks_room], parallel_iterations=1, name="make_room"
        )
        return lacks_room


_local = threading.local()

# Ops that say the same of zeros as of what these stand for.
_SHAPES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")
# Ops that give something else each time.
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
    """The ids of a layer cannot be found without running the model."""


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A lookup whose rows are there.

    Attributes:
      layer: which `HetEmbedding` it is for.
      unique_ids: scalar variant of its cache's `unique_ids_op`.
      ticket: scalar variant, installed.
      room: of its step; None: no other step overlaps with it.
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
      fresh: whether its rows may miss nothing, however stale they might be.
    """

    layer: Any
    keys: tf.Tensor
    fresh: bool


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Layers called in this context note what they would look up, instead of doing so."""
    _local.calls, _local.unknown = [], []
    _local.graph = tf.compat.v1.get_default_graph()
    try:
        yield _local.calls
    finally:
        _local.calls = _local.unknown = None


def is_recording() -> bool:
    """Whether layers note what they would look up."""
    return getattr(_local, "calls", None) is not None


def unknown(zeros: tf.Tensor) -> tf.Tensor:
    """In `recording`, notes that these zeros stand for what only the step has; returns them."""
    _local.unknown.append(zeros)
    return zeros


def depend_on_unknown(calls: Sequence[Call]) -> list[bool]:
    """In `recording`, of each call whether its keys are drawn by chance or depend on `unknown`."""
    graph = _local.graph
    unknown_ops = {tensor.op for tensor in _local.unknown}

    @functools.cache
    def functions_do() -> bool:
        """Whether one of those that the graph calls may."""
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
    """Layers called in this context take their rows from these lookups, in the order of calls."""
    before = getattr(_local, "lookups", None), getattr(_local, "graph", None)
    _local.lookups = list(lookups)
    _local.graph = tf.compat.v1.get_default_graph()
    try:
        yield
    finally:
        _local.lookups, _local.graph = before


def record(layer: Any, keys: tf.Tensor, fresh: bool) -> bool:
    """Notes a call of a layer, if in `recording`.

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
    """The lookup of this call of a layer, if it was prepared."""
    lookups = getattr(_local, "lookups", None)
    if not lookups or tf.compat.v1.get_default_graph() is not _local.graph:
        return None
    for i, lookup in enumerate(lookups):
        if lookup.layer is layer:
            return lookups.pop(i)
    return None
