"""Variables that live on whichever worker a function runs, in the place of those on the servers.

TensorFlow has no public class for a variable of a given handle. `BaseResourceVariable` is that
class: reads are watched by gradient tapes, assignments are ops on the handle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable


class ReplicaVariable(BaseResourceVariable):
    """Stands for a variable on a parameter server: Keras takes it for that one.

    Attributes:
      assigned: whether an op was built that writes it.
    """

    def __init__(self, native: tf.Variable, find_handle: Callable[[], tf.Tensor]):
        """Describes the variable.

        Args:
          native: the one on the parameter server.
          find_handle: gives the handle to use in the graph that is being built.
        """
        self._find_handle = find_handle
        self.assigned = False
        super().__init__(
            trainable=native.trainable,
            shape=native.shape,
            dtype=native.dtype,
            distribute_strategy=native._distribute_strategy,
            unique_id=native._unique_id,  # Keras' optimizers find their slots by it.
            handle_name=native.name.split(":")[0],
            in_graph_mode=False,
        )

    @property
    def handle(self) -> tf.Tensor:
        """The handle in the present graph."""
        return self._find_handle()

    @property
    def device(self) -> str:
        """Not known when a graph is built: that of the worker that runs it."""
        return ""


def _noting(name: str) -> Any:
    method = getattr(BaseResourceVariable, name)

    @functools.wraps(method)
    def note(self: ReplicaVariable, *args: Any, **kwargs: Any) -> Any:
        self.assigned = True
        return method(self, *args, **kwargs)

    return note


for _name in (
    *("assign", "assign_add", "assign_sub", "batch_scatter_update"),
    *(f"scatter_{verb}" for verb in ("add", "sub", "max", "min", "mul", "div", "update")),
    *(f"scatter_nd_{verb}" for verb in ("add", "sub", "update", "max", "min")),
):
    setattr(ReplicaVariable, _name, _noting(_name))
