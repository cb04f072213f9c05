"""Causes of TensorFlow's errors, read from the class and the text of an error.

TensorFlow has no public way to tell why a call on another task failed. The errors for a server that
is down, a replaced worker and a lost tensor differ only in their texts. No other module of `het_tf`
reads these texts. Checked with TensorFlow 2.21. Without this module, errors would not name the task
that is down, and steps of a lost worker would not run again.
"""

from __future__ import annotations

import enum
import re

import tensorflow as tf

_TASK = re.compile(r"/job:(\w+)/replica:0/task:(\d+)")

# InternalErrors that stand for transport errors. TensorFlow replaces an UnavailableError that an op
# of het_tf returns, and poisons tensors in transit.
_INTERNAL = re.compile(
    r"originally returned (Unavailable|Aborted)Error, and was replaced by InternalError"
    r"|found to be poisoned"
)
# Texts about a device of a task to which this process is not connected.
_UNKNOWN_DEVICE = ("unknown device", "an invalid device", "Client for target /job:")
_LOST_LOOKUP_TABLE = re.compile(r"localhost/\d+.*(LookupTable|LookupInterface)", re.DOTALL)
_NODE = re.compile(r"\{\{node ([^}]*)\}\}")
_LOST_TENSOR = "Unable to find the relevant tensor remote_handle"


class Cause(enum.Enum):
    """Cause of an error.

    Attributes:
      TRANSPORT: a task could not be reached, or a message to it was lost.
      TRANSPORT_OF_OP: an op in a step had a transport error. The task of the step was reachable.
      STALE_HANDLE: a task lacks a tensor that an earlier process at the same address held.
      UNKNOWN_DEVICE: this process is not, or no longer, connected to the task of the device.
      LOST_LOOKUP_TABLE: a lookup table from before this process connected is lost.
      OTHER: anything else, such as an invalid argument.
    """

    TRANSPORT = enum.auto()
    TRANSPORT_OF_OP = enum.auto()
    STALE_HANDLE = enum.auto()
    UNKNOWN_DEVICE = enum.auto()
    LOST_LOOKUP_TABLE = enum.auto()
    OTHER = enum.auto()


def cause_of(error: BaseException) -> Cause:
    """Returns the cause of an error that TensorFlow raised."""
    text = str(error)
    if isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)):
        return Cause.TRANSPORT
    if isinstance(error, tf.errors.InternalError) and _INTERNAL.search(text):
        return Cause.TRANSPORT_OF_OP
    if isinstance(error, tf.errors.InvalidArgumentError) and _LOST_TENSOR in text:
        return Cause.STALE_HANDLE
    if isinstance(error, tf.errors.OpError) and any(words in text for words in _UNKNOWN_DEVICE):
        return Cause.UNKNOWN_DEVICE
    if isinstance(error, tf.errors.NotFoundError) and _LOST_LOOKUP_TABLE.search(text):
        return Cause.LOST_LOOKUP_TABLE
    return Cause.OTHER


def names_job(error: BaseException, job: str) -> bool:
    """Whether the text of an error names a task of a job ("ps" or "worker")."""
    return f"/job:{job}" in str(error)


def tasks_named(error: BaseException) -> set[tuple[str, int]]:
    """Returns the tasks that the text of an error names, as pairs of job and index."""
    return {(job, int(index)) for job, index in _TASK.findall(str(error))}


def node_named(error: BaseException) -> str:
    """Returns the first graph node that the text of an error names, or an empty string."""
    found = _NODE.search(str(error))
    return found[1] if found else ""
