"""Names, sums and ratios of the counters of tables, caches and replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

Counts = dict[str, int]

# Counters of the current state. All other counters only grow.
GAUGES = frozenset({"rows", "pending", "memory_bytes", "candidates", "rows_watched", "disk_bytes"})


def add_up(several: Iterable[Mapping[str, int]]) -> Counts:
    """Sums counters by name."""
    total: Counts = {}
    for counters in several:
        for name, value in counters.items():
            total[name] = total.get(name, 0) + value
    return total


def sum_stats(stats: Iterable[tuple[Any, Any]]) -> Counts:
    """Sums the outputs of several stats ops: pairs of names and values, arrays or tensors."""
    return add_up(
        {
            name.decode(): int(value)
            for name, value in zip(np.asarray(names), np.asarray(values), strict=True)
        }
        for names, values in stats
    )


@functools.cache
def names_of(names_op: Callable[[], tf.Tensor]) -> tuple[str, ...]:
    """Returns the names that `names_op` outputs: the counters in the order of a report."""
    with tf.init_scope(), tf.device("/device:CPU:0"):
        return tuple(name.decode() for name in names_op().numpy())


def since(now: Mapping[str, int], before: Mapping[str, int]) -> Counts:
    """Returns the increase of every counter between two times.

    An increase is never negative: a cache that was lost in between counts as zero. Gauges keep
    their current value.
    """
    return {
        name: value if name in GAUGES else max(value - before.get(name, 0), 0)
        for name, value in now.items()
    }


def with_ratios(counters: Mapping[str, float]) -> dict[str, float]:
    """Adds "hit_rate", "key_hit_rate" and "refreshes" to the counters of caches.

    The rates are from 0 to 1, and 0 if nothing was looked up. "refreshes" is the number of rows
    that were fetched again because they were beyond the read bound.
    """
    if not counters:
        return {}
    ids, keys = counters["ids"], counters["keys"]
    return {
        **counters,
        "refreshes": counters["stale_hits"] + counters["rows_unasked"],
        "hit_rate": counters["hit_ids"] / ids if ids else 0.0,
        "key_hit_rate": counters["hits"] / keys if keys else 0.0,
    }
