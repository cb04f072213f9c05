"""Lookups that are begun before their layer is called (docs/protocol.md, 7).

Whoever runs a step finds out which ids the layers will be called with (`recording`), looks them up
in one exchange, and has the layers take the rows from there (`prepared`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from het_tf.layers.room import Room

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
