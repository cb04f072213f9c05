"""Recovery of the variables and tables of a parameter server that was lost and is back.

The server's new process has no variables and tables. Recovery recreates those that this process
still refers to, in place: variables with zeros, and tables without rows. A restore of a checkpoint
then fills them. Functions that were traced earlier refer to the lost objects. Their owners must
trace them again.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from het_tf.compat.errors import Cause, cause_of
from het_tf.compat.tensorflow_internals import has_own_handle, replace_handle
from het_tf.runtime.broadcast import cache_devices, cluster_devices
from het_tf.tables.table import EmbeddingTable

_PAUSE = 1.0  # seconds between attempts to reach a server that is back


def wait_until_servers_are_reached(
    devices: Sequence[str], is_down: Callable[[str], bool], until: float
) -> None:
    """Waits until this process, all live workers and the other servers can reach some servers.

    Args:
      devices: devices of the servers.
      is_down: returns whether the task of a device does not answer.
      until: end of the wait, in the time of `time.monotonic`.

    Raises:
      tf.errors.OpError: a task could not reach a server in time.
    """
    # The function reads and assigns variables, so that it must run on the servers.
    variables = {}
    for device in cluster_devices("ps"):
        with tf.init_scope(), tf.device(device):
            variables[device] = tf.Variable(0.0, trainable=False)

    @tf.function(autograph=False)
    def reach() -> tf.Tensor:
        # Every op has an explicit device, so that servers send tensors to each other directly.
        lost, assigned = [], []
        for device in devices:
            with tf.device(device):
                lost.append(variables[device].read_value())
        for device, variable in variables.items():
            with tf.device(device):
                assigned.append(variable.assign(tf.add_n(lost)))
        return tf.add_n(assigned)

    for device in cache_devices():

        def reach_from(device: str = device) -> None:
            with tf.device(device):
                reach().numpy()

        _repeat(reach_from, functools.partial(is_down, device), until)


def wait_until_program_is_reached(is_lost: Callable[[str], bool], until: float) -> bool:
    """Waits until every parameter server can reach this process, or a server is lost.

    TensorFlow's checkpoints need this, because the servers fetch the path from this process.

    Args:
      is_lost: returns whether the server of a device is down or was restarted.
      until: end of the wait, in the time of `time.monotonic`.

    Returns:
      Whether every server can reach this process.

    Raises:
      tf.errors.OpError: a server could not reach this process in time.
    """
    servers = cluster_devices("ps")

    @tf.function(autograph=False)
    def reach(number: tf.Tensor) -> list[tf.Tensor]:
        # The servers must fetch the argument from this process.
        sums = []
        for server in servers:
            with tf.device(server):
                sums.append(number + 1.0)
        return sums

    return _repeat(
        lambda: [float(total) for total in reach(tf.constant(0.0))],
        lambda: any(map(is_lost, servers)),
        until,
    )


def _repeat(call: Callable[[], Any], is_lost: Callable[[], bool], until: float) -> bool:
    """Retries `call` until it succeeds or `is_lost()` is true. Returns whether it succeeded."""
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
    # UNKNOWN_DEVICE: TensorFlow has not yet connected to a restarted worker again.
    return cause_of(error) in (Cause.TRANSPORT, Cause.UNKNOWN_DEVICE)


# Number of attempts of a call on a server that answers. TensorFlow may raise, in this call, the
# error of another thread's call on a lost server.
_TRIES = 3

T = TypeVar("T")


class Marks:
    """A tensor on every parameter server, to detect restarts. A new process lacks the tensor."""

    def __init__(self) -> None:
        """Places a tensor on every parameter server."""
        self._marks = {device: _mark(device) for device in cluster_devices("ps")}

    def any_replaced(self) -> bool:
        """Whether a server was restarted."""
        return not all(map(_is_there, self._marks.values()))

    def take_replaced(self, until: float) -> list[str]:
        """Returns the devices of servers that were restarted, and places new tensors on them.

        Args:
          until: time up to which a server may refuse, in the time of `time.monotonic`.

        Raises:
          tf.errors.UnavailableError: a server still refuses at that time.
        """
        replaced = [device for device, mark in self._marks.items() if not _is_there(mark)]
        for device in replaced:
            while True:
                try:
                    self._marks[device] = _tried(functools.partial(_mark, device))
                    break
                except tf.errors.UnavailableError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(_PAUSE)
        return replaced


class OnServers:
    """The variables and tables on the parameter servers of a strategy. Holds weak references."""

    def __init__(self) -> None:
        """Starts without variables and tables."""
        self._variables: dict[int, weakref.ref[tf.Variable]] = {}
        self._tables: weakref.WeakSet[EmbeddingTable] = weakref.WeakSet()

    def note_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        """Creates and registers a variable. A creator for `tf.variable_creator_scope`."""
        variable = next_creator(**kwargs)
        forget = functools.partial(self._variables.pop, id(variable))
        self._variables[id(variable)] = weakref.ref(variable, lambda _: forget(None))
        return variable

    def note_table(self, table: EmbeddingTable) -> None:
        """Registers a table."""
        self._tables.add(table)

    def make_again(self, devices: Sequence[str]) -> None:
        """Recreates the variables and the shards of tables on some devices."""
        for table in tuple(self._tables):
            _tried(functools.partial(table.make_again, devices))
        for variable in [reference() for reference in tuple(self._variables.values())]:
            if variable is None or not has_own_handle(variable):
                continue
            if variable.handle.device in devices:
                handle = _tried(functools.partial(_zeros_like, variable)).handle
                replace_handle(variable, handle)


def _zeros_like(variable: tf.Variable) -> tf.Variable:
    with tf.init_scope(), tf.device(variable.handle.device):
        zeros = tf.zeros(variable.shape.as_list(), variable.dtype)
        return tf.Variable(zeros, trainable=False)


def _tried(fn: Callable[[], T]) -> T:
    """Calls `fn` and returns its result. Retries after the first errors (see `_TRIES`)."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(tf.errors.OpError):
            return fn()
        time.sleep(0.1)
    return fn()


def _mark(device: str) -> tf.Tensor:
    with tf.init_scope(), tf.device(device):
        return tf.identity(tf.constant(0))


def _is_there(mark: tf.Tensor) -> bool:
    def read() -> int:
        with tf.device(mark.device):
            return int(tf.identity(mark))

    try:
        return _tried(read) == 0
    except tf.errors.OpError:
        return False
