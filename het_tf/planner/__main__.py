"""Prints what clusters of several sizes would do, without a cluster.

    python -m het_tf.planner --statistics=clicks.npz --dim=64 --batch_size=1024 --step_ms=20 \
        --workers=8 --servers=1..64

`het_tf.planner.statistics` makes the statistics. Every line is one cluster.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Sequence

from absl import app, flags

from het_tf.planner.calibration import calibrate
from het_tf.planner.cost import Calibration
from het_tf.planner.plan import Planner
from het_tf.planner.report import table_text
from het_tf.planner.statistics import Statistics
from het_tf.planner.tables import EmbeddingConfig
from het_tf.planner.topology import Topology
from het_tf.runtime.quantities import bytes_text

_STATISTICS = flags.DEFINE_string("statistics", None, "file of het_tf.planner.Statistics.save")
_DIM = flags.DEFINE_list("dim", [], "columns of a row: a number, or table:number for each table")
_OPTIMIZER = flags.DEFINE_string("optimizer", "adagrad", "of the rows, as Keras names it")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "examples of a step of one worker")
_STEP_MS = flags.DEFINE_float(
    "step_ms", None, "CPU time of a step of one worker without messages, in ms"
)
_WORKERS = flags.DEFINE_string("workers", "8", "number, list such as 4,8, or range such as 1..64")
_SERVERS = flags.DEFINE_string("servers", "1..64", "the same, parameter servers")
_BANDWIDTH = flags.DEFINE_string("bandwidth", "10Gbit", "of every host, or none")
_WORKER_MEMORY = flags.DEFINE_string("worker_memory", "8GB", "for the caches of a worker")
_SERVER_MEMORY = flags.DEFINE_string("server_memory", "32GB", "for the rows of a server")
_DENSE_PARAMETERS = flags.DEFINE_integer("dense_parameters", 0, "of the model")
_STEPS_PER_EPOCH = flags.DEFINE_integer("steps_per_epoch", None, "of a worker; None: many")
_CALIBRATION = flags.DEFINE_string(
    "calibration", None, "file with what messages cost; it is measured and written if missing"
)
_REPORT = flags.DEFINE_bool("report", False, "print the whole report of every cluster")

_ENOUGH = 1.05  # times as fast; more servers help less than that


def sizes(flag: str, text: str) -> list[int]:
    """Returns the numbers of a flag. A range has the powers of two between its ends, and its ends.

    Raises:
      ValueError: the text is none of the forms.
    """
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if ends:
        first, last = int(ends[1]), int(ends[2])
        if 0 < first <= last:
            powers = [2**p for p in range(last.bit_length()) if first <= 2**p <= last]
            return sorted({first, last, *powers})
    elif re.fullmatch(r"\d+(,\d+)*", text):
        numbers = [int(number) for number in text.split(",")]
        if all(numbers):
            return numbers
    raise ValueError(f"--{flag}={text} is no number, list such as 4,8 or range such as 1..64")


def configs(statistics: Statistics, dims: Sequence[str], optimizer: str) -> list[EmbeddingConfig]:
    """Returns the configs of all tables of the statistics.

    Raises:
      ValueError: a table has no number of columns.
    """
    by_table = dict(each.rpartition(":")[::2] for each in dims)
    unknown = by_table.keys() - statistics.tables.keys() - {""}
    if unknown:
        known = [*statistics.tables]
        raise ValueError(f"--dim names {sorted(unknown)}, but the tables are {known}")
    result = []
    for name in statistics.tables:
        dim = by_table.get(name, by_table.get("", ""))
        if not dim.isdecimal():
            raise ValueError(f"--dim has no number of columns for the table {name}: {dims}")
        result.append(EmbeddingConfig(name, int(dim), optimizer))
    return result


def calibration(path: str | None) -> Calibration | None:
    """Returns the calibration of a file, which is measured and written if there is none."""
    if path is None:
        return None
    file = pathlib.Path(path)
    if not file.exists():
        file.write_text(json.dumps(dataclasses.asdict(calibrate()), indent=1))
    try:
        return Calibration(**json.loads(file.read_text()))
    except TypeError as error:
        raise ValueError(f"--calibration={path} has no calibration: {error}") from error


def lines(planner: Planner, topologies: Sequence[Topology]) -> list[tuple[str, ...]]:
    """Returns a line of the table for each topology."""
    result: list[tuple[str, ...]] = []
    best: dict[int, float] = {}  # by number of workers
    for topology in topologies:
        size = str(topology.workers), str(topology.servers)
        try:
            plan = planner.plan(topology)
        except ValueError as error:  # It does not fit, or there are too few batches.
            result.append((*size, "", "", "", "", "", str(error)))
            continue
        if _REPORT.value:
            print(plan.report(), end="\n\n")
        busiest = max(up + down for up, down in zip(plan.bytes_up, plan.bytes_down, strict=True))
        before = best.get(topology.workers, 0.0)
        best[topology.workers] = max(before, plan.examples_per_second)
        result.append(
            (
                *size,
                f"{plan.examples_per_second:,.0f}",
                f"{1000 * plan.step_seconds:.2f}",
                plan.bound,
                bytes_text(max(plan.server_bytes)),
                f"{topology.workers * busiest / plan.step_seconds / 1e6:,.0f}",
                "" if plan.examples_per_second > _ENOUGH * before else "no faster",
            )
        )
    return result


def main(argv: list[str]) -> int:
    """Prints the table."""
    del argv
    try:
        for flag in ("statistics", "batch_size", "step_ms"):
            if flags.FLAGS[flag].value is None:
                raise ValueError(f"--{flag} is missing; --help lists the flags")
        statistics = Statistics.load(_STATISTICS.value)
        planner = Planner(
            configs(statistics, _DIM.value, _OPTIMIZER.value),
            statistics,
            _BATCH_SIZE.value,
            step_seconds=_STEP_MS.value / 1000,
            steps_per_epoch=_STEPS_PER_EPOCH.value,
            dense_parameters=_DENSE_PARAMETERS.value,
            calibration=calibration(_CALIBRATION.value),
        )
        topologies = [
            Topology(
                workers,
                servers,
                _WORKER_MEMORY.value,
                _SERVER_MEMORY.value,
                None if _BANDWIDTH.value == "none" else _BANDWIDTH.value,
            )
            for workers in sizes("workers", _WORKERS.value)
            for servers in sizes("servers", _SERVERS.value)
        ]
        print(statistics, end="\n\n")
        head = ("workers", "servers", "examples/s", "ms/step", "bound by", "rows of a server")
        print(table_text((*head, "MB/s, busiest", ""), lines(planner, topologies)))
    except (ValueError, OSError) as error:
        print(f"het_tf.planner: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    app.run(main)
