"""Making anew what was on a parameter server that was lost and came back.

The server's new process has none of the variables and tables of the old one. Those that this
process still refers to are made again, in place: a variable with zeros, a table without rows, for a
checkpoint to fill. Functions that were traced before go on using the old ones: whoever keeps some
has to make them anew.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from het_tf.runtime.broadcast import cache_devices, cluster_devices
from het_tf.tables.table import EmbeddingTable
from het_tf.tables.worker_cache import WorkerCache

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
    return isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)) or (
        # Of a worker that TensorFlow has still to take back.
        isinstance(error, tf.errors.InvalidArgumentError) and "unknown device" in error.message
    )


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


class Earlier:
    """What there was before this process connected to its servers, such as to those of a cluster
    that was closed.

    It is not on them, though its devices may have the same names. TensorFlow has freed those: who
    asks a variable for its device ends with a segmentation fault.
    """

    def __init__(self) -> None:
        """Takes note of all that there is. It is held weakly."""
        self._refs = {id(each): weakref.ref(each) for each in _alive()}

    def __contains__(self, each: Any) -> bool:
        ref = self._refs.get(id(each))
        return ref is not None and ref() is each


def make_again(devices: Sequence[str], earlier: Earlier) -> None:
    """Makes the variables and the shards of tables anew that were on the devices.

    Args:
      devices: of servers.
      earlier: what was made before this process connected to them.
    """
    for each in _alive():
        if each in earlier:
            continue
        if isinstance(each, EmbeddingTable):
            _tried(lambda table=each: table.make_again(devices))
        elif isinstance(each, WorkerCache):
            each.forget_functions()
        elif each.handle.device in devices:
            # There is no public way to give a variable another handle, and Keras's optimizers know
            # their variables by identity.
            each._handle = _tried(lambda variable=each: _zeros_like(variable).handle)


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


def _alive() -> list[Any]:
    """The tables, their caches, and the variables that have a handle of their own."""

    def is_one(each: Any) -> bool:
        # By type(): isinstance() would run code of proxies.
        if issubclass(type(each), (EmbeddingTable, WorkerCache)):
            return True
        return issubclass(type(each), tf.Variable) and isinstance(
            vars(each).get("_handle"), tf.Tensor
        )

    return [each for each in gc.get_objects() if is_one(each)]
