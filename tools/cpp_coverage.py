"""Prints which share of the lines of ops/ the C++ tests have run, by folder.

To be called after tools/cpptest.py coverage, which leaves counts beside the objects.
"""

import collections
import json
import subprocess

import cxx

Lines = dict[str, dict[int, bool]]  # by file and line: whether the line was run


def lines_run() -> Lines:
    """Lines of sources and headers; a line that several objects have was run if one ran it."""
    lines: Lines = collections.defaultdict(dict)
    for counts in cxx.variant_directory("coverage").rglob("*.gcda"):
        command = ["gcov", "--json-format", "--stdout", str(counts)]
        report = subprocess.run(command, cwd=cxx.ROOT, capture_output=True, check=True).stdout
        for file in json.loads(report)["files"]:
            for line in file["lines"]:
                known = lines[file["file"]]
                number = line["line_number"]
                known[number] = known.get(number, False) or line["count"] > 0
    return lines


def main() -> None:
    """Prints the shares."""
    totals: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for name, lines in lines_run().items():
        path = cxx.ROOT / name  # The names of system headers are absolute.
        is_test = "test" in path.name or "testing" in path.parts
        if not path.is_relative_to(cxx.ROOT / "ops") or is_test:
            continue
        path = path.relative_to(cxx.ROOT)
        for folder in (str(path.parent), "all"):
            totals[folder][0] += sum(lines.values())
            totals[folder][1] += len(lines)
    for folder, (run, known) in sorted(totals.items()):
        print(f"{folder:<28} {run:>6} of {known:>6} lines  {100 * run / known:5.1f} %")


if __name__ == "__main__":
    main()
