"""Keeps the training program's connections to the tasks from falling silent.

While a closure runs, its worker sends nothing, and gRPC pings the worker to learn whether it is
still there. A server takes that for an attack after two to three minutes and closes the connection
("too_many_pings"); TensorFlow then counts the worker as lost. Where something arrives more often
than the keepalive time (see het_tf.distribute.environment), a ping goes only to a task that hangs.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
import weakref
from collections.abc import Sequence

import tensorflow as tf

from het_tf.distribute.threads import call_in_daemon

INTERVAL = 5.0  # seconds; less than the keepalive time


def start(owner: object, devices: Sequence[str]) -> None:
    """Runs an empty op on each device every `INTERVAL` seconds as long as `owner` exists.

    Devices that fail, or take longer, are none of its business.
    """
    threading.Thread(
        target=_run, args=(weakref.ref(owner), devices), name="het-heartbeat", daemon=True
    ).start()


def _run(owner: weakref.ref[object], devices: Sequence[str]) -> None:
    beats: dict[str, concurrent.futures.Future[None]] = {}
    while owner() is not None:
        for device in devices:
            if device not in beats or beats[device].done():
                beats[device] = call_in_daemon(_beat, device)
        time.sleep(INTERVAL)


def _beat(device: str) -> None:
    with tf.device(device):
        tf.no_op()
