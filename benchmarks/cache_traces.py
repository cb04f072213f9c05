"""A cache never costs more than none: bytes and hits on traces kind and unkind to it.

    python benchmarks/cache_traces.py --movielens=DIR --json=traces.json

Runs every trace through a cache (real ops, cache and shard in this process) for every optimizer,
staleness and size of the cache, and once without a cache. Figures are bytes up and bytes down, all
headers and the last flush included, divided by those without a cache; the hit rate, which counts
the keys whose row was there and current; and the hit rate that the LFU of before had on the same
trace (lfu_model.py). Sizes of caches are in per cent of --rows (MovieLens: of its rows).

  zipf_E       ids drawn Zipf(E) from --rows keys
  movielens    users and movies of the first ratings of MovieLens 100K as they were made, 16 a step
  once         ids that never come again, of rows that nobody has updated before
  once_known   ids that never come again, of rows that the table has
  half_once    Zipf(1.05), every second id replaced by one that never comes again

With --workers above 1 they take the steps in turn. Then some hits are stale (not counted as hits
here, nor by the model, which is of one worker and so the upper bound of each).

Exit status 1 if bytes up or down exceed --limit, or a hit rate is more than --hits below LFU's.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Iterator

import click_data
import lfu_model
import numpy as np
import one_process
from absl import app, flags
from zipf import zipf_ids

from het_tf import optimizers

_OPTIMIZERS = {"sgd": optimizers.SGD, "adagrad": optimizers.Adagrad, "adam": optimizers.Adam}
_TRACES = ("zipf_0", "zipf_0.8", "zipf_1.05", "zipf_1.3", "movielens", "once", "once_known")
_TRACES += ("half_once",)

_MOVIELENS = flags.DEFINE_string(
    "movielens", None, "data_dir of tensorflow-datasets; None: without"
)
_NAMES = flags.DEFINE_list("traces", list(_TRACES), "which")
_OPTIMIZER = flags.DEFINE_list("optimizers", list(_OPTIMIZERS), "which")
_STALENESS = flags.DEFINE_list("staleness", ["0", "10", "100", "drift"], "read and write bound")
_DRIFT = flags.DEFINE_float("drift", 0.1, "read and write bound, a length, where it is drift")
_PERCENT = flags.DEFINE_list("percent", ["1", "5", "10", "50"], "sizes of caches, of all rows")
_ROWS = flags.DEFINE_integer("rows", 50_000, "keys that ids are drawn from")
_DIM = flags.DEFINE_integer("dim", 16, "columns of a row")
_IDS = flags.DEFINE_integer("ids", 512, "ids of a step")
_STEPS = flags.DEFINE_integer("steps", 600, "steps of a trace (movielens: 3,000 at most)")
_WORKERS = flags.DEFINE_integer("workers", 1, "workers, in turn")
_JOBS = flags.DEFINE_integer("jobs", 2, "processes")
_QUICK = flags.DEFINE_bool("quick", False, "a tenth of the rows and steps, two sizes, Adagrad")
_LIMIT = flags.DEFINE_float("limit", 1.02, "largest acceptable ratio of bytes")
_HITS = flags.DEFINE_float("hits", 0.01, "largest acceptable loss of hit rate")
_JSON = flags.DEFINE_string("json", None, "file to write the figures to")

_RATE = 0.01
_RATINGS = 16  # a step
_RATING_STEPS = 3000
_ONCE = 1 << 40  # ids that never come again count from here


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of all traces."""

    rows: int
    ids: int
    steps: int
    dim: int
    workers: int
    movielens: str | None


@dataclasses.dataclass(frozen=True)
class Case:
    """One run. staleness: updates, "drift", or "none": no cache."""

    trace: str
    optimizer: str
    staleness: str
    percent: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a run measured: bytes as the caches count them, hits as a share of the keys."""

    case: Case
    bytes_up: int
    bytes_down: int
    hits: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """ids: int64 [steps, ids of a step]. rows: what a cache's size is a share of."""

    ids: np.ndarray
    rows: int
    known: bool = False  # the table has all rows from the beginning


