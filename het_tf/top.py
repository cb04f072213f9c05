"""Shows the trainings of this user that run on this host: `python -m het_tf.top [--once]`.

Shows the caches, replicas, shards and tasks of every `het_tf.keras.Model.fit` under
`HetParameterServerStrategy` whose program (the chief) runs on this host. Rates are averages since
the previous refresh. The first display shows counts since the start, and "?" for shards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any

from het_tf.runtime.counters import GAUGES, with_ratios

_WATCHED_FOR = 5.0  # seconds


def folder() -> pathlib.Path:
    """Returns the folder of this user's status files, in XDG_RUNTIME_DIR or in the temp folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return pathlib.Path(runtime) / "het_tf"
    return pathlib.Path(tempfile.gettempdir()) / f"het_tf-{os.getuid()}"


class StatusFile:
    """The status file of this process. Errors of writing are ignored, and training continues."""

    def __init__(self) -> None:
        """Decides the path. Creates no file."""
        self._path = folder() / f"{os.getpid()}.json"

    def write(self, status: dict[str, Any]) -> None:
        """Replaces the contents of the file atomically."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._path.parent.stat().st_uid != os.getuid():
                return  # Another user owns the folder.
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(status | {"pid": os.getpid(), "time": time.time()}))
            partial.replace(self._path)

    @property
    def is_watched(self) -> bool:
        """Whether a `het_tf.top` has read the file recently."""
        try:
            return time.time() - self._path.with_suffix(".watched").stat().st_mtime < _WATCHED_FOR
        except OSError:
            return False

    def remove(self) -> None:
        """Deletes the file at the end of a training."""
        for suffix in (".json", ".watched"):
            with contextlib.suppress(OSError):
                self._path.with_suffix(suffix).unlink()


def read_all() -> list[dict[str, Any]]:
    """Reads the status files of this user's running processes. Deletes the files of dead processes.

    It also marks the files as watched, so that the processes write their full status.
    """
    statuses = []
    for path in sorted(folder().glob("*.json")):
        if not path.stem.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            if not pathlib.Path(f"/proc/{path.stem}").exists():
                path.unlink()
                path.with_suffix(".watched").unlink(missing_ok=True)
                continue
            path.with_suffix(".watched").touch()
            statuses.append(json.loads(path.read_text()))
    return statuses


_CLEAR = "\x1b[H\x1b[2J"

Status = dict[str, Any]


def render(now: Status, before: Status | None) -> str:
    """Formats the status of a training as text.

    Args:
      now: current status.
      before: previous status, for rates. None: shows counts.
    """
    seconds = now["time"] - before["time"] if before else 0.0
    steps = f"/{now['steps']}" if now["steps"] else ""
    lines = [
        f"{now['model']} (pid {now['pid']})  epoch {now['epoch']}/{now['epochs']}"
        f"  step {now['step']}{steps}  said {max(time.time() - now['time'], 0):.0f} s ago",
        "",
    ]
    lines += _table(
        ["task", "address", "state"],
        ([task["task"], task["address"], task["state"]] for task in now["tasks"]),
    )

    def counted(part: str, name: str, key: str, counters: Mapping[str, int]) -> dict[str, float]:
        old = (before or {}).get(part, {})
        old = old.get(name, {}).get(key, {}) if name else old.get(key, {})
        return {
            n: v if n in GAUGES or not seconds else max(v - old.get(n, 0), 0) / seconds
            for n, v in counters.items()
        }

    per = "/s" if seconds else ""
    rows = []
    for layer, workers in now["caches"].items():
        for worker, counters in workers.items():
            c = with_ratios(counted("caches", layer, worker, counters))
            rows.append(
                [layer, worker, f"{c['rows']:,.0f}", _mb(c["memory_bytes"]), f"{c['hit_rate']:.1%}"]
                + [f"{c[n]:,.0f}" for n in ("misses", "refreshes", "rows_pushed", "evictions")]
                + [_mb(c["bytes_up"]), _mb(c["bytes_down"]), f"{c['pending']:,.0f}"]
            )
    lines += _table(
        ["cache", "worker", "rows", "MB", "hits"]
        + [f"{n}{per}" for n in ("misses", "refreshes", "pushes", "evictions", "MB up", "MB down")]
        + ["unsent"],
        rows,
    )
    rows = []
    for worker, counters in now["replicas"].items():
        c = counted("replicas", "", worker, counters)
        sizes = [_mb(c["bytes_up"]), _mb(c["bytes_down"])]
        rows.append([worker, f"{c['steps']:,.1f}", *sizes, f"{c['pending']:,.0f}"])
    lines += _table(
        ["replica of worker", f"steps{per}", f"MB up{per}", f"MB down{per}", "unsent"], rows
    )
    rows = []
    for layer, shards in now["shards"].items():
        for shard, counters in shards.items():
            c = counted("shards", layer, shard, counters)
            names = ("requests", "rows_merged", "rows_checked", "rows_sent")
            rows.append(
                [layer, shard, f"{c['rows']:,.0f}", _mb(c["memory_bytes"])]
                + [f"{c[n]:,.0f}" for n in names]
            )
        if not shards:
            rows.append([layer, *"???????"])
    lines += _table(
        ["table", "server", "rows", "MB"]
        + [f"{n}{per}" for n in ("requests", "merged", "checked", "sent")],
        rows,
    )
    return "\n".join(lines)


def _mb(value: float) -> str:
    return f"{value / 1e6:,.2f}"


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    """Formats a table as lines, with names left and numbers right. Empty without rows."""
    rows = [[str(x) for x in row] for row in rows]
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, *rows]:
        cells = [
            x.ljust(w) if i == 0 or header[1] == "address" else x.rjust(w)
            for i, (x, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return [*lines, ""]


def main() -> int:
    """Runs until interrupted, or once with `--once`.

    Returns:
      Exit status. 1 if `--once` found no training.
    """
    parser = argparse.ArgumentParser(prog="python -m het_tf.top", description=__doc__)
    parser.add_argument("--once", action="store_true", help="print the second look, and end")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between looks")
    arguments = parser.parse_args()
    if arguments.interval <= 0:
        parser.error(f"--interval must be above 0, not {arguments.interval}")
    # Current and previous status by process. A status may stay the same between two refreshes.
    last: dict[int, Status] = {}
    before: dict[int, Status] = {}
    looks = 1
    try:
        while True:
            statuses = read_all()
            for status in statuses:
                pid, said = status["pid"], last.get(status["pid"])
                if said is not None and said["time"] != status["time"]:
                    before[pid] = said
                last[pid] = status
            shown = [render(status, before.get(status["pid"])) for status in statuses]
            text = "\n".join(shown)
            if not shown:
                waits = "" if arguments.once else "; waiting until something does"
                text = f"Nothing is training (looked in {folder()}){waits}.\n"
            if not arguments.once:
                sys.stdout.write(_CLEAR + text)
                sys.stdout.flush()
            elif looks == 2 or not statuses:
                sys.stdout.write(text)
                return 0 if statuses else 1
            looks += 1
            time.sleep(arguments.interval)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
