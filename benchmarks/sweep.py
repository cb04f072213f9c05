"""How long a sweep over a table takes, and the steps that run beside it.

    python benchmarks/sweep.py --rows=4000000 --dim=16

Fills a table, then updates --step random rows at a time: for a while with nothing else under way,
while a sweep finds nothing to drop, while one drops all rows, and with nothing again. Prints the
time of the sweep, in a row without pauses, and the median, 99th percentile and longest of the steps
beside it.
"""

from __future__ import annotations

import json
import pathlib
import threading
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import app, flags

import het_tf
from het_tf import lifetimes, ops
from het_tf.tables.table import EmbeddingTable

_ROWS = flags.DEFINE_integer("rows", 4_000_000, "of the table", lower_bound=1000)
_DIM = flags.DEFINE_integer("dim", 16, "columns of a row", lower_bound=1)
_STEP = flags.DEFINE_integer("step", 1000, "ids of a step", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 4, "of steps alone")
_JSON = flags.DEFINE_string("json", None, "file to write the figures to")


def main(argv: list[str]) -> None:
    """Measures."""
    del argv
    rules = lifetimes.spec(None, het_tf.Expiry(age=1, time="given"))
    table = EmbeddingTable(_DIM.value, het_tf.optimizers.SGD(), lifetimes=rules)
    table.expire(0)
    random = np.random.default_rng(0)
    batches = random.integers(0, _ROWS.value, (50, _STEP.value))

    def update(ids: np.ndarray) -> None:
        gradients = tf.ones([len(ids), _DIM.value])
        ops.table_apply(table.handle(0), ops.unique_ids(tf.constant(ids)), gradients, 1.0)

    def steps_while(holds: Callable[[], bool]) -> dict[str, float]:
        times = []
        while holds() or not times:
            begun = time.perf_counter()
            update(batches[len(times) % len(batches)])
            times.append(1e3 * (time.perf_counter() - begun))
        names = {"median_ms": 50, "p99_ms": 99, "longest_ms": 100}
        return {
            "count": len(times),
            **{n: float(np.percentile(times, p)) for n, p in names.items()},
        }

    def alone() -> dict[str, float]:
        end = time.perf_counter() + _SECONDS.value
        return steps_while(lambda: time.perf_counter() < end)

    def beside(now: int) -> dict[str, float]:
        taken = {}

        def sweep() -> None:
            begun = time.perf_counter()
            taken["dropped"] = table.expire(now)
            taken["seconds"] = time.perf_counter() - begun

        thread = threading.Thread(target=sweep)
        thread.start()
        return steps_while(thread.is_alive) | taken

    for first in range(0, _ROWS.value, 100_000):
        update(np.arange(first, min(first + 100_000, _ROWS.value)))
    ways = {
        "alone": alone,
        "beside a sweep": lambda: beside(0),
        "beside a sweep that drops": lambda: beside(1),
        "alone again": alone,
    }
    figures = []
    for name, run in ways.items():
        figures.append({"steps": name} | run())
        print(json.dumps(figures[-1]), flush=True)
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    app.run(main)
