"""Shows where the time of the tests goes: tools/test_costs.py [arguments of pytest]

Runs pytest with itself as a plugin. Prints a table of files and one of fixtures: seconds of wall
time, CPU seconds of the process that runs the tests, and CPU seconds of the processes that the
tests started (programs and servers; what a killed process had used may be missing).
"""

from __future__ import annotations

import collections
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_FOLDER = "HET_TF_TEST_COSTS"  # environment variable: where each pytest process puts its records
_TICKS = os.sysconf("SC_CLK_TCK")

Costs = tuple[float, float, float]  # seconds: wall, CPU of this process, CPU of its descendants


def _cpu_of_descendants() -> float:
    """CPU seconds of all processes that this one started and of those that they started."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # The process has ended.
        parents[int(entry.name)] = int(fields[1])
        # Times of the process, and of its children that have ended.
        seconds[int(entry.name)] = sum(map(int, fields[11:15])) / _TICKS
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = ended.ru_utime + ended.ru_stime
    for process in seconds:
        ancestor = parents[process]
        while ancestor != os.getpid() and ancestor in parents:
            ancestor = parents[ancestor]
        total += seconds[process] if ancestor == os.getpid() else 0.0
    return total


def _now() -> Costs:
    return time.monotonic(), time.process_time(), _cpu_of_descendants()


def _record(kind: str, name: str, begun: Costs) -> None:
    spent = [now - then for now, then in zip(_now(), begun, strict=True)]
    with open(Path(os.environ[_FOLDER], f"{os.getpid()}.jsonl"), "a") as file:
        file.write(json.dumps([kind, name, *spent]) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    begun = _now()
    try:
        return (yield)
    finally:
        _record("test", item.nodeid, begun)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest
) -> Iterator[None]:
    begun = _now()
    try:
        return (yield)
    finally:
        file = request.node.nodeid.partition("::")[0]
        _record("fixture", f"{file}::{fixturedef.argname}", begun)


def _table(title: str, counts: collections.Counter, costs: dict[str, list[float]]) -> None:
    """Prints rows of Markdown from one CPU second on, the largest first, and the sum of all."""
    print(f"\n| {title} | times | wall s | CPU s, tests | CPU s, programs and servers |")
    print("|---|---|---|---|---|")
    rows = sorted(costs.items(), key=lambda row: -sum(row[1][1:]))
    rows = [row for row in rows if sum(row[1][1:]) >= 1.0]
    total = [sum(column) for column in zip(*costs.values(), strict=True)]
    for name, spent in [*rows, (f"all {len(costs)}", total)]:
        times = counts[name] or counts.total()
        print(f"| {name} | {times} |", " | ".join(f"{seconds:.1f}" for seconds in spent), "|")


def main() -> int:
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    tables = {kind: (collections.Counter(), {}) for kind in ("test", "fixture")}
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "test_costs", *sys.argv[1:]],
            env={**os.environ, _FOLDER: folder, "PYTHONPATH": os.pathsep.join(path)},
            check=False,
        )
        for path in Path(folder).iterdir():
            for line in path.read_text().splitlines():
                kind, name, *spent = json.loads(line)
                counts, costs = tables[kind]
                name = name.partition("::")[0] if kind == "test" else name
                counts[name] += 1
                so_far = costs.get(name, [0.0] * len(spent))
                costs[name] = [a + b for a, b in zip(so_far, spent, strict=True)]
    for title, (counts, costs) in zip(("file", "fixture"), tables.values(), strict=True):
        _table(title, counts, costs)
    return ran.returncode


if __name__ == "__main__":
    raise SystemExit(main())
