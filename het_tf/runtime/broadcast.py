"""Running something on every process of the cluster that may hold a cache."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from het_tf.runtime.threads import call_apart

# Seconds between looks at a process that does not answer: it would be waited for without end.
CHECK_INTERVAL = 30.0

# Times that something is called on a process that answers, if another's end has it fail, and the
# seconds until the second of them; each further one comes after twice as long. TensorFlow needs a
# while to leave out a process that ended.
_TRIES = 5
_PAUSE = 0.25

# The job of the training program; see het_tf.distribute.failures.connection.
COORDINATOR = "localhost"


def cluster_devices(job: str) -> list[str]:
    """The CPU devices of the tasks of a job ("ps", "worker" or `COORDINATOR`), by index."""
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    # This process's own devices come without a job.
    own = tf.DeviceSpec(job=COORDINATOR, replica=0, task=0)
    devices = [own.make_merged_spec(tf.DeviceSpec.from_string(name)) for name in names]
    return [d.to_string() for d in sorted(devices, key=lambda d: d.task) if d.job == job]


def cache_devices() -> list[str]:
    """The CPU devices that may have a cache: those of the workers, and this process's."""
    return [*cluster_devices("worker"), *cluster_devices(COORDINATOR)]


def traced_by_device(build_ops: Callable[[], Any]) -> Callable[[], Any]:
    """A function for `visit`: on each device it runs the ops that were built under that one.

    A call of a `tf.function` that traces is counted, and TensorFlow warns of five in a row. These
    are one for each worker, and again after each restart of a server, so they are not counted.
    """
    function = tf.function(build_ops, autograph=False)
    return lambda: function.get_concrete_function()()


def visit(
    devices: Sequence[str],
    fn: Callable[[], Any],
    is_lost: Callable[[str, tf.errors.OpError | None], bool | None],
) -> dict[str, Any]:
    """Calls `fn` under every device, on all of them at once.

    Args:
      devices: CPU devices of tasks.
      fn: a `tf.function`, or a Python function of ops. It is called from other threads.
      is_lost: asked about a device and what `fn` raised there, or about a device and None when
        `fn` has not ended there for another `CHECK_INTERVAL` seconds: whether to go on without it;
        None: call it again, a few times. It may raise something better than the error.

    Returns:
      Device -> what `fn` returned, as NumPy arrays, without the devices that are lost.

    Raises:
      tf.errors.OpError: what `fn` raised on a device that is not lost.
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
