"""Test AUC against bytes per example: what staleness saves, and what it costs.

    python benchmarks/staleness_auc.py --json=auc.json --plot=auc.png \\
        --movielens_100k=DIR --movielens_1m=DIR

Trains a factorization machine (factorization_machine.py) with row-wise Adagrad for every data set,
number of workers, clock rule, bound and seed, and without a cache. The workers take their steps in
turn, in this process and on the real ops; each has its own cache, which holds every row, so that
bounds alone decide what is sent. Test AUC is of the table after the last flush; bytes are all
messages up and down as the caches count them, the last flush included, divided by the training
examples. Everything but the setting under test is the same in the runs of a seed: order of the
examples, initial rows.

--split says what a bound of the list is:
  total  of what a read may miss in all: read_bound is half of it, write_bound the other half,
         divided by the other workers
  each   read_bound and write_bound, both

Every run is appended to --json when it ends, and a run that is there already is not made again: cut
the work into parts by the flags, run them at the same time with a file each, and --read them all.

At the end, for every data set and number of workers:
  - bytes that drift needs / bytes that count needs at equal mean AUC, on straight lines (in the
    logarithm of the bytes) through the settings that no other of the rule beats in both;
  - the setting with the fewest bytes among those whose mean AUC is not further than one standard
    deviation (of no cache's, over the seeds) below no cache's mean.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import auc_runs
import click_data
import factorization_machine as fm
import numpy as np
import one_process
from absl import app, flags

from het_tf import optimizers

_MOVIELENS_100K = flags.DEFINE_string(
    "movielens_100k", None, "data_dir of tensorflow-datasets with movielens/100k-ratings"
)
_MOVIELENS_1M = flags.DEFINE_string(
    "movielens_1m", None, "folder with train.csv.gz and test.csv.gz of the implicit 1M set"
)
_DATASETS = flags.DEFINE_list("datasets", ["100k", "1m"], "of 100k, 1m")
_WORKERS = flags.DEFINE_list("workers", ["2", "4"], "numbers of workers")
_CLOCKS = flags.DEFINE_list("clocks", ["count", "lamport", "drift"], "clock rules")
_COUNT = flags.DEFINE_list("count_bounds", ["4", "8", "16", "32", "64", "128"], "in updates")
_LAMPORT = flags.DEFINE_list("lamport_bounds", ["4", "8", "16", "32", "64", "128"], "in updates")
_DRIFT = flags.DEFINE_list("drift_bounds", [".1", ".25", ".5", "1", "2", "4"], "in length")
_SPLIT = flags.DEFINE_enum("split", "total", ["total", "each"], "what a bound is (see above)")
_SEEDS = flags.DEFINE_integer("seeds", 5, "runs of every setting, with seeds 1, 2, ...")
_DIM = flags.DEFINE_integer("dim", 16, "factors of a row")
_RATE = flags.DEFINE_float("learning_rate", 0.1, "of row-wise Adagrad")
_BATCH = flags.DEFINE_list("batch", ["128", "1024"], "examples of a step, 100k and 1m")
_EPOCHS = flags.DEFINE_list("epochs", ["2", "1"], "passes over the data, 100k and 1m")
_EXAMPLES = flags.DEFINE_integer("examples", None, "train on that many only")
_JSON = flags.DEFINE_string("json", None, "file of the runs, appended to")
_READ = flags.DEFINE_list("read", [], "further files of runs, read only")
_PLOT = flags.DEFINE_string("plot", None, "file to draw the curves to")

_ALL_ROWS = 1_000_000  # more than either data set has
_ACCUMULATOR = 1e-4  # initial; gradients are those of a mean over a batch
_LOSSES = (0.0005, 0.001, 0.002, 0.004)  # of AUC, at which rules are compared


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compared. clock is "none" without a cache, bound then 0."""

    dataset: str
    workers: int
    clock: str
    bound: float
    split: str

    def bounds(self) -> tuple[float, float]:
        """(read_bound, write_bound)."""
        if self.split == "each":
            return self.bound, self.bound
        others = max(1, self.workers - 1)
        write = self.bound / 2 / others
        if self.clock != "drift":
            write = float(int(write))
        return self.bound - write * others, write


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run measured."""

    setting: Setting
    seed: int
    auc: float
    bytes_up: float  # per example
    bytes_down: float
    seconds: float

    @property
    def bytes(self) -> float:
        return self.bytes_up + self.bytes_down


def train(setting: Setting, seed: int, data: click_data.Clicks, batch: int, epochs: int) -> Run:
    """One run: the workers' steps in turn."""
    start = time.perf_counter()
    read_bound, write_bound = setting.bounds()
    cached = setting.clock != "none"
    workers = one_process.Workers(
        setting.workers,
        1 + _DIM.value,
        optimizers.RowWiseAdagrad(initial_accumulator_value=_ACCUMULATOR),
        _ALL_ROWS if cached else 0,
        clock=setting.clock if cached else "count",
        read_bound=read_bound,
        write_bound=write_bound,
        seed=seed,
    )
    rng = np.random.default_rng(seed)
    keys, labels = data.train_keys, data.train_labels
    trained = 0
    turn = itertools.cycle(range(setting.workers))
    for _ in range(epochs):
        order = rng.permutation(len(labels))[: _EXAMPLES.value]
        for first in range(0, len(order) - batch + 1, batch):
            chosen = order[first : first + batch]
            worker = next(turn)
            present = keys[chosen] != click_data.PAD
            rows = np.zeros((*present.shape, workers.dim), np.float32)
            rows[present] = workers.lookup(worker, keys[chosen][present])
            gradients = fm.gradients(rows, labels[chosen])[present]
            workers.update(worker, gradients, _RATE.value)
            trained += batch
    workers.flush()
    stats = workers.stats()
    auc = fm.area_under_curve(_test_logits(workers, data.test_keys), data.test_labels)
    workers.close()
    return Run(
        setting,
        seed,
        auc,
        stats["bytes_up"] / trained,
        stats["bytes_down"] / trained,
        time.perf_counter() - start,
    )


