"""Resources on devices whose Python objects are gone.

They are destroyed when the next table is made, and not by the garbage collector: it may run while
TensorFlow builds a graph and holds its lock.
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

# Seconds that the end of the process waits for servers to destroy what it had there.
_AT_EXIT = 10.0

_numbers = itertools.count()
_owned: dict[int, Callable[[], None]] = {}  # Those whose owners are there.
_abandoned: collections.deque[Callable[[], None]] = collections.deque()


def destroy_after(owner: object, destroy: Callable[[], None]) -> None:
    """Has `destroy` called some time after `owner` is gone.

    At the end of the process only after `destroy_at_exit`.
    """
    number = next(_numbers)
    _owned[number] = destroy
    weakref.finalize(owner, _abandon, number).atexit = False


def destroy_all() -> None:
    """Destroys what was abandoned until now."""
    while _abandoned:
        destroy = _abandoned.popleft()
        with tf.init_scope():
            destroy()


@functools.cache
def destroy_at_exit() -> None:
    """Has this process destroy what it has on servers when it ends, since they go on."""
    atexit.register(_end)


def _end() -> None:
    for number in list(_owned):
        _abandon(number)
    # A server that hangs is not waited for. Python may begin no more threads by then.
    with contextlib.suppress(concurrent.futures.TimeoutError, tf.errors.OpError, RuntimeError):
        call_apart(destroy_all).result(timeout=_AT_EXIT)


def _abandon(number: int) -> None:
    destroy = _owned.pop(number, None)
    if destroy is not None:
        _abandoned.append(destroy)
