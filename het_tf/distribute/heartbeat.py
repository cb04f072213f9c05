"""Keeps the training program's connections to the tasks from falling silent.

While a closure runs, its worker sends nothing, and gRPC pings the worker to learn whether it is
still there. A server takes that for an attack after two to three minutes and closes the connection
("too_many_pings"); TensorFlow then counts the worker as lost. Where something arrives more often
than the keepalive time (see het_tf.distribute.environment), a ping goes only to a task that hangs.
"""

from __future__ import annotations

import concurrent.futures
import threading
import weakref
from collections.abc import Sequence

import tensorflow as tf

from het_tf.distribute.threads import call_in_daemon

INTERVAL = 5.0  # seconds; less than the keepalive time


class Heartbeat:
    """Runs an empty op on each device every `INTERVAL` seconds.

    Devices that fail, or take longer, are none of its business.
    """

    def __init__(self, owner: object, devices: Sequence[str]):
        """Starts it.

        Args:
          owner: it beats no longer than this exists.
          devices: names of the tasks' devices.
        """
        self._end = threading.Event()
        self._ended = call_in_daemon(_run, self._end, devices)
        weakref.finalize(owner, self._end.set).atexit = False

    def stop(self, timeout: float) -> bool:
        """Ends it. Returns whether no op is under way any more, after at most `timeout` seconds."""
        self._end.set()
        return bool(concurrent.futures.wait([self._ended], timeout).done)


def _run(end: threading.Event, devices: Sequence[str]) -> None:
    beats: dict[str, concurrent.futures.Future[None]] = {}
    while True:
        for device in devices:
            if device not in beats or beats[device].done():
                beats[device] = call_in_daemon(_beat, device)
        if end.wait(INTERVAL):
            break
    concurrent.futures.wait(beats.values())


def _beat(device: str) -> None:
    with tf.device(device):
        tf.no_op()
