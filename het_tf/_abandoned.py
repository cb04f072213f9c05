"""Resources on devices whose Python objects are gone.

They are destroyed when the next table is made, and not by the garbage collector: it may run while
TensorFlow builds a graph and holds its lock.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable

import tensorflow as tf

_abandoned: collections.deque[Callable[[], None]] = collections.deque()


def destroy_after(owner: object, destroy: Callable[[], None]) -> None:
    """Has `destroy` called some time after `owner` is gone, but not at the end of the process."""
    weakref.finalize(owner, _abandoned.append, destroy).atexit = False


def destroy_all() -> None:
    """Destroys what was abandoned until now."""
    while _abandoned:
        destroy = _abandoned.popleft()
        with tf.init_scope():
            destroy()
