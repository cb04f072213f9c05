"""What counters of tables, caches and replicas are called, and come to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

Counts = dict[str, int]

# Counters that say how things are; all others only grow.
GAUGES = frozenset({"rows", "pending", "memory_bytes", "candidates", "rows_watched"})


def add_up(several: Iterable[Mapping[str, int]]) -> Counts:
    """Sums counters by name."""
    total: Counts = {}
    for counters in several:
        for name, value in counters.items():
            total[name] = total.get(name, 0) + value
    return total


def sum_stats(stats: Iterable[tuple[Any, Any]]) -> Counts:
    """Sums what several ops gave: pairs of the counters' names and values, as arrays or tensors."""
    return add_up(
        {
            name.decode(): int(value)
            for name, value in zip(np.asarray(names), np.asarray(values), strict=True)
        }
        for names, values in stats
    )


@functools.cache
def names_of(names_op: Callable[[], tf.Tensor]) -> tuple[str, ...]:
    """The counters' names in the order of a report, which an op gives."""
    with tf.init_scope(), tf.device("/device:CPU:0"):
        return tuple(name.decode() for name in names_op().numpy())


def since(now: Mapping[str, int], before: Mapping[str, int]) -> Counts:
    """What was counted between two times; a cache that was lost meanwhile counts for nothing."""
    return {
        name: value if name in GAUGES else max(value - before.get(name, 0), 0)
        for name, value in now.items()
    }


def with_ratios(counters: Mapping[str, int]) -> dict[str, int | float]:
    """Adds ratios, and rows that were fetched again, to the counters of caches.

    "hit_rate" and "key_hit_rate" are from 0 to 1, and 0 where nothing was looked up. "refreshes"
    are rows that were fetched again because they had passed the read bound.
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
