"""Runs of benchmarks that measure AUC: the file they are kept in, and what is said of several.

A run is a dataclass with a setting, which is a frozen dataclass, a seed and an AUC.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

Setting = TypeVar("Setting")
Run = TypeVar("Run")


def make(
    wanted: Sequence[Setting],
    seeds: int,
    path: str | None,
    read_too: Sequence[str],
    run_class: type[Run],
    train: Callable[[Setting, int], Run],
) -> list[Run]:
    """Makes the runs that are not there yet.

    Args:
      wanted: settings.
      seeds: how many of each, 1, 2, ...
      path: file of runs, written after each that is made; None: they are not kept.
      read_too: further files of runs.
      run_class: what a run is.
      train: makes the run of a setting and seed.

    Returns:
      The runs of the settings that are wanted; with `read_too`, all that are there.
    """
    setting_class = type(wanted[0])
    own = read([path], run_class, setting_class)
    others = read(read_too, run_class, setting_class)
    done = {(run.setting, run.seed) for run in [*own, *others]}
    # A seed after the other, so that an interrupted benchmark has whole curves.
    for seed, setting in itertools.product(range(1, seeds + 1), wanted):
        if (setting, seed) in done:
            continue
        own.append(train(setting, seed))
        if path:
            _write(path, own)
    return [run for run in [*own, *others] if run.setting in wanted or read_too]


def by_setting(runs: Sequence[Any]) -> dict[Any, list[Any]]:
    """The runs of each setting, in the order of the runs."""
    groups: dict[Any, list[Any]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return groups


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation, which of one value is 0."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def read(paths: Sequence[str | None], run_class: type[Run], setting_class: type[Any]) -> list[Run]:
    """The runs in those of the files that exist; of two of the same setting and seed the first."""
    runs: dict[tuple[Any, int], Any] = {}
    for path in paths:
        if path is None or not pathlib.Path(path).exists():
            continue
        for record in json.loads(pathlib.Path(path).read_text()):
            run: Any = run_class(**record | {"setting": setting_class(**record["setting"])})
            runs.setdefault((run.setting, run.seed), run)
    return list(runs.values())


def _write(path: str, runs: Sequence[Any]) -> None:
    """Replaces the file as a whole: who is interrupted loses the run under way and no other."""
    new = pathlib.Path(f"{path}.new")
    new.write_text(json.dumps([dataclasses.asdict(run) for run in runs], indent=1))
    new.replace(path)