def _test_logits(workers: one_process.Workers, keys: np.ndarray) -> np.ndarray:
    present = keys != click_data.PAD
    rows = np.zeros((*present.shape, workers.dim), np.float32)
    rows[present] = workers.table_rows(keys[present])
    return fm.logits(rows)


def settings() -> Iterator[Setting]:
    """As the flags ask for."""
    bounds = {"count": _COUNT.value, "lamport": _LAMPORT.value, "drift": _DRIFT.value}
    for dataset, workers in itertools.product(_DATASETS.value, map(int, _WORKERS.value)):
        yield Setting(dataset, workers, "none", 0.0, _SPLIT.value)
        for clock in _CLOCKS.value:
            for bound in bounds[clock]:
                yield Setting(dataset, workers, clock, float(bound), _SPLIT.value)


@dataclasses.dataclass(frozen=True)
class Point:
    """The runs of a setting."""

    setting: Setting
    auc: float
    deviation: float
    bytes: float
    seeds: int


def points(runs: Sequence[Run]) -> list[Point]:
    """One a setting, in the order of the runs."""
    result = []
    for setting, group in auc_runs.by_setting(runs).items():
        auc, deviation = auc_runs.mean_and_deviation([run.auc for run in group])
        mean_bytes = float(np.mean([run.bytes for run in group]))
        result.append(Point(setting, auc, deviation, mean_bytes, len(group)))
    return result


def bytes_at(curve: Sequence[Point], auc: float) -> float | None:
    """Bytes with which a rule reaches an AUC. None: it never does, or always does."""
    best: list[Point] = []
    for point in sorted(curve, key=lambda point: point.bytes):
        if not best or point.auc > best[-1].auc:
            best.append(point)
    if not best or not best[0].auc <= auc <= best[-1].auc:
        return None
    aucs = [point.auc for point in best]
    return float(np.exp(np.interp(auc, aucs, np.log([point.bytes for point in best]))))


def cheapest(group: Sequence[Point], none: Point) -> Point:
    """The fewest bytes among the settings whose AUC is within a deviation of no cache's."""
    good = [point for point in group if point.auc >= none.auc - none.deviation]
    return min(good, key=lambda point: point.bytes, default=none)


def report(group: Sequence[Point], none: Point) -> None:
    """Prints the table of a data set and number of workers, and what follows from it."""
    print(
        f"\n{none.setting.dataset}, {none.setting.workers} workers, {none.seeds} seeds;"
        f" no cache: AUC {none.auc:.4f} (sd {none.deviation:.4f}), {none.bytes:.0f} bytes/example"
    )
    print(f"{'clock':8}{'bound':>8}{'AUC':>9}{'sd':>8}{'- none':>9}{'bytes':>8}{'/ none':>8}")
    for point in group:
        print(
            f"{point.setting.clock:8}{point.setting.bound:8g}{point.auc:9.4f}{point.deviation:8.4f}"
            f"{point.auc - none.auc:9.4f}{point.bytes:8.1f}{point.bytes / none.bytes:8.3f}"
        )
    curves = {
        clock: [point for point in group if point.setting.clock == clock]
        for clock in ("count", "drift")
    }
    for loss in (none.deviation, *_LOSSES):
        count, drift = (bytes_at(curves[clock], none.auc - loss) for clock in ("count", "drift"))
        if count is not None and drift is not None:
            print(
                f"AUC {none.auc - loss:.4f} ({-loss:.4f}): drift {drift:.1f}, count {count:.1f}"
                f" bytes/example, ratio {drift / count:.2f}"
            )
    best = cheapest(group, none).setting
    print(f"fewest bytes within one sd of no cache: {best.clock} {best.bound:g}")


