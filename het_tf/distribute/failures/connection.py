"""Connecting this process to a cluster so that what was made before goes on working.

TensorFlow gives a process new devices when it connects. `ParameterServerStrategy` also gives them
the name /job:chief, so that datasets, variables and tables of before are on a device that is gone
("unknown device"). Under the name /job:localhost, which they have before, all of it can be used
except for lookup tables, which are found by name among what the device has: those are made again,
with the same contents and under the same name.
"""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

# There is no public way to connect again under the address that this process has.
from tensorflow.python.eager import context

from het_tf import ops
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


# The classes of tables that Keras's layers and tf.lookup are made of.
_TABLES = (
    tf.lookup.StaticHashTable,
    tf.lookup.experimental.MutableHashTable,
    tf.lookup.experimental.DenseHashTable,
)

# Weakly, the variables that this process had when it connected first; None: it did not yet.
_variables_before: list[weakref.ref[tf.Variable]] | None = None


def is_of_before(variable: tf.Variable) -> bool:
    """Whether workers cannot read a variable, since it was made before this process connected."""
    return any(before() is variable for before in _variables_before or ())


def with_local_chief(cluster: tf.train.ClusterSpec) -> tf.train.ClusterSpec:
    """The cluster with its chief, if it names one, under the name of this process's devices."""
    jobs = cluster.as_dict()
    if "chief" in jobs:
        jobs[COORDINATOR] = jobs.pop("chief")
    return tf.train.ClusterSpec(jobs)


def reconnect() -> None:
    """Connects to servers of the cluster that are other processes than before."""
    context.update_server_def(context.get_server_def())


def is_connected_to(addresses: Mapping[tuple[str, int], str]) -> bool:
    """Whether this process is connected to tasks at these addresses, by job and index."""
    connected = context.get_server_def()
    jobs = {} if connected is None else {job.name: job.tasks for job in connected.cluster.job}
    return all(jobs.get(job, {}).get(task) == at for (job, task), at in addresses.items())


@contextlib.contextmanager
def tables_kept() -> Iterator[None]:
    """Within it this process connects; its lookup tables are there again afterwards.

    Those that Python still refers to.
    """
    global _variables_before
    kept = [
        (table, *found)
        for table in _of_types(_TABLES)
        if (found := _name_and_rows(table)) is not None
    ]
    if _variables_before is None:
        _variables_before = [weakref.ref(variable) for variable in _of_types(tf.Variable)]
    yield
    with tf.device(f"/job:{COORDINATOR}/replica:0/task:0/device:CPU:0"):
        for table, name, rows in kept:
            _make_again(table, name, rows)


def _of_types(types: Any) -> list[Any]:
    # By type(): isinstance() would run code of proxies.
    return [each for each in gc.get_objects() if issubclass(type(each), types)]


def _name_and_rows(table: Any) -> tuple[dict[str, str], tuple[tf.Tensor, tf.Tensor]] | None:
    """What to ask for to get a table, its keys and its values; None if it needs no keeping."""
    try:
        handle = table.resource_handle
        if not isinstance(handle, tf.Tensor) or f"/job:{COORDINATOR}" not in handle.device:
            return None
        # There is no other way to ask a handle for its name.
        found = re.search(r'name="([^"]*)".*?container="([^"]*)"', repr(handle))
        if found is None or found[2] == "Anonymous":  # A handle that holds the table itself.
            return None
        return {"shared_name": found[1], "container": found[2]}, table.export()
    except (AttributeError, tf.errors.OpError):
        return None  # Its constructor or its initializer failed, so nobody can use it.


def _make_again(table: Any, name: dict[str, str], rows: tuple[tf.Tensor, tf.Tensor]) -> None:
    keys, values = rows
    types = {"key_dtype": table.key_dtype, "value_dtype": table.value_dtype}
    if isinstance(table, tf.lookup.StaticHashTable):
        handle = tf.raw_ops.HashTableV2(**types, **name)
        tf.raw_ops.InitializeTableV2(table_handle=handle, keys=keys, values=values)
        return
    shape = values.shape[1:]
    if isinstance(table, tf.lookup.experimental.DenseHashTable):
        # What it was made with has no public name. It exports its buckets, and imports them.
        marks = {"empty_key": table._empty_key, "deleted_key": table._deleted_key}
        handle = tf.raw_ops.MutableDenseHashTableV2(
            **{mark: tf.constant(key, table.key_dtype) for mark, key in marks.items()},
            value_dtype=table.value_dtype,
            value_shape=table._value_shape,
            **name,
        )
    elif shape.rank:
        handle = tf.raw_ops.MutableHashTableOfTensorsV2(**types, **name, value_shape=shape)
    else:
        handle = tf.raw_ops.MutableHashTableV2(**types, **name)
    tf.raw_ops.LookupTableImportV2(table_handle=handle, keys=keys, values=values)
