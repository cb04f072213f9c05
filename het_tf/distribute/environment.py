"""gRPC settings that every process of the cluster needs, as environment variables.

TensorFlow reads them when it opens its first channel, so they must be set before that.
"""

from __future__ import annotations

import os

# A host that vanished, or a process that hangs, answers no call and closes no connection. gRPC
# finds out by pings: one after so long without an answer to a running call, and the connection
# counts as lost when the ping stays unanswered. (A process that was killed on a live host is
# noticed at once, its kernel refuses the connection.)
#
# A gRPC server closes a connection on which pings come more often than every 5 minutes while it has
# nothing to send, and TensorFlow's cannot be told otherwise. So servers, whose calls to each other
# may wait for as long as a step takes, ping more rarely than that. The training program must notice
# a lost worker soon; het_tf.distribute.heartbeat keeps its connections from falling silent.
_KEEPALIVE_TIME_MS = {"chief": 10_000, "server": 310_000}
_KEEPALIVE_TIMEOUT_MS = 20_000

_SETTINGS = {
    # "Fail at once when the peer is down" is the caller's choice; TensorFlow's default is to wait
    # for the peer forever. https://www.tensorflow.org/tutorials/distribute/parameter_server_training
    "GRPC_FAIL_FAST": "use_caller",
    # gRPC would ask the proxy of http_proxy or https_proxy for every task, for localhost too.
    "grpc_proxy": "",
}
_OPTIONS = "TF_GRPC_DEFAULT_OPTIONS"


def grpc_options(role: str) -> str:
    """The default of TF_GRPC_DEFAULT_OPTIONS in a "chief" or a "server"."""
    return (
        f"grpc.keepalive_time_ms={_KEEPALIVE_TIME_MS[role]},"
        f"grpc.keepalive_timeout_ms={_KEEPALIVE_TIMEOUT_MS}"
    )


def set_grpc_defaults(role: str) -> None:
    """Sets the gRPC variables in `os.environ` that nobody else has set.

    Args:
      role: "chief" or "server".
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    # A server that a chief started has inherited the chief's.
    if os.environ.get(_OPTIONS, "") in ("", *map(grpc_options, _KEEPALIVE_TIME_MS)):
        os.environ[_OPTIONS] = grpc_options(role)
