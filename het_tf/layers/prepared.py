"""Lookups that are begun before their layer is called (DESIGN 3.7).

Whoever runs a step finds out which ids the layers will be called with (`recording`), looks them up
in one exchange, and has the layers take the rows from there (`prepared`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from het_tf.layers.room import Room

_local = threading.local()


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
    _local.calls = []
    _local.graph = tf.compat.v1.get_default_graph()
    try:
        yield _local.calls
    finally:
        _local.calls = None


def is_recording() -> bool:
    """Whether layers note what they would look up."""
    return getattr(_local, "calls", None) is not None


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
