"""Writing what was cut, in a thread, while training goes on."""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import os
from collections.abc import Callable
from typing import Any

from het_tf._apart import call_apart

# Calls under way, which the end of the process waits for, and the folder that each writes into.
_under_way: dict[concurrent.futures.Future[None], str] = {}


def wait_for_writes(folder: str) -> None:
    """Returns when no call that was begun before writes into a folder, whatever came of it."""
    for call, writes_into in list(_under_way.items()):
        if writes_into == os.path.realpath(folder):
            call.exception()


class Background:
    """Makes one call at a time in a thread of its own. The end of the program waits for it."""

    def __init__(self, folder: str) -> None:
        """folder: what the calls write into."""
        self._folder = os.path.realpath(folder)
        self._call: concurrent.futures.Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._call is not None and not self._call.done()

    def start(self, call: Callable[..., None], *args: Any) -> None:
        """Begins a call. REQUIRES: the one before was waited for."""
        assert self._call is None
        _wait_at_exit()
        self._call = call_apart(call, *args)
        _under_way[self._call] = self._folder
        self._call.add_done_callback(_under_way.pop)

    def wait(self) -> None:
        """Returns when no call is under way.

        Raises:
          Exception: what the last call raised. It is raised once.
        """
        if (call := self._call) is None:
            return
        call.exception()  # waits
        self._call = None
        call.result()


@functools.cache
def _wait_at_exit() -> None:
    """Before a cluster ends that was started before."""

    def wait() -> None:
        for call in list(_under_way):
            call.exception()

    atexit.register(wait)
