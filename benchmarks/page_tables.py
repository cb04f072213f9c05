"""The tables that docs/ has of what the other programs of this folder measured.

    python benchmarks/page_tables.py --json=docs/measured/cluster_bytes.json

The name of the file says which program measured: what it writes with --json or --out, or prints. A
comment above a table of docs/ is the command that prints the table, and a test compares the two.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import auc_runs
import numpy as np
from netns import runs as netns_runs
from netns.runs import TF_KERAS

Lines = list[list[str]]  # the first one has the headings


def _lines(headings: list[str], rows: Iterable[Iterable[Any]]) -> Lines:
    return [headings, *([str(cell) for cell in row] for row in rows)]


def cache_memory(found: Mapping[str, float]) -> Lines:
    pause = found["longest_cpu_ms"] / found["median_cpu_ms"]
    rows = {
        "bytes of a cached row, no update waits": f"{found['clean']:,.0f}",
        "bytes of a cached row, one update waits": f"{found['dirty']:,.0f}",
        "longest step in medians, 10 million cached rows": f"{pause:.1f}",
    }
    return _lines(["", ""], rows.items())


def table_memory(found: Mapping[str, int]) -> Lines:
    payload, own, peak = found.values()
    rows = {"values and slots": payload, "with keys and index": own, "peak while it grew": peak}
    return _lines(
        ["", "MB", "times values and slots"],
        ((name, f"{size / 1e6:,.0f}", f"{size / payload:.2f}") for name, size in rows.items()),
    )


def cluster_bytes(found: list[Mapping[str, Any]]) -> Lines:
    *runs, _ = found  # the last one sends nothing
    totals = [run["up"] + run["down"] for run in runs]
    return _lines(
        ["", "up, kB", "down, kB", "saved"],
        (
            (
                run["mode"].replace("s=", "staleness "),
                f"{run['up'] / 1000:,.0f}",
                f"{run['down'] / 1000:,.0f}",
                f"{1 - total / totals[0]:.0%}",
            )
            for run, total in zip(runs, totals, strict=True)
        ),
    )


def local_step(found: list[Mapping[str, Any]]) -> Lines:
    def cells(parts: Mapping[str, list[float]], part: str) -> list[str]:
        return [f"{figure:.2f}" for figure in parts[part]] if part in parts else ["", ""]

    headings = ["threads", "program", "one call, ms", "ratio", "in a loop, ms", "ratio of that"]
    return _lines(
        headings,
        (
            (case["threads"], program, *cells(parts, "step"), *cells(parts, "loop"))
            for case in found
            for program, parts in case["medians"].items()
        ),
    )


def pooled_step(found: list[Mapping[str, Any]]) -> Lines:
    return _lines(
        ["", "het_tf, ms", "ratio to TensorFlow's op", "ratio to the op on unique ids"],
        (
            (
                case["case"],
                f"{case['ms']['het_tf']:.2f}",
                f"{case['ratio']['TensorFlow']:.2f}",
                f"{case['ratio']['unique']:.2f}",
            )
            for case in found
        ),
    )


def feature_step(found: Mapping[str, Mapping[str, Any]]) -> Lines:
    names = {
        "steps": "`tf.function` for each step",
        "fit": "`fit`, one process",
        "cluster": "`fit`, cluster",
    }
    compared = {
        "`concatenate=True`, ratio to one input": "collection / concatenated",
        "`concatenate=True`, ratio to stacked inputs": "collection / stacked",
        "joined rows, ratio to one input": "apart / concatenated",
        "joined rows, ratio to stacked inputs": "apart / joined",
    }
    return _lines(
        ["", *compared],
        (
            (name, *(f"{found[run]['ratios'][key]:.2f}" for key in compared.values()))
            for run, name in names.items()
        ),
    )


def expiry(found: Mapping[str, Any]) -> Lines:
    points = [found["stream"][0], found["stream"][-1]]
    return _lines(
        ["ids so far", "rows", "table, MB", "process, MB"],
        (
            (
                f"{point['ids']:,}",
                f"{point['rows']:,}",
                f"{point['table_mb']:.1f}",
                f"{point['resident_mb']:,.0f}",
            )
            for point in points
        ),
    )


def sweep(found: list[Mapping[str, Any]]) -> Lines:
    return _lines(
        ["steps", "sweep, s", "median step, ms", "longest step, ms"],
        (
            (
                run["steps"],
                f"{run['seconds']:.2f}" if "seconds" in run else "",
                f"{run['median_ms']:.2f}",
                f"{run['longest_ms']:.1f}",
            )
            for run in found
        ),
    )


def _growth(found: Mapping[str, float], key: str) -> list[str]:
    sizes = [found[f"{key}: {process} MB"] for process in ("server", "coordinator")]
    return [f"{max(0, size):.0f}" for size in sizes]


def checkpoint(found: Mapping[str, float]) -> Lines:
    rows = {
        "written and synced": ("save", "save / dd throughput"),
        "written while a worker trains": ("save while training", None),
        "restored": ("restore", "restore / dd throughput"),
    }
    return _lines(
        ["", "s", "throughput, ratio to `dd`", "server, MB", "training program, MB"],
        (
            (
                name,
                f"{found[f'{key} s']:.1f}",
                f"{found[ratio]:.2f}" if ratio else "",
                *_growth(found, key),
            )
            for name, (key, ratio) in rows.items()
        ),
    )


def checkpoint_chain(found: Mapping[str, float]) -> Lines:
    rows = {"all rows": "save all", "1 % of the rows": "save 1 %", "both restored": "restore both"}
    sizes = {"save all": found["all MB"]}
    sizes["save 1 %"] = sizes["save all"] * found["bytes of 1 %, in %"] / 100
    return _lines(
        ["", "s", "MB of files", "server, MB", "training program, MB"],
        (
            (
                name,
                f"{found[f'{key} s']:.1f}",
                f"{sizes[key]:,.0f}" if key in sizes else "",
                *_growth(found, key),
            )
            for name, key in rows.items()
        ),
    )


def demo(found: list[Mapping[str, Any]]) -> Lines:
    """Of examples/ctr/demo.py, which has a module for the table."""
    folder = pathlib.Path(__file__).parents[1] / "examples/ctr"
    spec = importlib.util.spec_from_file_location("ctr_report", folder / "report.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    headings, *rows = module.cells(*(module.Run(**run) for run in found))
    return _lines(list(headings), rows)


def serving(found: Mapping[str, Any]) -> Lines:
    threads = [key for key in found if key.endswith(" threads")]
    names = {
        "lookup of mapped rows": "mapped_to_gather",
        "lookup of changed rows": "changed_to_gather",
    }
    rows = [
        [name, *(f"{found[key][ratio]:.2f}" for key in threads)] for name, ratio in names.items()
    ]
    load = [f"{found[key]['seconds_to_load']:.2f} s" for key in threads]
    return _lines(["", *threads], [*rows, ["time to load the model", *load]])


def saving_memory(found: Mapping[str, Mapping[str, float]]) -> Lines:
    operations = next(iter(found.values()))
    return _lines(
        ["", *(f"{size} of values" for size in found)],
        ([name, *(f"{of_size[name]:.0f}" for of_size in found.values())] for name in operations),
    )


def mapped_sharing(found: list[Mapping[str, Any]]) -> Lines:
    def both(values: list[float], form: str) -> str:
        return ", ".join(format(value, form) for value in values)

    return _lines(
        ["file, MB", "rows", "load, s", "memory of loading, MB", "mapped, MB", "shared, MB"],
        (
            (
                f"{run['file_mb']:,}",
                f"{run['rows']:,}",
                both(run["seconds_to_load"], ".2f"),
                both(run["mb_to_load"], ".0f"),
                both(run["Rss_mb"], ",.0f"),
                both(run["Shared_Clean_mb"], ",.0f"),
            )
            for run in found
        ),
    )


def publish_in_fit(found: Mapping[str, Mapping[str, float]]) -> Lines:
    headings = ["", "step, ms", "wait, ms", "wait, steps"]
    headings += ["longest delay, s", "median delay, s", "greatest age, s"]
    return _lines(
        headings,
        (
            (
                name,
                f"{run['step_ms']:.1f}",
                f"{run['wait_ms']:.1f}",
                f"{run['wait_to_step']:.1f}",
                f"{run['latest_seconds']:.1f}",
                f"{run['median_late_seconds']:.1f}",
                f"{run['greatest_age_seconds']:.1f}",
            )
            for name, run in found.items()
        ),
    )


def reading(found: Mapping[str, float]) -> Lines:
    return _lines(
        ["", "lines/s", "ratio to `decode_csv`"],
        (
            (f"`{name}`", f"{rate:,.0f}", f"{rate / found['decode_csv']:.2f}")
            for name, rate in found.items()
        ),
    )


def herald(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Lines:
    """Rows that move, in those of the naive mode."""
    moved = {"fetched": "pulls", "pushed": "pushes"}
    rows = [
        [data, mode]
        + [f"{run[key] / modes['naive'][key]:.2f}" for key in moved.values()]
        + [f"{run['planning_ms']:.1f}" if run["planning_ms"] else ""]
        for data, modes in found.items()
        for mode, run in modes.items()
    ]
    return _lines(["data", "mode", *moved, "planning, ms"], rows)


def placement(found: Mapping[str, Any]) -> Lines:
    return _lines(
        ["", "parts of a step", "ms", "CPU of the worker, ms", "CPU of all servers, ms"],
        (
            (
                name,
                run["parts"],
                f"{run['step']:.1f}",
                f"{run['worker']:.1f}",
                f"{sum(run['servers']):.1f}",
            )
            for name, run in ((name, found[name]) for name in ("divided", "planned"))
        ),
    )


def planner(found: list[Mapping[str, Any]]) -> Lines:
    def cells(figures: Mapping[str, Any]) -> list[str]:
        shares = f"{figures['hit_rate']:.1%}", f"{figures['kb']:,.0f}", f"{figures['ms']:.1f}"
        return [*shares, figures["busiest"]]

    headings = [""]
    for heading in ("hit rate", "kB of rows", "ms", "bound by"):
        headings += [heading, "predicted"]
    rows = []
    for run in found:
        pairs = zip(cells(run["measured"]), cells(run["predicted"]), strict=True)
        rows.append([run["case"], *(cell for pair in pairs for cell in pair)])
    return _lines(headings, rows)


def staleness_auc(found: list[Mapping[str, Any]]) -> Lines:
    """AUC, and the share of the bytes that a bound saves."""
    groups: dict[tuple[str, str, float], dict[int, list[tuple[float, float]]]] = {}
    for run in found:
        setting = run["setting"]
        line = setting["dataset"], setting["clock"], setting["bound"]
        of_workers = groups.setdefault(line, {}).setdefault(setting["workers"], [])
        of_workers.append((run["auc"], run["bytes_up"] + run["bytes_down"]))
    rows = []
    for (data, clock, bound), of_workers in groups.items():
        row = [data, "no cache", ""] if clock == "none" else [data, clock, f"{bound:g}"]
        for workers, points in sorted(of_workers.items()):
            auc, deviation = auc_runs.mean_and_deviation([auc for auc, _ in points])
            mean = np.mean([size for _, size in points])
            without = np.mean([size for _, size in groups[data, "none", 0][workers]])
            row += [f"{auc:.4f} ±{deviation:.4f}", f"{1 - mean / without:.0%}"]
        rows.append(row)
    workers = sorted(next(iter(groups.values())))
    headings = [f"{name}, {n} workers" for n in workers for name in ("AUC", "bytes saved")]
    return _lines(["data", "clock", "bound", *headings], rows)


def netns(found: list[netns_runs.Run]) -> Lines:
    """Speed, bytes of a step of one worker, and AUC at the end."""
    rows = netns_runs.figures(found)
    speeds = {
        row.setting.rate: row.examples_per_s for row in rows if row.setting.variant == TF_KERAS
    }
    lines = []
    for row in rows:
        kb = [
            sum(size for kind, size in row.kb.items() if kind.startswith(name))
            for name in ("embeddings", "dense")
        ]
        speed = speeds.get(row.setting.rate)
        spread = "" if row.auc_sd is None else f" ±{row.auc_sd:.3f}"
        lines.append(
            [
                row.setting.label,
                f"{row.examples_per_s:,.0f}",
                f"{row.examples_per_s / speed:.1f}" if speed else "",
                *(f"{size:,.0f}" for size in kb),
                f"{row.auc[-1]:.3f}{spread}",
            ]
        )
    headings = ["", "examples/s", "times tf_keras", "kB of rows", "kB of dense variables", "AUC"]
    return _lines(headings, lines)


def storage(found: Mapping[str, Any]) -> Lines:
    runs = {
        "memory": "all rows in memory",
        "disk": "a tenth in memory",
        "disk shuffled": "a tenth in memory, rows in a random order",
    }
    return _lines(
        [
            "",
            "steps/s",
            "rows from the server per step",
            "pages read per step",
            "pages read per second",
            "memory of the server",
        ],
        [
            *(
                (
                    name,
                    f"{found[run]['steps_per_s']:.0f}",
                    f"{found[run]['rows_merged']:,.0f}",
                    f"{found[run]['pages_read']:,.0f}",
                    f"{found[run]['pages_per_s']:,.0f}",
                    f"{found[run]['server_mb'] / 1000:.1f} GB",
                )
                for run, name in runs.items()
            ),
            ("the disk alone, random pages", "", "", "", f"{found['disk_rate']:,.0f}", ""),
        ],
    )


TABLES: dict[str, Callable[[Any], Lines]] = {
    **{
        table.__name__: table
        for table in (
            cache_memory,
            checkpoint,
            checkpoint_chain,
            cluster_bytes,
            demo,
            expiry,
            feature_step,
            herald,
            local_step,
            mapped_sharing,
            placement,
            planner,
            pooled_step,
            publish_in_fit,
            reading,
            saving_memory,
            serving,
            staleness_auc,
            storage,
            sweep,
            table_memory,
        )
    },
    "netns_slow": netns,
    "netns_planned": netns,
}


def read(path: str) -> Lines:
    """The table of a file, cell by cell."""
    file = pathlib.Path(path)
    table = TABLES[file.stem]
    return table(netns_runs.read(file) if table is netns else json.loads(file.read_text()))


def report(lines: Lines) -> str:
    rule = ["---"] * len(lines[0])
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", required=True, help="file of the figures")
    print(report(read(parser.parse_args().json)))


if __name__ == "__main__":
    main()
