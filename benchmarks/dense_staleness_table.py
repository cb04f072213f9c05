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
    lines: dict[Setting, dict[int | None, str]] = {}
    bounds: set[int | None] = set()
    for setting in sorted(groups, key=_order):
        reference = dataclasses.replace(setting, cache="none", workers=1, staleness=None)
        if reference not in groups or setting == reference:
            continue
        auc = np.mean([run.auc for run in groups[setting]])
        dense = np.mean([run.dense_bytes for run in groups[setting]])
        of_reference = groups[reference]
        difference = auc - np.mean([run.auc for run in of_reference])
        share = dense / np.mean([run.dense_bytes for run in of_reference])
        line = lines.setdefault(_line(setting), {})
        line[setting.staleness] = f"{difference:+.4f} ({share:.2f})"
        bounds.add(setting.staleness)
    columns = sorted(bounds, key=lambda bound: -1 if bound is None else bound)
    table = [["optimizer", "AUC", "cache", "workers", "bytes of rows", *map(str, columns)]]
    table.append(["---"] * len(table[0]))
    for setting, line in lines.items():
        reference = dataclasses.replace(setting, cache="none", workers=1)
        best, deviation = auc_runs.mean_and_deviation([run.auc for run in groups[reference]])
        rows = np.mean([run.row_bytes for run in runs if _line(run.setting) == setting])
        rows /= np.mean([run.row_bytes for run in groups[reference]])
        table.append(
            [
                f"{setting.optimizer}, {setting.learning_rate:g}",
                f"{best:.4f} ±{deviation:.4f}",
                *(setting.cache, str(setting.workers), f"{rows:.2f}"),
                *(line.get(bound, "") for bound in columns),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in table)


def _line(setting: Setting) -> Setting:
    """The setting's line of the table."""
    return dataclasses.replace(setting, staleness=None)


def read(path: str) -> list[Run]:
    return auc_runs.read([path], Run, Setting)


def _order(setting: Setting) -> tuple[object, ...]:
    staleness = -1 if setting.staleness is None else setting.staleness
    cached = setting.cache != "none"
    return (
        setting.optimizer,
        setting.learning_rate,
        cached,
        setting.cache,
        setting.workers,
        staleness,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", required=True, help="file of the runs")
    print(report(read(parser.parse_args().json)))


if __name__ == "__main__":
    main()
