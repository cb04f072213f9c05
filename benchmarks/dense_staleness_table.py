"""The table of what dense_staleness_auc.py measured.

    python benchmarks/dense_staleness_table.py --json=docs/measured/dense_staleness.json

A line for every optimizer, cache and number of workers, and a column for every dense_staleness: the
mean AUC over the seeds less that of dense_staleness None without a cache (whose AUC has a column,
with the standard deviation of the seeds), and the bytes of dense variables as a share.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import auc_runs
import numpy as np


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compared. cache: as in --caches; staleness: dense_staleness."""

    optimizer: str
    learning_rate: float
    cache: str
    workers: int
    staleness: int | None


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run measured. Bytes are per example, up and down."""

    setting: Setting
    seed: int
    auc: float
    row_bytes: float
    dense_bytes: float
    seconds: float


def report(runs: Sequence[Run]) -> str:
    """A table: how far the AUC of a setting is from the one without a cache and replicas."""
    groups = auc_runs.by_setting(runs)
    compared = [setting for setting in groups if setting != _reference(setting)]
    bounds = {setting.staleness for setting in compared}
    columns = sorted(bounds, key=lambda k: -1 if k is None else k)
    table = [["optimizer", "AUC", "cache", "workers", "bytes of rows", *map(str, columns)]]
    table.append(["---"] * len(table[0]))
    lines = {dataclasses.replace(setting, staleness=None) for setting in compared}
    for line in sorted(lines, key=_order):
        reference = groups[_reference(line)]
        auc, deviation = auc_runs.mean_and_deviation([run.auc for run in reference])
        row_bytes, dense_bytes = _mean(reference, "row_bytes"), _mean(reference, "dense_bytes")
        of_columns = [groups.get(dataclasses.replace(line, staleness=k), []) for k in columns]
        rows = _mean([run for found in of_columns for run in found], "row_bytes") / row_bytes
        cells = [
            f"{_mean(found, 'auc') - auc:+.4f} ({_mean(found, 'dense_bytes') / dense_bytes:.2f})"
            if found
            else ""
            for found in of_columns
        ]
        name = f"{line.optimizer}, {line.learning_rate:g}"
        first = [name, f"{auc:.4f} ±{deviation:.4f}", line.cache, str(line.workers), f"{rows:.2f}"]
        table.append(first + cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def _reference(setting: Setting) -> Setting:
    """What a setting is compared with."""
    return dataclasses.replace(setting, cache="none", workers=1, staleness=None)


def _order(line: Setting) -> tuple[str, float, bool, str, int]:
    return line.optimizer, line.learning_rate, line.cache != "none", line.cache, line.workers


def _mean(runs: Sequence[Run], field: str) -> float:
    return float(np.mean([getattr(run, field) for run in runs]))


def read(path: str) -> list[Run]:
    return auc_runs.read([path], Run, Setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", required=True, help="file of the runs")
    print(report(read(parser.parse_args().json)))


if __name__ == "__main__":
    main()
