"""Calls that may never return, kept off the threads that must."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any


def call_in_daemon(fn: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """Calls `fn(*args)` in a thread of its own; the future holds its result or exception.

    Unlike the threads of a `ThreadPoolExecutor`, this one does not keep the process from exiting
    when the call hangs, as RPCs to a vanished host do.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = fn(*args)
        except BaseException as error:  # Handed to whoever waits for the future.
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="het-call", daemon=True).start()
    return future
