"""The short table of what netns_cluster.py measured: speed, bytes and AUC beside tf_keras.

    python benchmarks/wide_deep_table.py --json=docs/measured/wide_deep.json --report

Without --report, the table of netns_cluster.py comes first.
"""

from __future__ import annotations

import argparse
import pathlib

from netns import report as full_report
from netns import runs as netns_runs
from netns.runs import ALONE, NO_CACHE, TF_KERAS, Figures, Run

_NAMES = {
    TF_KERAS: "tf_keras `Embedding`, `ParameterServerStrategy`",
    NO_CACHE: "het_tf, `cache=None`",
    "default": "het_tf, defaults",
    "s100": "het_tf, `cache=CacheConfig(staleness=100)`",
    ALONE: "two workers that train alone, no servers",
}


def read(path: str) -> list[Run]:
    return netns_runs.read(pathlib.Path(path))


def report(runs: list[Run]) -> str:
    """A line for each variant, of runs without a limit of the network and of runs with one.

    Times and kB are those of a step of one worker. Sent and received kB count together. tf_keras
    does not count messages: its kB of rows have all that is not of dense variables.
    """
    found = netns_runs.figures(runs)
    rates = {row.setting.rate for row in found if row.setting.variant != ALONE}
    (rate,) = rates - {None}
    target = full_report.target_auc([row for row in found if row.setting.rate == rate])
    free = {row.setting.variant: row for row in found if row.setting.rate is None}
    limited = {row.setting.variant: row for row in found if row.setting.rate == rate}
    limited[ALONE] = free[ALONE]
    limit = rate.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
    head = ["", "ms", f"ms at {limit}", "speed", "kB of rows", "kB of dense variables", "AUC"]
    lines = [[*head, f"s until AUC {target:.3f}"], ["---"] * (len(head) + 1)]
    slowest = limited[TF_KERAS].ms_per_step
    for variant, name in _NAMES.items():
        row = limited[variant]
        times = [f"{each[variant].ms_per_step:.1f}" for each in (free, limited)]
        speed = f"{slowest / row.ms_per_step:.1f}"
        lines.append([name, *times, speed, *_of_cluster(row, target)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _of_cluster(row: Figures, target: float) -> list[str]:
    if row.setting.variant == ALONE:  # Each of its models has seen its share of the examples.
        return [""] * 4
    seconds = row.seconds_to(target)
    kb = [
        sum(size for kind, size in row.kb.items() if kind.startswith(name))
        for name in ("embeddings", "dense")
    ]
    return [
        *(f"{size:,.0f}" for size in kb),
        f"{row.auc[-1]:.3f}",
        "" if seconds is None else f"{seconds:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", required=True, help="file of the runs of netns_cluster.py")
    parser.add_argument("--report", action="store_true", help="print the short table only")
    args = parser.parse_args()
    runs = read(args.json)
    if not args.report:
        print(full_report.markdown(netns_runs.figures(runs), None))
    print(report(runs))


if __name__ == "__main__":
    main()
