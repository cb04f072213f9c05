"""Which strategy this process has, for those who are outside of its scope."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from het_tf.distribute.strategy import HetParameterServerStrategy

_made: list[weakref.ref[HetParameterServerStrategy]] = []


def note_strategy(strategy: HetParameterServerStrategy) -> None:
    """Has `warn_of_idle_cluster` look whether it is in use. It is held weakly."""
    _made[:] = [weakref.ref(strategy)]


def warn_of_idle_cluster(what: str) -> None:
    """Warns that "`what` outside of the strategy's scope" if there is a cluster to be used."""
    strategy = _made[0]() if _made else None
    if strategy is None or strategy.closed:
        return
    warnings.warn(
        f"{what} outside of the strategy's scope: it is in this process alone, and the cluster "
        "does nothing for it. Make and build it, or its model, inside `with strategy.scope():`.",
        stacklevel=3,
    )
