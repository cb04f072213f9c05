"""gRPC settings that every process of the cluster needs, as environment variables.

TensorFlow reads them when it opens its first channel, so they must be set before that.
"""

from __future__ import annotations

import os

from het_tf.distribute.health import PROBE_TIMEOUT

# A host that vanished, or a process that hangs, answers no call and closes no connection. gRPC
# finds out by pings: one after so long without an answer to a running call, and the connection
# counts as lost when the ping stays unanswered. A gRPC server, TensorFlow's at least, closes a
# connection on which pings come more often than every 5 minutes while it has nothing to send, as
# while a closure or a step runs. So pings are the last resort: het_tf.distribute.health finds out
# sooner. (A process that was killed on a live host is noticed at once, its kernel refuses the
# connection.)
_KEEPALIVE_TIME_MS = 310_000
_KEEPALIVE_TIMEOUT_MS = 20_000

# Time for one attempt to connect. The kernel accepts a connection for a process that hangs, so only
# this ends an attempt, and whatever waits for it; meanwhile TensorFlow may hold Python's lock. It
# is gRPC's name for it. As long as a probe may take, which is answered in the same way.
_CONNECT_TIMEOUT_MS = round(1000 * PROBE_TIMEOUT)

_SETTINGS = {
    # "Fail at once when the peer is down" is the caller's choice; TensorFlow's default is to wait
    # for the peer forever. https://www.tensorflow.org/tutorials/distribute/parameter_server_training
    "GRPC_FAIL_FAST": "use_caller",
    "TF_GRPC_DEFAULT_OPTIONS": (
        f"grpc.keepalive_time_ms={_KEEPALIVE_TIME_MS},"
        f"grpc.keepalive_timeout_ms={_KEEPALIVE_TIMEOUT_MS},"
        f"grpc.min_reconnect_backoff_ms={_CONNECT_TIMEOUT_MS}"
    ),
    # gRPC would ask the proxy of http_proxy or https_proxy for every task, for localhost too.
    "grpc_proxy": "",
}


def set_grpc_defaults() -> None:
    """Sets the gRPC variables that are not set yet in `os.environ`."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
