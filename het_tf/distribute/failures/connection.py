"""Connection of this process to a cluster. Objects that were made before it keep working.

TensorFlow gives a process new devices when the process connects to a cluster.
`ParameterServerStrategy` also renames them to /job:chief. Datasets, variables and tables from
before the connection are then on an unknown device. het_tf keeps the name /job:localhost, which the
devices have before the connection. All earlier objects then keep working except lookup tables,
because TensorFlow looks up lookup tables by name on the new device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import tensorflow as tf

from het_tf import ops
from het_tf.compat.tensorflow_internals import connected_addresses
from het_tf.runtime.broadcast import COORDINATOR

# The handles stay until this process ends, because models outlive their strategy.
_handles: list[tf.Tensor] = []


def task_devices(jobs: Sequence[str] = ("ps", "worker")) -> list[str]:
    """Returns all devices of the tasks of some jobs, including GPUs."""
    names = [device.name for device in tf.config.list_logical_devices()]
    return [name for name in names if tf.DeviceSpec.from_string(name).job in jobs]


def own_what_is_on(devices: Sequence[str], address: str) -> None:
    """Binds named resources of this program on some devices to the program's lifetime.

    The servers free the resources when this program ends. This call also frees the resources of
    another program with the same address.

    Args:
      devices: devices of servers.
      address: address of this program in the cluster spec. Empty: it has no address.
    """
    for device in devices:
        # A server that has not loaded the ops has no such resources.
        with contextlib.suppress(tf.errors.NotFoundError), tf.init_scope(), tf.device(device):
            _handles.append(ops.program_handle(address=address))


def with_local_chief(cluster: tf.train.ClusterSpec) -> tf.train.ClusterSpec:
    """Returns the cluster with its chief, if any, renamed to the job of this process's devices."""
    jobs = cluster.as_dict()
    if "chief" in jobs:
        jobs[COORDINATOR] = jobs.pop("chief")
    return tf.train.ClusterSpec(jobs)


def is_connected_to(addresses: Mapping[tuple[str, int], str]) -> bool:
    """Whether this process is connected to tasks at these addresses, given by job and index."""
    connected = connected_addresses()
    return all(connected.get(task) == address for task, address in addresses.items())


def lookup_table_error(what: str) -> ValueError:
    """Returns an error about a lookup table that was made before the strategy.

    Args:
      what: name of the layer or op that uses the table.
    """
    return ValueError(
        f"{what} has a lookup table that was made before the strategy. TensorFlow dropped the table"
        " when the strategy connected this process to the cluster. Make the layer or table, and the"
        " datasets that use it, after `strategy = HetParameterServerStrategy(...)`."
    )