@functools.lru_cache(maxsize=1)
def make_trace(name: str, sizes: Sizes) -> Trace:
    """The trace of that name; the same whenever it is made."""
    rng = np.random.default_rng(5)
    shape = (sizes.steps, sizes.ids)
    if name == "movielens":
        keys = click_data.movielens_in_time_order(sizes.movielens)
        steps = min(_RATING_STEPS, 5 * sizes.steps, len(keys) // _RATINGS)
        ids = keys[: steps * _RATINGS].reshape(steps, -1)
        return Trace(ids, np.unique(keys).size)
    if name in ("once", "once_known"):
        ids = np.arange(shape[0] * shape[1]).reshape(shape)
        return Trace(rng.permuted(ids) + _ONCE, sizes.rows, known=name == "once_known")
    exponent = 1.05 if name == "half_once" else float(name.removeprefix("zipf_"))
    ids = zipf_ids(rng, sizes.rows, exponent, shape)
    if name == "half_once":
        once = rng.random(shape) < 0.5
        ids[once] = _ONCE + np.arange(once.sum())
    return Trace(ids, sizes.rows)


def run(case: Case, sizes: Sizes, drift: float) -> Figures:
    """One cache, or none, on one trace."""
    one_process.single_threaded()
    trace = make_trace(case.trace, sizes)
    cached = case.staleness != "none"
    bound = drift if case.staleness == "drift" else float(case.staleness if cached else 0)
    workers = one_process.Workers(
        sizes.workers,
        sizes.dim,
        _OPTIMIZERS[case.optimizer](),
        max(1, round(trace.rows * case.percent / 100)) if cached else 0,
        clock="drift" if case.staleness == "drift" else "count",
        read_bound=bound,
        write_bound=bound,
    )
    rng = np.random.default_rng(6)
    gradients = rng.normal(0, 0.1, (trace.ids.shape[1], sizes.dim)).astype(np.float32)
    if trace.known:
        for ids in trace.ids:
            workers.apply(ids, gradients, _RATE)
    for step, ids in enumerate(trace.ids):
        worker = step % sizes.workers
        workers.lookup(worker, ids)
        workers.update(worker, gradients, _RATE)
    workers.flush()
    stats = workers.stats()
    workers.close()
    hits = (stats["hits"] - stats["stale_hits"] - stats["rows_unasked"]) / stats["keys"]
    return Figures(case, stats["bytes_up"], stats["bytes_down"], hits)


def run_trace(
    name: str, cases: list[Case], sizes: Sizes, drift: float
) -> tuple[list[Figures], dict[float, float]]:
    """All cases of a trace, and LFU's hit rate by the size of the cache in per cent."""
    figures = [run(case, sizes, drift) for case in cases]
    trace = make_trace(name, sizes)
    keys, dense = np.unique(trace.ids, return_inverse=True)
    steps = [np.unique(step) for step in dense.reshape(trace.ids.shape)]
    lfu = {
        percent: lfu_model.hit_rate(steps, keys.size, max(1, round(trace.rows * percent / 100)))
        for percent in {case.percent for case in cases if case.staleness != "none"}
    }
    return figures, lfu


def cases_of(name: str) -> Iterator[Case]:
    """As the flags ask for; without a cache first."""
    percents = [10.0, 1.0] if _QUICK.value else [float(percent) for percent in _PERCENT.value]
    for optimizer in ["adagrad"] if _QUICK.value else _OPTIMIZER.value:
        yield Case(name, optimizer, "none", 0.0)
        for staleness, percent in itertools.product(_STALENESS.value, percents):
            yield Case(name, optimizer, staleness, percent)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A cache against none."""

    case: Case
    up: float
    down: float
    hits: float
    lfu_hits: float


def compare(figures: list[Figures], lfu: dict[float, float]) -> Iterator[Comparison]:
    """Of the runs of one trace."""
    none = {each.case.optimizer: each for each in figures if each.case.staleness == "none"}
    for each in figures:
        if each.case.staleness != "none":
            yield Comparison(
                each.case,
                each.bytes_up / none[each.case.optimizer].bytes_up,
                each.bytes_down / none[each.case.optimizer].bytes_down,
                each.hits,
                lfu[each.case.percent],
            )


def main(argv: list[str]) -> None:
    del argv
    scale = 10 if _QUICK.value else 1
    sizes = Sizes(
        _ROWS.value // scale,
        _IDS.value // scale,
        _STEPS.value // (scale // 2 or 1),
        _DIM.value,
        _WORKERS.value,
        _MOVIELENS.value,
    )
    names = [name for name in _NAMES.value if name != "movielens" or _MOVIELENS.value]
    start = time.perf_counter()
    print(f"{'trace':11}{'optimizer':>10}{'staleness':>10}{'cache %':>8}", end="")
    print(f"{'up':>8}{'down':>8}{'hits':>8}{'LFU':>8}{'- LFU':>8}")
    comparisons: list[Comparison] = []
    # A cost of its own for each process: TensorFlow's threads do not survive a fork.
    with concurrent.futures.ProcessPoolExecutor(
        _JOBS.value, multiprocessing.get_context("spawn")
    ) as pool:
        futures = [
            pool.submit(run_trace, name, list(cases_of(name)), sizes, _DRIFT.value)
            for name in names
        ]
        for future in futures:
            for each in compare(*future.result()):
                comparisons.append(each)
                case = each.case
                print(
                    f"{case.trace:11}{case.optimizer:>10}{case.staleness:>10}{case.percent:8g}"
                    f"{each.up:8.3f}{each.down:8.3f}{each.hits:8.3f}{each.lfu_hits:8.3f}"
                    f"{each.hits - each.lfu_hits:8.3f}",
                    flush=True,
                )
    if _JSON.value:
        records = [dataclasses.asdict(each) for each in comparisons]
        pathlib.Path(_JSON.value).write_text(json.dumps(records, indent=1))
    up, down = max(each.up for each in comparisons), max(each.down for each in comparisons)
    loss = max(each.lfu_hits - each.hits for each in comparisons)
    print(
        f"worst of {len(comparisons)} in {time.perf_counter() - start:.0f} s: bytes up {up:.3f} and"
        f" down {down:.3f} of no cache's, hit rate {-loss:+.3f} against LFU"
    )
    if max(up, down) > _LIMIT.value or loss > _HITS.value:
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
