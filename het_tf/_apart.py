"""Ops that may never end, kept from holding up others.

What a thread asks of another task, TensorFlow notes with its executor, and whoever reads the next
batch of a dataset in this process waits for all that is noted there. Threads share one unless they
have their own; and with the shared one TensorFlow also notes, whenever it gets to it, what it frees
on other tasks for any thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# There is no public way to give a thread an executor of its own.
from tensorflow.python.eager import context, executor

from het_tf._threads import call_in_daemon

_own = threading.local()


def stand_apart() -> None:
    """Has the calling thread wait for no op of another thread."""
    if not hasattr(_own, "executor"):
        _own.executor = executor.new_executor(enable_async=False)
        context.context().executor = _own.executor


def call_apart(fn: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """As `call_in_daemon`, for what makes ops: nobody but the future waits for them to end."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    call_in_daemon(_run, future, fn, args)
    return future


def _run(future: concurrent.futures.Future[Any], fn: Callable[..., Any], args: Any) -> None:
    try:
        stand_apart()
        result = fn(*args)
    except BaseException as error:  # Handed to whoever waits for the future.
        future.set_exception(error)
    else:
        future.set_result(result)
    # The executor goes with the thread, and waits for what is still under way: whatever that ends
    # with is no error of a call that is done.
    with contextlib.suppress(tf.errors.OpError):
        _own.executor.wait()
    _own.executor.clear_error()
