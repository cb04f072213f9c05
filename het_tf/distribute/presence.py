"""What this program has on servers ends with it, however it ends.

TensorFlow's servers forget a program when they have heard nothing from it for ten minutes. With it
goes what its handles own, such as variables; what has a name, as tables and caches do, would stay.
So the program has a handle on every server that owns those (`Het>ProgramHandle`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from het_tf import ops

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
