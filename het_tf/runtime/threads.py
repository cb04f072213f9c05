"""Threads for calls that may never return.

TensorFlow records the remote calls of a thread in the thread's executor. All threads share one
executor unless they have their own. TensorFlow also records in the shared executor when it frees
tensors on other tasks, for any thread. Reading the next batch of a dataset in this process waits
for all recorded calls. A remote call that hangs would therefore block the reader.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from het_tf.compat.tensorflow_internals import finish_own_executor, use_own_executor


def call_in_daemon(fn: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """Calls `fn(*args)` in a new daemon thread. The future holds the result or the exception.

    A call that hangs, such as an RPC to a vanished host, does not keep the process from exiting.
    The threads of a `ThreadPoolExecutor` do.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = fn(*args)
        except BaseException as error:  # The caller of `future.result` gets the error.
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="het-call", daemon=True).start()
    return future


def call_apart(fn: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
    """Calls `fn(*args)` as `call_in_daemon` does, in a thread with its own executor.

    Other threads do not wait for the ops of `fn`.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    call_in_daemon(_run, future, fn, args)
    return future


def _run(future: concurrent.futures.Future[Any], fn: Callable[..., Any], args: Any) -> None:
    try:
        use_own_executor()
        result = fn(*args)
    except BaseException as error:  # The caller of `future.result` gets the error.
        future.set_exception(error)
    else:
        future.set_result(result)
    # The executor ends with the thread and waits for its remaining ops. The call is done, so errors
    # of these ops are dropped.
    finish_own_executor()
