"""The non-public parts of TensorFlow that there is no public way around.

Checked with TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, executor
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable
from tensorflow.python.saved_model import registration

# A resource variable whose handle a subclass provides. `tf.Variable` always makes a handle of its
# own. Without this class, a replica of a variable could not take the variable's place in Keras.
ResourceVariable = BaseResourceVariable

_thread = threading.local()


def use_own_executor() -> None:
    """Gives the calling thread an executor of its own, once.

    `tf.experimental.async_scope` is the only public way to another executor, and it makes ops
    asynchronous. With the shared executor, a thread waits for the ops of all other threads.
    """
    if not hasattr(_thread, "executor"):
        _thread.executor = executor.new_executor(enable_async=False)
        context.context().executor = _thread.executor


def finish_own_executor() -> None:
    """Waits for the ops of the calling thread's own executor, and drops their errors."""
    with contextlib.suppress(tf.errors.OpError):
        _thread.executor.wait()
    _thread.executor.clear_error()


def reconnect() -> None:
    """Connects again to the tasks of the cluster, of which some are other processes than before.

    `tf.config.experimental_connect_to_cluster` would start another server in this process, under
    another address.
    """
    context.update_server_def(context.get_server_def())


def connected_addresses() -> dict[tuple[str, int], str]:
    """The addresses of the tasks that this process is connected to, by job and index."""
    connected = context.get_server_def()
    jobs = [] if connected is None else connected.cluster.job
    return {(job.name, index): address for job in jobs for index, address in job.tasks.items()}


def identity_of(variable: tf.Variable) -> dict[str, Any]:
    """Arguments of `ResourceVariable` with which Keras takes a variable for another one.

    Keras's optimizers find the slots of a variable by its `_unique_id`.
    """
    return {
        "distribute_strategy": variable._distribute_strategy,
        "unique_id": variable._unique_id,
    }


def replace_handle(variable: tf.Variable, handle: tf.Tensor) -> None:
    """Gives a variable another handle.

    The process that held the variable is gone, and its handle with it. Keras's optimizers know
    their variables by identity, so that another variable cannot take the place of this one.
    """
    variable._handle = handle


def has_own_handle(variable: tf.Variable) -> bool:
    """Whether a variable is one resource, and not made of other variables."""
    return isinstance(vars(variable).get("_handle"), tf.Tensor)


def change_class(instance: Any, new_class: type) -> None:
    """Makes an instance one of a subclass of its class.

    `tf.distribute` gives no way to make the distributed datasets of a strategy of another class.
    """
    instance.__class__ = new_class


class SameCheckpointNode:
    """Has `tf.train.Checkpoint` see another object in the place of an instance.

    A wrapper would otherwise add a level to the names of what it wraps, and checkpoints that were
    written without the wrapper would not be found. To be put before the class of the object.
    """

    def checkpoint_node(self) -> Any:
        """Returns the other object; None: there is none yet."""
        raise NotImplementedError

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        return self.checkpoint_node()._trackable_children(save_type, **kwargs)

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        node = self.checkpoint_node()
        if node is None:
            return super()._lookup_dependency(name, *args)  # type: ignore[misc]
        return node._lookup_dependency(name, *args)


def register_checkpoint_saver(
    name: str,
    kind: type,
    save: Callable[[Mapping[str, Any], tf.Tensor], list[tf.Tensor] | None],
    restore: Callable[[Mapping[str, Any], tf.Tensor], None],
) -> None:
    """Has objects of a class write and read their own part of a `tf.train.Checkpoint`.

    Publicly an object can only hand TensorFlow tensors to save, so that all rows would pass through
    the training program.

    Args:
      name: of the saver.
      kind: the class.
      save: called with the objects by name and the prefix of the checkpoint; returns prefixes.
      restore: called with the objects by name and the prefix.
    """
    registration.register_checkpoint_saver(
        package="het_tf",
        name=name,
        predicate=lambda trackable: isinstance(trackable, kind),
        save_fn=save,
        restore_fn=restore,
    )
