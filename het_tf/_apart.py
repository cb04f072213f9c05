"""Ops that may never end, kept from holding up others.

What a thread asks of another task, TensorFlow notes with the executor that all threads share; and
whoever reads the next batch of a dataset in this process waits for all that is noted there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# There is no public way to give a thread an executor of its own.
from tensorflow.python.eager import context, executor

from het_tf._threads import call_in_daemon


def call_apart(fn: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """As `call_in_daemon`, for what makes ops: nobody but the future waits for them to end."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    call_in_daemon(_run, future, fn, args)
    return future


def _run(future: concurrent.futures.Future[Any], fn: Callable[..., Any], args: Any) -> None:
    # Kept out of what an error refers to: when it goes it waits, for whoever has the error last.
    kept = [executor.new_executor(enable_async=False)]
    try:
        with context.executor_scope(kept[0]):
            result = fn(*args)
    except BaseException as error:  # Handed to whoever waits for the future.
        future.set_exception(error)
    else:
        future.set_result(result)
    # What is under way still has no result: TensorFlow frees what is on other tasks by itself, and
    # one that was started again knows nothing of it.
    with contextlib.suppress(tf.errors.OpError):
        kept[0].wait()
    kept[0].clear_error()
    kept.clear()