def report_all(runs: Sequence[Run]) -> None:
    """Prints all tables, and the settings that are good in every one of them."""
    good_everywhere: dict[tuple[str, float], list[float]] = {}
    cells = 0
    for _, group, none in _cells(points(runs)):
        report(group, none)
        cells += 1
        for point in group:
            if point.auc >= none.auc - none.deviation:
                key = (point.setting.clock, point.setting.bound)
                good_everywhere.setdefault(key, []).append(point.bytes / none.bytes)
    ratios = {
        key: float(np.exp(np.mean(np.log(ratios))))
        for key, ratios in good_everywhere.items()
        if len(ratios) == cells
    }
    print(
        f"\nwithin one sd of no cache in all {cells} tables; bytes / no cache's (geometric mean):"
    )
    for (clock, bound), ratio in sorted(ratios.items(), key=lambda item: item[1]):
        print(f"{clock:8}{bound:8g}{ratio:8.3f}")
    if not ratios:
        print("none")


def _cells(all_points: Sequence[Point]) -> Iterator[tuple[str, list[Point], Point]]:
    names: dict[str, list[Point]] = {}
    for point in all_points:
        setting = point.setting
        name = f"{setting.dataset}, {setting.workers} workers, bounds {setting.split}"
        names.setdefault(name, []).append(point)
    for name, members in names.items():
        nones = [point for point in members if point.setting.clock == "none"]
        if nones:
            yield name, [point for point in members if point.setting.clock != "none"], nones[0]


def plot(path: str, runs: Sequence[Run]) -> None:
    """A panel for each data set and number of workers."""
    import matplotlib
    import matplotlib.ticker

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = list(_cells(points(runs)))
    rows, columns = -(-len(cells) // 2), min(len(cells), 2)
    figure, panels = plt.subplots(
        rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False, layout="constrained"
    )
    for panel, (name, group, none) in zip(panels.flat, cells, strict=False):
        panel.axhspan(none.auc - none.deviation, none.auc + none.deviation, color="0.9")
        panel.plot(none.bytes, none.auc, "k*", label="no cache")
        for clock in ("count", "lamport", "drift"):
            curve = sorted(
                (point for point in group if point.setting.clock == clock),
                key=lambda point: point.bytes,
            )
            panel.errorbar(
                [point.bytes for point in curve],
                [point.auc for point in curve],
                [point.deviation for point in curve],
                marker=".",
                label=clock,
            )
        panel.set(title=name, xlabel="bytes per example, up and down", xscale="log")
        panel.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        panel.set_xticks([10, 20, 50, 100, 200, 500], [10, 20, 50, 100, 200, 500])
        panel.set_ylim(none.auc - 0.015, none.auc + 0.004)
        panel.set_ylabel("test AUC")
        panel.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    del argv
    one_process.single_threaded()
    loaders: dict[str, Callable[[], click_data.Clicks]] = {
        "100k": lambda: click_data.movielens_100k(_MOVIELENS_100K.value),
        "1m": lambda: click_data.movielens_1m(_MOVIELENS_1M.value),
    }
    sizes = dict(
        zip(loaders, zip(map(int, _BATCH.value), map(int, _EPOCHS.value), strict=True), strict=True)
    )
    data: dict[str, click_data.Clicks] = {}

    def train_and_say(setting: Setting, seed: int) -> Run:
        dataset = setting.dataset
        if dataset not in data:
            data[dataset] = loaders[dataset]()
        run = train(setting, seed, data[dataset], *sizes[dataset])
        print(
            f"{dataset} {setting.workers} workers {setting.clock} {setting.bound:g}"
            f" seed {seed}: AUC {run.auc:.4f}, {run.bytes:.1f} bytes/example, {run.seconds:.1f} s",
            flush=True,
        )
        return run

    runs = auc_runs.make(
        list(settings()), _SEEDS.value, _JSON.value, _READ.value, Run, train_and_say
    )
    report_all(runs)
    if _PLOT.value:
        plot(_PLOT.value, runs)


if __name__ == "__main__":
    app.run(main)
