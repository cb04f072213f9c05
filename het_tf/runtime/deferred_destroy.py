"""Deferred destruction of device resources whose Python owners were garbage-collected.

The resources are destroyed when the next table is created. The garbage collector must not destroy
them, because it may run while TensorFlow builds a graph and holds the graph's lock.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable

import tensorflow as tf

from het_tf.runtime.threads import call_apart

# Seconds that an exiting process waits for servers to destroy its resources.
_AT_EXIT = 10.0

_numbers = itertools.count()
_owned: dict[int, Callable[[], None]] = {}  # The owners are alive.
_abandoned: collections.deque[Callable[[], None]] = collections.deque()


def destroy_after(owner: object, destroy: Callable[[], None]) -> None:
    """Schedules a call of `destroy` after `owner` has been garbage-collected.

    A process that exits calls `destroy` only if `destroy_at_exit` was called.
    """
    number = next(_numbers)
    _owned[number] = destroy
    weakref.finalize(owner, _abandon, number).atexit = False


def destroy_all() -> None:
    """Destroys the resources of all owners that have been garbage-collected."""
    while _abandoned:
        destroy = _abandoned.popleft()
        with tf.init_scope():
            destroy()


@functools.cache
def destroy_at_exit() -> None:
    """Registers an exit handler that destroys the resources on servers, which keep running."""
    atexit.register(_end)


def _end() -> None:
    for number in list(_owned):
        _abandon(number)
    # A server that hangs must not block the exit. Python may refuse to start threads by then.
    with contextlib.suppress(concurrent.futures.TimeoutError, tf.errors.OpError, RuntimeError):
        call_apart(destroy_all).result(timeout=_AT_EXIT)


def _abandon(number: int) -> None:
    destroy = _owned.pop(number, None)
    if destroy is not None:
        _abandoned.append(destroy)
