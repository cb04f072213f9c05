"""Uses of TensorFlow symbols that are not public and have no public substitute.

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

# Resource variable whose subclass provides the handle. `tf.Variable` always creates a new handle.
# Without this class, a replica of a variable could not replace the variable in Keras.
ResourceVariable = BaseResourceVariable

_thread = threading.local()


def use_own_executor() -> None:
    """Gives the calling thread its own executor (`executor.new_executor`), if it has none.

    The only public way to another executor, `tf.experimental.async_scope`, makes ops asynchronous.
    With the shared executor, a thread waits for the ops of all other threads.
    """
    if not hasattr(_thread, "executor"):
        _thread.executor = executor.new_executor(enable_async=False)
        context.context().executor = _thread.executor


def finish_own_executor() -> None:
    """Waits for the ops of the calling thread's own executor. Drops the errors of the ops."""
    with contextlib.suppress(tf.errors.OpError):
        _thread.executor.wait()
    _thread.executor.clear_error()


def reconnect() -> None:
    """Connects to the tasks of the cluster again, after some processes were replaced.

    Uses `context.update_server_def`. `tf.config.experimental_connect_to_cluster` would start
    another server in this process, at another address.
    """
    context.update_server_def(context.get_server_def())


def connected_addresses() -> dict[tuple[str, int], str]:
    """Returns the addresses of the connected tasks by job and index (`get_server_def`).

    Without them, a strategy could not tell that a later one has connected to another cluster.
    """
    connected = context.get_server_def()
    jobs = [] if connected is None else connected.cluster.job
    return {(job.name, index): address for job in jobs for index, address in job.tasks.items()}


def identity_of(variable: tf.Variable) -> dict[str, Any]:
    """Returns `ResourceVariable` arguments that give a new variable the identity of `variable`.

    Keras optimizers find the slots of a variable by its `_unique_id`.
    """
    return {
        "distribute_strategy": variable._distribute_strategy,
        "unique_id": variable._unique_id,
    }


def replace_handle(variable: tf.Variable, handle: tf.Tensor) -> None:
    """Replaces the handle of a variable (`_handle`), whose old handle was lost with its process.

    A new variable cannot replace the old one, because Keras optimizers find their variables by
    identity.
    """
    variable._handle = handle


def has_own_handle(variable: tf.Variable) -> bool:
    """Whether a variable is a single resource (`_handle`), not composed of other variables.

    Recovery of a lost server replaces the handles of such variables (`replace_handle`).
    """
    return isinstance(vars(variable).get("_handle"), tf.Tensor)


def change_class(instance: Any, new_class: type) -> None:
    """Changes the class of an instance to a subclass of its class.

    `tf.distribute` has no way to choose the class of a strategy's distributed datasets.
    """
    instance.__class__ = new_class


class SameCheckpointNode:
    """Mix-in for a wrapper. `tf.train.Checkpoint` saves and restores the wrapped object instead.

    Otherwise the wrapper would add a level to the names of the wrapped object's variables, and
    checkpoints written without the wrapper could not be restored. List the mix-in first.
    """

    def checkpoint_node(self) -> Any:
        """Returns the wrapped object, or None if there is none yet."""
        raise NotImplementedError

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        return self.checkpoint_node()._trackable_children(save_type, **kwargs)

    def _lookup_dependency(self, name: str, *args: Any) -> Any:
        node = self.checkpoint_node()
        if node is None:
            return super()._lookup_dependency(name, *args)  # type: ignore[misc]
        return node._lookup_dependency(name, *args)


class CheckpointHooks:
    """Mix-in for objects that act when `tf.train.Checkpoint` saves or restores them.

    TensorFlow has no public way to add a part to an object, or to call an object before a restore.
    Without this class, layers in lists would be missing in checkpoints, and a restore would start
    before workers have sent their updates. List the mix-in first.
    """

    def checkpoint_children(self, save_type: str) -> dict[str, Any]:
        """Returns more parts of this object by name. `save_type`: "checkpoint" or "savedmodel"."""
        del save_type
        return {}

    def before_checkpoint_restore(self, path: str) -> None:
        """Called for all objects before any object is restored."""

    def before_checkpoint_copy(self) -> None:
        """Called before an asynchronous save, which copies all variables and writes later."""

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        added = self.checkpoint_children(save_type)
        return {**added, **super()._trackable_children(save_type, **kwargs)}  # type: ignore[misc]

    def _checkpoint_adapter(self, path: str) -> Any:
        self.before_checkpoint_restore(path)
        return super()._checkpoint_adapter(path)  # type: ignore[misc]

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        self.before_checkpoint_copy()
        super()._copy_trackable_to_cpu(object_map)  # type: ignore[misc]


def register_checkpoint_saver(
    name: str,
    kind: type,
    save: Callable[[Mapping[str, Any], tf.Tensor], list[tf.Tensor] | None],
    restore: Callable[[Mapping[str, Any], tf.Tensor], None],
) -> None:
    """Lets objects of a class write and read their own part of a `tf.train.Checkpoint`.

    The public API can only save tensors that an object returns. All rows would then pass through
    the coordinator.

    Args:
      name: name of the saver.
      kind: class of the objects.
      save: called with the objects by name and the checkpoint prefix. Returns prefixes.
      restore: called with the objects by name and the checkpoint prefix.
    """
    registration.register_checkpoint_saver(
        package="het_tf",
        name=name,
        predicate=lambda trackable: isinstance(trackable, kind),
        save_fn=save,
        restore_fn=restore,
    )
