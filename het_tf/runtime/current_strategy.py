"""Which strategy this process has, for those who are outside of its scope."""

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
    """What other rooms ask of the strategy that this process trains under."""

    @property
    def closed(self) -> bool:
        """Whether its cluster was closed."""
        ...

    def check_open(self) -> None:
        """Raises a RuntimeError if its cluster was closed."""

    def explain(self, error: tf.errors.OpError) -> Exception:
        """An error that names the task which is down; or the same error."""
        ...

    def note_table(self, table: Any) -> None:
        """Has a table made anew where its shards are lost with a parameter server."""

    def wait_until_reached(self) -> None:
        """Returns when the parameter servers reach this process."""


_made: list[weakref.ref[ClusterStrategy]] = []


def note_strategy(strategy: ClusterStrategy) -> None:
    """Makes it the `current_strategy`. It is held weakly."""
    _made[:] = [weakref.ref(strategy)]


def current_strategy() -> ClusterStrategy | None:
    """The last strategy that was made, if its cluster is still to be used."""
    strategy = _made[0]() if _made else None
    return None if strategy is None or strategy.closed else strategy


@contextlib.contextmanager
def servers_named() -> Iterator[None]:
    """Has the error of a parameter server that is down name it: a context, or a decorator.

    Raises:
      RuntimeError: in place of TensorFlow's error where the cluster was closed.
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
    """Warns that "`what` outside of the strategy's scope" if there is a cluster to be used."""
    if current_strategy() is None:
        return
    warnings.warn(
        f"{what} outside of the strategy's scope: it is in this process alone, and the cluster "
        "does nothing for it. Make and build it, or its model, inside `with strategy.scope():`.",
        stacklevel=3,
    )


def parameter_servers(strategy: tf.distribute.Strategy) -> list[str]:
    """Where tables live under that strategy; empty: in this process.

    Raises:
      ValueError: it is neither a ParameterServerStrategy nor of one replica.
    """
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return cluster_devices("ps")
    if strategy.num_replicas_in_sync != 1:
        raise ValueError(
            f"HetEmbedding runs under a ParameterServerStrategy or without a strategy, not under"
            f" {type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas"
        )
    return []
