"""What a cached row costs in memory, and how long a full cache may hold up a step.

    python benchmarks/cache_memory.py --json=memory.json

Memory: a cache of --rows rows (row-wise Adagrad) is filled with rows that nobody has updated, so
that the table stays empty and all that the process grows by is the cache's: the lines (clean), then
one update of each that is not sent (dirty). Bytes a row include the index and all that growing
leaves behind; the yardstick is value and slots, float32.

Pauses: a cache of --cached rows is filled, then --steps steps look up and update --ids rows each,
half of them cached and half new, so that every step evicts (LRU admits every row). The longest step
is compared with the median step, in CPU time of the process, which other programs on the machine do
not lengthen, and by the clock. So is a flush when one step's lines are dirty, which need not look
at the others.

Exit status 1 if clean or dirty bytes exceed their limits, or the longest step its.
"""

from __future__ import annotations

import ctypes
import json
import pathlib
import sys
import time

import numpy as np
import one_process
from absl import app, flags
from process_memory import resident_bytes

from het_tf import optimizers

_ROWS = flags.DEFINE_integer("memory_rows", 1_000_000, "rows whose memory is measured")
_DIM = flags.DEFINE_integer("memory_dim", 64, "columns of those")
_CACHED = flags.DEFINE_integer("cached", 10_000_000, "rows cached while steps are timed; 0: none")
_CACHED_DIM = flags.DEFINE_integer("cached_dim", 8, "columns of those")
_STEPS = flags.DEFINE_integer("timed_steps", 3000, "steps that are timed")
_IDS = flags.DEFINE_integer("ids", 2048, "ids of a timed step")
_FILL = flags.DEFINE_integer("fill", 65_536, "ids of a step that fills a cache")
_CLEAN_LIMIT = flags.DEFINE_float("clean_limit", 1e9, "largest acceptable bytes of a clean row")
_DIRTY_LIMIT = flags.DEFINE_float("dirty_limit", 1e9, "largest acceptable bytes of a dirty row")
_PAUSE_LIMIT = flags.DEFINE_float("pause_limit", 1e9, "longest acceptable step / median, CPU time")
_JSON = flags.DEFINE_string("json", None, "file to write the figures to")

_RATE = 0.01


def resident() -> int:
    """Bytes of the process, without what the allocator keeps for later."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident_bytes()


def new_cache(rows: int, dim: int) -> one_process.Workers:
    """One worker whose cache sends nothing until it must."""
    return one_process.Workers(1, dim, optimizers.RowWiseAdagrad(), rows, policy="lru")


def touch(workers: one_process.Workers, first: int, last: int, *, update: bool) -> None:
    """Looks up the keys of [first, last) in steps, and updates them."""
    for start in range(first, last, _FILL.value):
        ids = np.arange(start, min(start + _FILL.value, last))
        workers.lookup(0, ids)
        if update:
            workers.update(0, np.ones((ids.size, workers.dim), np.float32), _RATE)


def memory() -> dict[str, float]:
    """Bytes a row."""
    rows, dim = _ROWS.value, _DIM.value
    warm_up = new_cache(_FILL.value, dim)
    touch(warm_up, 0, _FILL.value, update=True)
    warm_up.close()
    workers = new_cache(rows, dim)
    before = resident()
    touch(workers, 0, rows, update=False)
    clean = resident() - before
    touch(workers, 0, rows, update=True)
    dirty = resident() - before
    cached = workers.stats()["rows"]
    workers.close()
    if cached != rows:
        raise RuntimeError(f"{cached} rows are cached, not {rows}")
    return {"clean": clean / rows, "dirty": dirty / rows, "payload": 4.0 * (dim + 1)}


def pauses() -> dict[str, float]:
    """Milliseconds of steps on a full cache."""
    rows, ids = _CACHED.value, _IDS.value
    workers = new_cache(rows, _CACHED_DIM.value)
    touch(workers, 0, rows, update=False)
    gradients = np.ones((ids, workers.dim), np.float32)
    rng = np.random.default_rng(1)
    cpu, clock = np.empty(_STEPS.value), np.empty(_STEPS.value)
    evictions = workers.stats()["evictions"]
    for step in range(_STEPS.value):
        new = rows + step * ids + np.arange(ids // 2)
        step_ids = np.concatenate([new, rng.integers(0, rows, ids - new.size)])
        clock_start, cpu_start = time.perf_counter(), time.process_time()
        workers.lookup(0, step_ids)
        workers.update(0, gradients, _RATE)
        cpu[step] = time.process_time() - cpu_start
        clock[step] = time.perf_counter() - clock_start
    evictions = workers.stats()["evictions"] - evictions
    workers.flush()  # of millions of rows; the one after it frees their memory
    for _ in range(2):
        workers.lookup(0, step_ids)
        workers.update(0, gradients, _RATE)
        flush_start = time.process_time()
        workers.flush()
        flush = time.process_time() - flush_start
    workers.close()
    return {
        "evictions": evictions / _STEPS.value,
        "median_cpu_ms": 1e3 * float(np.median(cpu)),
        "longest_cpu_ms": 1e3 * float(cpu.max()),
        "median_ms": 1e3 * float(np.median(clock)),
        "longest_ms": 1e3 * float(clock.max()),
        "flush_cpu_ms": 1e3 * flush,
    }


def main(argv: list[str]) -> None:
    del argv
    one_process.single_threaded()
    figures = memory()
    payload = figures["payload"]
    print(f"{_ROWS.value} rows, dim {_DIM.value}, value and slots {payload:.0f} bytes")
    for kind in ("clean", "dirty"):
        print(f"{kind}: {figures[kind]:.0f} bytes a row, {figures[kind] / payload:.2f}")
    failed = figures["clean"] > _CLEAN_LIMIT.value or figures["dirty"] > _DIRTY_LIMIT.value
    if _CACHED.value:
        figures |= pauses()
        print(
            f"{_CACHED.value} cached rows, dim {_CACHED_DIM.value}, {_STEPS.value} steps of"
            f" {_IDS.value} ids, {figures['evictions']:.0f} evictions a step"
        )
        for kind, suffix in (("CPU time", "cpu_ms"), ("clock", "ms")):
            median, longest = figures[f"median_{suffix}"], figures[f"longest_{suffix}"]
            print(
                f"{kind}: median step {median:.2f} ms, longest {longest:.2f} ms,"
                f" {longest / median:.1f} medians"
            )
        median = figures["median_cpu_ms"]
        print(f"flush of one step's rows: {figures['flush_cpu_ms'] / median:.1f} medians, CPU time")
        failed = failed or figures["longest_cpu_ms"] > _PAUSE_LIMIT.value * median
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(figures, indent=1))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
