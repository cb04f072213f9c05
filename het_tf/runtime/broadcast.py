"""Calls of one function on every process of the cluster that may hold a cache."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from het_tf.runtime.threads import call_apart

# Seconds between checks of a process that does not answer. Without the checks, a call could wait
# forever.
CHECK_INTERVAL = 30.0

# Number of attempts for a call that failed because another process ended, and seconds before the
# first retry. The pause doubles with every retry. TensorFlow needs some time to drop a process that
# ended.
_TRIES = 5
_PAUSE = 0.25

# Text of TensorFlow's error for a function that a task does not know.
_NOT_REGISTERED = "nor a name of a function registered"

# The job of the training program; see het_tf.distribute.failures.connection.
COORDINATOR = "localhost"


def cluster_devices(job: str) -> list[str]:
    """Returns the CPU devices of a job's tasks ("ps", "worker" or `COORDINATOR`), by index."""
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    # The names of this process's own devices have no job.
    own = tf.DeviceSpec(job=COORDINATOR, replica=0, task=0)
    devices = [own.make_merged_spec(tf.DeviceSpec.from_string(name)) for name in names]
    return [d.to_string() for d in sorted(devices, key=lambda d: d.task) if d.job == job]


def cache_devices() -> list[str]:
    """Returns the CPU devices that may have a cache: all workers' and this process's."""
    return [*cluster_devices("worker"), *cluster_devices(COORDINATOR)]


class TracedByDevice:
    """A function for `visit` that is traced once under every device.

    TensorFlow counts the calls of a `tf.function` that trace, and warns after five in a row. This
    function traces once for every worker, and again after every restart of a server. It calls
    `get_concrete_function`, because TensorFlow does not count traces there.
    """

    def __init__(self, build_ops: Callable[[], Any]):
        """Traces nothing yet. `build_ops` returns the results of the function."""
        self._build_ops = build_ops
        self._function = tf.function(build_ops, autograph=False)
        self._traced: set[str] = set()

    def trace(self, devices: Sequence[str]) -> None:
        """Traces the function under these devices, as far as that has not been done here.

        TensorFlow does not register functions on a worker to which it connects again meanwhile. A
        worker that lacks the body of a loop crashes in TensorFlow when the function runs. Functions
        with loops are therefore traced when all workers are up.
        """
        for device in devices:
            if device not in self._traced:
                with tf.device(device):
                    self._function.get_concrete_function()
                self._traced.add(device)

    def __call__(self) -> Any:
        """Returns the results, under the current device."""
        try:
            return self._function.get_concrete_function()()
        except tf.errors.NotFoundError as error:
            if _NOT_REGISTERED in error.message:  # On a worker that was connected meanwhile.
                self._function = tf.function(self._build_ops, autograph=False)
                self._traced.clear()
            raise


def visit(
    devices: Sequence[str],
    fn: Callable[[], Any],
    is_lost: Callable[[str, tf.errors.OpError | None], bool | None],
) -> dict[str, Any]:
    """Calls `fn` under every device, concurrently.

    Args:
      devices: CPU devices of tasks.
      fn: a `tf.function`, or a Python function of ops. It is called from other threads.
      is_lost: decides whether to give a device up. Its arguments are the device and the error that
        `fn` raised there. The error is None if `fn` is still running after another
        `CHECK_INTERVAL` seconds. Results: True drops the device; False raises the error, or waits
        on if there is none; None retries the call a few times. `is_lost` may raise a clearer error.

    Returns:
      The results of `fn` by device, as NumPy arrays. Dropped devices are absent.

    Raises:
      tf.errors.OpError: `fn` raised it on a device that is not lost.
    """
    calls = {device: call_apart(_call, device, fn) for device in devices}
    results = {}
    for device, call in calls.items():
        tries = 1
        while True:
            try:
                results[device] = call.result(timeout=CHECK_INTERVAL)
                break
            except concurrent.futures.TimeoutError:
                if is_lost(device, None):
                    break
            except tf.errors.OpError as error:
                lost = is_lost(device, error)
                if lost:
                    break
                if lost is not None or tries == _TRIES:
                    raise
                time.sleep(_PAUSE * 2 ** (tries - 1))
                tries += 1
                call = call_apart(_call, device, fn)
    return results


def _call(device: str, fn: Callable[[], Any]) -> Any:
    with tf.device(device):
        result = fn()
    return tf.nest.map_structure(lambda x: x.numpy() if tf.is_tensor(x) else x, result)
