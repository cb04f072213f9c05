"""Causes of TensorFlow's errors, read from their classes and texts.

TensorFlow has no public way to tell why a call on another task failed: a server that is down, a
worker that was replaced and a tensor that went with its process differ only in their texts. No
other module of `het_tf` reads these texts. Checked with TensorFlow 2.21. Without this module errors
would not name the task that is down, and a step of a lost worker would not run again.
"""

from __future__ import annotations

import enum
import re

import tensorflow as tf

_TASK = re.compile(r"/job:(\w+)/replica:0/task:(\d+)")

# InternalErrors that stand for an error of transport: TensorFlow replaces an UnavailableError that
# one of our ops returns, and it poisons tensors that were under way.
_INTERNAL = re.compile(
    r"originally returned (Unavailable|Aborted)Error, and was replaced by InternalError"
    r"|found to be poisoned"
)
# Texts about a device of a task that this process is not connected to.
_UNKNOWN_DEVICE = ("unknown device", "an invalid device", "Client for target /job:")
_LOST_LOOKUP_TABLE = re.compile(r"localhost/\d+.*(LookupTable|LookupInterface)", re.DOTALL)
_NODE = re.compile(r"\{\{node ([^}]*)\}\}")
_LOST_TENSOR = "Unable to find the relevant tensor remote_handle"


class Cause(enum.Enum):
    """The cause of an error.

    Attributes:
      TRANSPORT: a task could not be reached, or a message to it was lost.
      TRANSPORT_OF_OP: the same of an op within a step, and not of the task that ran the step.
      STALE_HANDLE: a task lacks a tensor that the process before it at its address kept.
      UNKNOWN_DEVICE: this process is not connected to the device's task, or not any more.
      LOST_LOOKUP_TABLE: a lookup table is gone that was made before this process connected.
      OTHER: anything else, such as an invalid argument.
    """

    TRANSPORT = enum.auto()
    TRANSPORT_OF_OP = enum.auto()
    STALE_HANDLE = enum.auto()
    UNKNOWN_DEVICE = enum.auto()
    LOST_LOOKUP_TABLE = enum.auto()
    OTHER = enum.auto()


def cause_of(error: BaseException) -> Cause:
    """The cause of an error that TensorFlow raised."""
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
    """Whether the text of an error names a task of that job ("ps" or "worker")."""
    return f"/job:{job}" in str(error)


def tasks_named(error: BaseException) -> set[tuple[str, int]]:
    """The tasks that the text of an error names: job and index."""
    return {(job, int(index)) for job, index in _TASK.findall(str(error))}


def node_named(error: BaseException) -> str:
    """The node of a graph that the text of an error names first; empty: the text names none."""
    found = _NODE.search(str(error))
    return found[1] if found else ""
