"""Tables of measurements in the pages are those that programs of benchmarks/ print of their runs.

A comment above such a table names the program and the file of its runs.
"""

from __future__ import annotations

import importlib
import re

import pages
import pytest

_TABLE = re.compile(
    r"<!-- benchmarks/(\w+)\.py --json=(docs/measured/\S+)(?: --report)? -->\n\n((?:\|.*\n)+)"
)
TABLES = [
    pytest.param(*found, id=f"{path.name}-{found[1].rpartition('/')[2]}")
    for path in [pages.ROOT / "README.md", *sorted(pages.DOCS.glob("*.md"))]
    for found in _TABLE.findall(path.read_text())
]


def test_every_file_of_runs_has_a_table():
    shown = {table.values[1] for table in TABLES}
    files = (pages.DOCS / "measured").glob("*.json")
    assert shown == {str(path.relative_to(pages.ROOT)) for path in files}


@pytest.mark.parametrize(("program", "runs", "table"), TABLES)
def test_table(program, runs, table, monkeypatch):
    monkeypatch.syspath_prepend(pages.ROOT / "benchmarks")
    module = importlib.import_module(program)
    assert module.report(module.read(str(pages.ROOT / runs))) == table.rstrip()


def test_memory_in_readme_follows_from_the_bytes_per_row():
    """docs/index.md has the formulas."""
    text = (pages.ROOT / "README.md").read_text()
    found = re.findall(r"^\| (\d+), (row-wise Adagrad|Adam) \| ([\d.]+) GB", text, re.MULTILINE)
    assert len(found) == 3
    for dim, optimizer, gigabytes in found:
        columns = int(dim) * {"row-wise Adagrad": 1, "Adam": 3}[optimizer]
        of_server = 100e6 / 4 * (4 * (columns + 1) + 24) / 1e9
        assert float(gigabytes) == pytest.approx(of_server, abs=0.05)
