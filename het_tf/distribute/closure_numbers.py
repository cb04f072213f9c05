"""Numbers of closures, by which parameter servers know what they have merged.

Parameter servers remember the numbers that they merged, but for those up to `done`: all closures up
to it have ended, and are not run again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class ClosureNumbers:
    """Gives numbers to closures. Thread safe."""

    def __init__(self) -> None:
        """The first number is 1."""
        self._lock = threading.Lock()
        self._last = 0
        self._open: set[int] = set()

    def take(self) -> tuple[int, int]:
        """A number for a closure that is about to be scheduled, and what is done."""
        with self._lock:
            self._last += 1
            self._open.add(self._last)
            return self._last, min(self._open) - 1

    def finish(self, numbers: Iterable[int]) -> None:
        """Closures have ended, and their results are here; or nobody wants them."""
        with self._lock:
            self._open.difference_update(numbers)
