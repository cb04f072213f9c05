"""Ops that may never end, kept from holding up others.

What a thread asks of another task, TensorFlow notes with its executor, and whoever reads the next
batch of a dataset in this process waits for all that is noted there. Threads share one unless they
have their own; and with the shared one TensorFlow also notes, whenever it gets to it, what it frees
on other tasks for any thread.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from het_tf.compat.tensorflow_internals import finish_own_executor, use_own_executor


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


def call_apart(fn: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """As `call_in_daemon`, for what makes ops: nobody but the future waits for them to end."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    call_in_daemon(_run, future, fn, args)
    return future


def _run(future: concurrent.futures.Future[Any], fn: Callable[..., Any], args: Any) -> None:
    try:
        use_own_executor()
        result = fn(*args)
    except BaseException as error:  # Handed to whoever waits for the future.
        future.set_exception(error)
    else:
        future.set_result(result)
    # The executor goes with the thread, and waits for what is still under way: whatever that ends
    # with is no error of a call that is done.
    finish_own_executor()
