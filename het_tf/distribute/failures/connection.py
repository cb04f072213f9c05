"""Connecting this process to a cluster so that what was made before goes on working.

TensorFlow gives a process new devices when it connects. `ParameterServerStrategy` also gives them
the name /job:chief, so that datasets, variables and tables of before are on a device that is gone
("unknown device"). Under the name /job:localhost, which they have before, all of it can be used
except for lookup tables: TensorFlow finds these by name among what the device has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import tensorflow as tf

from het_tf import ops
from het_tf.compat.tensorflow_internals import connected_addresses
from het_tf.runtime.broadcast import COORDINATOR

# They stay until this process ends: models are used after their strategy is gone.
_handles: list[tf.Tensor] = []


def task_devices(jobs: Sequence[str] = ("ps", "worker")) -> list[str]:
    """All devices of the tasks of some jobs, GPUs too."""
    names = [device.name for device in tf.config.list_logical_devices()]
    return [name for name in names if tf.DeviceSpec.from_string(name).job in jobs]


def own_what_is_on(devices: Sequence[str], address: str) -> None:
    """Has all resources that this program makes by name on the devices end with it.

    Those of another program with the same address end now.

    Args:
      devices: of servers.
      address: where this program listens, by the cluster's specification; empty: it has no
        address of its own.
    """
    for device in devices:
        # A server that has not loaded the ops has nothing of theirs.
        with contextlib.suppress(tf.errors.NotFoundError), tf.init_scope(), tf.device(device):
            _handles.append(ops.program_handle(address=address))


def with_local_chief(cluster: tf.train.ClusterSpec) -> tf.train.ClusterSpec:
    """The cluster with its chief, if it names one, under the name of this process's devices."""
    jobs = cluster.as_dict()
    if "chief" in jobs:
        jobs[COORDINATOR] = jobs.pop("chief")
    return tf.train.ClusterSpec(jobs)


def is_connected_to(addresses: Mapping[tuple[str, int], str]) -> bool:
    """Whether this process is connected to tasks at these addresses, by job and index."""
    connected = connected_addresses()
    return all(connected.get(task) == address for task, address in addresses.items())


def lookup_table_error(what: str) -> ValueError:
    """An error for a lookup table that was made before the strategy.

    Args:
      what: the layer or op that uses the table.
    """
    return ValueError(
        f"{what} has a lookup table that was made before the strategy. TensorFlow dropped the table"
        " when the strategy connected this process to the cluster. Make the layer or table, and the"
        " datasets that use it, after `strategy = HetParameterServerStrategy(...)`."
    )
