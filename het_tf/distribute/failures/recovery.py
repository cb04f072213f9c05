"""Making anew what was on a parameter server that was lost and came back.

The server's new process has none of the variables and tables of the old one. Those that this
process still refers to are made again, in place: a variable with zeros, a table without rows, for a
checkpoint to fill. Functions that were traced before go on using the old ones: whoever keeps some
has to make them anew.
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

_PAUSE = 1.0  # seconds between attempts to use a server that is back


def wait_until_servers_are_reached(
    devices: Sequence[str], is_down: Callable[[str], bool], until: float
) -> None:
    """Waits until this process, every worker that lives and the other servers reach some servers.

    Args:
      devices: of the servers.
      is_down: whether the task of a device does not answer.
      until: of `time.monotonic`.

    Raises:
      tf.errors.OpError: one of them did not.
    """
    # Variables, so that the function has to go there.
    variables = {}
    for device in cluster_devices("ps"):
        with tf.init_scope(), tf.device(device):
            variables[device] = tf.Variable(0.0, trainable=False)

    @tf.function(autograph=False)
    def reach() -> tf.Tensor:
        # Every op has its device: by way of the caller's a server would reach none of the others.
        lost, assigned = [], []
        for device in devices:
            with tf.device(device):
                lost.append(variables[device].read_value())
        for device, each in variables.items():
            with tf.device(device):
                assigned.append(each.assign(tf.add_n(lost)))
        return tf.add_n(assigned)

    for device in cache_devices():

        def reach_from(device: str = device) -> None:
            with tf.device(device):
                reach().numpy()

        _repeat(reach_from, lambda device=device: is_down(device), until)


def wait_until_program_is_reached(is_lost: Callable[[str], bool], until: float) -> bool:
    """Waits until every parameter server reaches this process, or one of them is lost.

    TensorFlow's own part of a checkpoint needs it: servers ask this process for the path.

    Args:
      is_lost: whether the server of a device is down, or another process than before.
      until: of `time.monotonic`.

    Returns:
      Whether all of them reach it.

    Raises:
      tf.errors.OpError: one of them did not.
    """
    servers = cluster_devices("ps")

    @tf.function(autograph=False)
    def reach(number: tf.Tensor) -> list[tf.Tensor]:
        # An argument, which the servers have to ask for.
        made = []
        for server in servers:
            with tf.device(server):
                made.append(number + 1.0)
        return made

    return _repeat(
        lambda: [float(each) for each in reach(tf.constant(0.0))],
        lambda: any(map(is_lost, servers)),
        until,
    )


def _repeat(call: Callable[[], Any], is_lost: Callable[[], bool], until: float) -> bool:
    """Calls until it does not fail, or who is called is lost; returns whether it did not fail."""
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
    # An unknown device is that of a worker which TensorFlow has still to connect to again.
    return cause_of(error) in (Cause.TRANSPORT, Cause.UNKNOWN_DEVICE)


# Times that something is tried on a server that answers: TensorFlow may give what runs there the
# error of what another thread ran on one that is gone.
_TRIES = 3

T = TypeVar("T")


class Marks:
    """A tensor on each parameter server, which is gone when the server's process is."""

    def __init__(self) -> None:
        """Puts them there."""
        self._marks = {device: _mark(device) for device in cluster_devices("ps")}

    def any_replaced(self) -> bool:
        """Whether a server is another process than before."""
        return not all(map(_is_there, self._marks.values()))

    def take_replaced(self, until: float) -> list[str]:
        """The devices of servers that are other processes than before; they are marked again.

        Args:
          until: of `time.monotonic`: so long they may refuse.

        Raises:
          tf.errors.UnavailableError: they did.
        """
        replaced = [device for device, mark in self._marks.items() if not _is_there(mark)]
        for device in replaced:
            while True:
                try:
                    self._marks[device] = _tried(lambda on=device: _mark(on))
                    break
                except tf.errors.UnavailableError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(_PAUSE)
        return replaced


class OnServers:
    """The variables and tables that the parameter servers of a strategy hold."""

    def __init__(self) -> None:
        """Nothing is there yet. What is noted is held weakly."""
        self._variables: dict[int, weakref.ref[tf.Variable]] = {}
        self._tables: weakref.WeakSet[EmbeddingTable] = weakref.WeakSet()

    def note_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        """A creator for `tf.variable_creator_scope`, which notes the variables that are made."""
        variable = next_creator(**kwargs)
        forget = functools.partial(self._variables.pop, id(variable))
        self._variables[id(variable)] = weakref.ref(variable, lambda _: forget(None))
        return variable

    def note_table(self, table: EmbeddingTable) -> None:
        """Notes a table, and with it the caches of its rows."""
        self._tables.add(table)

    def make_again(self, devices: Sequence[str]) -> None:
        """Makes the variables and the shards of tables anew that were on the devices of servers."""
        for table in tuple(self._tables):
            _tried(lambda table=table: table.make_again(devices))
        for variable in [each() for each in tuple(self._variables.values())]:
            if variable is None or not has_own_handle(variable):
                continue
            if variable.handle.device in devices:
                handle = _tried(lambda variable=variable: _zeros_like(variable).handle)
                replace_handle(variable, handle)


def _zeros_like(variable: tf.Variable) -> tf.Variable:
    with tf.init_scope(), tf.device(variable.handle.device):
        zeros = tf.zeros(variable.shape.as_list(), variable.dtype)
        return tf.Variable(zeros, trainable=False)


def _tried(fn: Callable[[], T]) -> T:
    """What `fn` returns; its first errors may be another's."""
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
