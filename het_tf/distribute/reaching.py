"""Waiting until tasks of a cluster reach others that were started anew at their addresses.

A task's connection to one that was gone is not used before gRPC has tried it again, first after
about a second, at last every two minutes. Until then what needs it fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from het_tf._visits import cache_devices, cluster_devices

_PAUSE = 1.0  # seconds between attempts


def wait_until_servers_are_reached(
    devices: Sequence[str], is_down: Callable[[str], bool], until: float
) -> None:
    """Waits until this process, every worker that lives and the other servers reach some servers.

    Args:
      devices: of the servers.
      is_down: whether the task of a device does not answer.
      until: of `time.monotonic`.

    Raises:
      tf.errors.OpError: one of them did not.
    """

    # Variables, so that the function has to go there.
    variables = {}
    for device in cluster_devices("ps"):
        with tf.init_scope(), tf.device(device):
            variables[device] = tf.Variable(0.0, trainable=False)

    @tf.function(autograph=False)
    def reach() -> tf.Tensor:
        # Every op has its device: by way of the caller's a server would reach none of the others.
        lost, assigned = [], []
        for device in devices:
            with tf.device(device):
                lost.append(variables[device].read_value())
        for device, each in variables.items():
            with tf.device(device):
                assigned.append(each.assign(tf.add_n(lost)))
        return tf.add_n(assigned)

    for device in cache_devices():

        def reach_from(device: str = device) -> None:
            with tf.device(device):
                reach().numpy()

        _repeat(reach_from, lambda device=device: is_down(device), until)


def wait_until_program_is_reached(is_lost: Callable[[str], bool], until: float) -> bool:
    """Waits until every parameter server reaches this process, or one of them is lost.

    TensorFlow's own part of a checkpoint needs it: servers ask this process for the path.

    Args:
      is_lost: whether the server of a device is down, or another process than before.
      until: of `time.monotonic`.

    Returns:
      Whether all of them reach it.

    Raises:
      tf.errors.OpError: one of them did not.
    """
    servers = cluster_devices("ps")

    @tf.function(autograph=False)
    def reach(number: tf.Tensor) -> list[tf.Tensor]:
        # An argument, which the servers have to ask for.
        made = []
        for server in servers:
            with tf.device(server):
                made.append(number + 1.0)
        return made

    return _repeat(
        lambda: [float(each) for each in reach(tf.constant(0.0))],
        lambda: any(map(is_lost, servers)),
        until,
    )


def _repeat(call: Callable[[], Any], is_lost: Callable[[], bool], until: float) -> bool:
    """Calls until it does not fail, or who is called is lost; returns whether it did not fail."""
    while True:
        try:
            call()
            return True
        except tf.errors.OpError as error:
            if is_lost():
                return False
            if time.monotonic() > until or not _may_pass(error):
                raise
            time.sleep(_PAUSE)


def _may_pass(error: tf.errors.OpError) -> bool:
    return isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)) or (
        # Of a worker that TensorFlow has still to take back.
        isinstance(error, tf.errors.InvalidArgumentError) and "unknown device" in error.message
    )
