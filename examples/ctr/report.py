"""A meter of the trainings of demo.py, a table and a picture."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import matplotlib

matplotlib.use("Agg")  # writes files, needs no screen
import matplotlib.pyplot as plt

Stats = dict[str, int]


@dataclasses.dataclass
class Run:
    """Figures of one training. Points of the curves are one per evaluation."""

    name: str
    examples: list[int] = dataclasses.field(default_factory=list)  # trained on so far
    loss: list[float] = dataclasses.field(default_factory=list)  # training, since the last point
    auc: list[float] = dataclasses.field(default_factory=list)  # of the test ratings
    examples_per_s: float = 0.0
    stats: Stats = dataclasses.field(default_factory=dict)  # of the caches, while training

    @property
    def hit_rate(self) -> float:
        """Share of the distinct keys of a batch whose row the worker had."""
        return self.stats["hits"] / max(1, self.stats["hits"] + self.stats["misses"])


class Meter(keras.callbacks.Callback):
    """Fills a Run in during `fit`: speed and traffic of training alone, evaluation left out.

    Speed leaves the first epoch out too, in which TensorFlow traces and the workers start up.
    """

    def __init__(self, run: Run, examples_per_epoch: int, read_stats: Callable[[], Stats]):
        super().__init__()
        self.run = run
        self._examples_per_epoch = examples_per_epoch
        self._read_stats = read_stats
        self._seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._stats_before = self._read_stats()
        self._began = time.perf_counter()

    def on_test_begin(self, logs: Any = None) -> None:
        self._seconds.append(time.perf_counter() - self._began)
        for name, value in self._read_stats().items():
            change = value - self._stats_before.get(name, 0)
            self.run.stats[name] = self.run.stats.get(name, 0) + change

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.run.examples.append((epoch + 1) * self._examples_per_epoch)
        self.run.loss.append(logs["loss"])
        self.run.auc.append(logs["val_auc"])
        measured = self._seconds[1:] or self._seconds
        self.run.examples_per_s = self._examples_per_epoch * len(measured) / sum(measured)


def cells(baseline: Run, run: Run) -> list[tuple[str, str, str, str]]:
    """Both runs side by side, and how many times better the second one is."""
    rows = [("", baseline.name, run.name, "gain")]

    def row(label: str, figure: Callable[[Run], Any], form: str, ratio: float | None = None):
        note = "" if ratio is None else f"{ratio:.1f}x"
        rows.append((label, form.format(figure(baseline)), form.format(figure(run)), note))

    def traffic(label: str, name: str, unit: float, form: str):
        less = baseline.stats[name] / max(1, run.stats[name])
        row(label, lambda each: each.stats[name] / unit, form, less)

    row("AUC (test)", lambda each: each.auc[-1], "{:.4f}")
    speedup = run.examples_per_s / baseline.examples_per_s
    row("examples/s", lambda each: each.examples_per_s, "{:,.0f}", speedup)
    row("hit rate of keys", lambda each: 100 * each.hit_rate, "{:.1f} %")
    traffic("MB of rows up", "bytes_up", 1e6, "{:,.1f}")
    traffic("MB of rows down", "bytes_down", 1e6, "{:,.1f}")
    traffic("messages", "messages", 1, "{:,.0f}")
    return rows


def table(baseline: Run, run: Run) -> str:
    """The same as text."""
    rows = cells(baseline, run)
    widths = [max(len(line[i]) for line in rows) for i in range(4)]
    lines = [
        "  ".join([line[0].ljust(widths[0])] + [line[i].rjust(widths[i]) for i in (1, 2, 3)])
        for line in rows
    ]
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1:]])


def on_a_network(baseline: Run, run: Run, workers: int) -> str:
    """Says why the bytes of the table do not show in its times, and where they do."""
    times = []
    for each in (baseline, run):
        moved = each.stats["bytes_up"] + each.stats["bytes_down"]
        times.append(f"{moved / workers * 8 / 1e9:.1f} s with {each.name}")
    return (
        "All tasks ran on this machine, where a byte between processes costs next to nothing. Over"
        f"\nlinks of 1 Gbit/s these would take each worker {' and '.join(times)}, at 100"
        " Mbit/s\nten times as long: benchmarks/netns_cluster.py measures that."
    )


def save(runs: Sequence[Run], path: pathlib.Path) -> None:
    """Writes the figures as JSON."""
    path.write_text(json.dumps([dataclasses.asdict(run) for run in runs], indent=1))


def plot(runs: Sequence[Run], path: str, title: str) -> None:
    """Writes the curves of test AUC and training loss over examples as a PNG."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for run, style in zip(runs, ("o--", "o-"), strict=True):
        panels[0].plot(run.examples, run.auc, style, label=run.name, alpha=0.8)
        panels[1].plot(run.examples, run.loss, style, label=run.name, alpha=0.8)
    for panel, label in zip(panels, ("AUC (test)", "loss (training)"), strict=True):
        panel.set_xlabel("examples")
        panel.set_ylabel(label)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
