"""Memory of a process, as the kernel counts it."""

from __future__ import annotations

import pathlib


def resident_bytes(field: str = "VmRSS", process: int | str = "self") -> int:
    """A field of /proc/PID/status in bytes: VmRSS (now), VmHWM (peak), RssAnon or RssFile."""
    for line in pathlib.Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{process}/status has no {field}")


def reset_peak(process: int | str = "self") -> None:
    """Sets VmHWM back to VmRSS (proc(5), clear_refs)."""
    pathlib.Path(f"/proc/{process}/clear_refs").write_text("5")
