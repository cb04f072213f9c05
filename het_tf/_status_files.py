"""Files in which running trainings say what they do, for `python -m het_tf.top` on the same host.

They lie in a folder that only their user may read. Somebody who looks touches a file beside, so
that what costs messages is asked for only then.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
import time
from typing import Any

_WATCHED_FOR = 5.0  # seconds


def folder() -> pathlib.Path:
    """Where this user's files are: in XDG_RUNTIME_DIR, or in the folder for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return pathlib.Path(runtime) / "het_tf"
    return pathlib.Path(tempfile.gettempdir()) / f"het_tf-{os.getuid()}"


class StatusFile:
    """This process's file. What cannot be written is not: training goes on without it."""

    def __init__(self) -> None:
        """Names the file; makes nothing yet."""
        self._path = folder() / f"{os.getpid()}.json"

    def write(self, status: dict[str, Any]) -> None:
        """Replaces the file's content at once."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._path.parent.stat().st_uid != os.getuid():
                return  # A folder of that name, made by somebody else.
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(status | {"pid": os.getpid(), "time": time.time()}))
            partial.replace(self._path)

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks."""
        try:
            return time.time() - self._path.with_suffix(".watched").stat().st_mtime < _WATCHED_FOR
        except OSError:
            return False

    def remove(self) -> None:
        """Nothing is done any more."""
        for suffix in (".json", ".watched"):
            with contextlib.suppress(OSError):
                self._path.with_suffix(suffix).unlink()


def read_all() -> list[dict[str, Any]]:
    """What running processes of this user say, and has them say all. Files of dead ones go."""
    found = []
    for path in sorted(folder().glob("*.json")):
        if not path.stem.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            if not pathlib.Path(f"/proc/{path.stem}").exists():
                path.unlink()
                path.with_suffix(".watched").unlink(missing_ok=True)
                continue
            path.with_suffix(".watched").touch()
            found.append(json.loads(path.read_text()))
    return found
