"""The current strategy of this process, for code outside of its scope."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf

from het_tf.compat.errors import Cause, cause_of
from het_tf.runtime.broadcast import cluster_devices


class ClusterStrategy(Protocol):
    """The part of the strategy's interface that other packages use."""

    @property
    def closed(self) -> bool:
        """Whether the strategy's cluster was closed."""
        ...

    def check_open(self) -> None:
        """Raises a RuntimeError if the strategy's cluster was closed."""

    def explain(self, error: tf.errors.OpError) -> Exception:
        """Returns an error that names the task that is down, or `error` itself."""
        ...

    def note_table(self, table: Any) -> None:
        """Registers a table. Recovery recreates the shards that a parameter server lost."""

    def wait_until_reached(self) -> None:
        """Waits until the parameter servers can reach this process."""


_made: list[weakref.ref[ClusterStrategy]] = []


def note_strategy(strategy: ClusterStrategy) -> None:
    """Sets the `current_strategy`. Only a weak reference is kept."""
    _made[:] = [weakref.ref(strategy)]


def current_strategy() -> ClusterStrategy | None:
    """Returns the newest strategy, or None if its cluster was closed or none exists."""
    strategy = _made[0]() if _made else None
    return None if strategy is None or strategy.closed else strategy


def is_synchronous() -> bool:
    """Whether the current strategy has `synchronous=True`."""
    return bool(getattr(current_strategy(), "synchronous", False))


@contextlib.contextmanager
def servers_named() -> Iterator[None]:
    """Replaces TensorFlow's error by one that names the parameter server that is down.

    Usable as a context manager and as a decorator.

    Raises:
      RuntimeError: the cluster was closed.
    """
    try:
        yield
    except tf.errors.OpError as error:
        last = _made[0]() if _made else None
        if last is not None and cause_of(error) in (Cause.UNKNOWN_DEVICE, Cause.TRANSPORT):
            last.check_open()
        strategy = current_strategy()
        if strategy is None or (explained := strategy.explain(error)) is error:
            raise
        raise explained from error


def warn_of_idle_cluster(what: str) -> None:
    """Warns that "`what` outside of the strategy's scope" if a strategy is open."""
    if current_strategy() is None:
        return
    warnings.warn(
        f"{what} outside of the strategy's scope: it is in this process alone, and the cluster "
        "does nothing for it. Make and build it, or its model, inside `with strategy.scope():`.",
        stacklevel=3,
    )


def parameter_servers(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the devices that hold tables under a strategy. Empty means this process.

    Raises:
      ValueError: the strategy is no ParameterServerStrategy and has several replicas.
    """
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return cluster_devices("ps")
    if strategy.num_replicas_in_sync != 1:
        raise ValueError(
            f"HetEmbedding runs under a ParameterServerStrategy or without a strategy, not under"
            f" {type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas"
        )
    return []
