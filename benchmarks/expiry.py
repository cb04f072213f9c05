"""Memory and time of a table that a stream of new ids goes through.

    python benchmarks/expiry.py --ids=1000000000 --admission=exact
    python benchmarks/expiry.py --ids=100000000 --admission=none --background

Ids come in steps, each once, but for one in a hundred, which returns in each of the next four
steps: those are admitted, trained and expire, and the others are refused or expire after their one
update. A step is a unit of time, an age is --age of them, and after each step the expired rows are
dropped, in line or (--background) by a thread while the next steps run.

Prints rows, ids that are counted, the table's memory and the process's resident set as the stream
goes on, and the median of the steps' times and the longest. The last ids that returned are read and
compared with what they should be. Exit status 1 if a value is wrong (with a sketch: neither that of
a row that was admitted in time, nor early, nor late), or the table's memory at the end is more than
--limit times what it was after a tenth of the stream, and after two ages.
"""

from __future__ import annotations

import json
import pathlib
import threading
import time

import numpy as np
import tensorflow as tf
from absl import app, flags
from process_memory import resident_bytes

import het_tf
from het_tf import lifetimes, ops
from het_tf.tables.table import EmbeddingTable

_IDS = flags.DEFINE_integer("ids", 20_000_000, "of the stream, returning ones not counted anew")
_STEP = flags.DEFINE_integer("step", 100_000, "new ids of a step", lower_bound=1000)
_DIM = flags.DEFINE_integer("dim", 8, "columns of a row", lower_bound=1)
_AGE = flags.DEFINE_integer("age", 20, "steps", lower_bound=6)
_ADMISSION = flags.DEFINE_enum("admission", "exact", ["none", "exact", "sketch"], "at the 2nd time")
_SKETCH = flags.DEFINE_integer("sketch", 16 << 20, "bytes of the sketch")
_BACKGROUND = flags.DEFINE_bool("background", False, "expire beside the steps")
_LIMIT = flags.DEFINE_float("limit", 1.1, "of the memory at the end")
_OUT = flags.DEFINE_string("out", None, "file for the figures, as JSON")
_RETURNS = 4


def ids_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """The new ids of a step, scattered over all int64, and those of them that return."""
    numbers = np.arange(step * _STEP.value, (step + 1) * _STEP.value, dtype=np.uint64)
    ids = (numbers * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)  # odd: a bijection
    return ids, ids[::100]


def main(argv: list[str]) -> None:
    """Runs the stream."""
    del argv
    admission = {
        "none": None,
        "exact": het_tf.Admission(count=2),
        "sketch": het_tf.Admission(count=2, sketch_bytes=_SKETCH.value),
    }[_ADMISSION.value]
    rules = lifetimes.spec(admission, het_tf.Expiry(age=_AGE.value, time="given"))
    table = EmbeddingTable(
        _DIM.value, het_tf.optimizers.SGD(), initializer="zeros", lifetimes=rules
    )
    handle, steps = table.handle(0), max(1, _IDS.value // _STEP.value)
    seconds: list[float] = []
    expiring: threading.Thread | None = None
    early_bytes, started, figures = None, time.perf_counter(), []
    table.expire(0)
    for step in range(steps):
        new, _ = ids_of(step)
        old = [ids_of(each)[1] for each in range(max(0, step - _RETURNS), step)]
        ids = np.concatenate([new, *old])
        gradients = tf.fill([len(ids), _DIM.value], -1.0)
        begun = time.perf_counter()
        ops.table_apply(handle, ops.unique_ids(ids), gradients, 1.0)
        seconds.append(time.perf_counter() - begun)
        if expiring is not None:
            expiring.join()
        if _BACKGROUND.value:
            expiring = threading.Thread(target=table.expire, args=(step + 1,))
            expiring.start()
        else:
            table.expire(step + 1)
        if step == max(steps // 10, 2 * _AGE.value):
            early_bytes = table.stats()["memory_bytes"]
        if (step + 1) % max(1, steps // 10) == 0:
            stats = table.stats()
            figures.append(
                {
                    "ids": (step + 1) * _STEP.value,
                    "rows": stats["rows"],
                    "candidates": stats["candidates"],
                    "table_mb": stats["memory_bytes"] / 1e6,
                    "resident_mb": resident_bytes() / 1e6,
                    "seconds": time.perf_counter() - started,
                }
            )
            print(json.dumps(figures[-1]), flush=True)
    if expiring is not None:
        expiring.join()
    refused = 0 if admission is None else 1
    wrong = early = late = 0
    for ago in range(1, min(steps, _RETURNS + 1)):  # came `ago` times; the first is refused
        _, returning = ids_of(steps - ago)
        rows = table.lookup(returning)
        early += int((rows[:, 0] > ago - refused).sum())
        late += int((rows[:, 0] < ago - refused).sum())
        whole = (rows == rows[:, :1]).all(-1) & np.isin(rows[:, 0], np.arange(ago + 1))
        wrong += int((~whole).sum())
    if _ADMISSION.value != "sketch":
        wrong += early + late
    stats = table.stats()
    result = {
        "admission": _ADMISSION.value,
        "wrong": wrong,
        "early": early,
        "late": late,
        "step_ms": float(np.median(seconds)) * 1e3,
        "longest_step_ms": max(seconds[1:], default=0) * 1e3,
        "rows_created": stats["rows_created"],
        "rows_expired": stats["rows_expired"],
        "updates_refused": stats["updates_refused"],
        "growth": stats["memory_bytes"] / (early_bytes or stats["memory_bytes"]),
    }
    print(json.dumps(result))
    if _OUT.value:
        pathlib.Path(_OUT.value).write_text(json.dumps({"stream": figures, "result": result}))
    if wrong or result["growth"] > _LIMIT.value:
        raise SystemExit(1)


if __name__ == "__main__":
    app.run(main)
