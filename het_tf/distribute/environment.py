"""gRPC settings that every process of the cluster needs, as environment variables.

TensorFlow reads them when it opens its first channel, so they must be set before that.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# A ping after 10 s without an answer to a running call, and the connection counts as lost when the
# ping stays unanswered for 15 s: a host that vanished, or a process that hangs, is noticed within
# 25 s. (A process that was killed on a live host is noticed at once, its kernel refuses the
# connection.) gRPC servers answer "too many pings" when pings keep coming on an otherwise silent
# connection; gRPC clients send at most two of them unless told otherwise, and two are tolerated.
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 15_000

_SETTINGS = {
    # "Fail at once when the peer is down" is the caller's choice; TensorFlow's default is to wait
    # for the peer forever. https://www.tensorflow.org/tutorials/distribute/parameter_server_training
    "GRPC_FAIL_FAST": "use_caller",
    "TF_GRPC_DEFAULT_OPTIONS": (
        f"grpc.keepalive_time_ms={KEEPALIVE_TIME_MS},"
        f"grpc.keepalive_timeout_ms={KEEPALIVE_TIMEOUT_MS}"
    ),
    # gRPC would ask the proxy of http_proxy or https_proxy for every task, for localhost too.
    "grpc_proxy": "",
}


def set_grpc_defaults(environ: MutableMapping[str, str] | None = None) -> None:
    """Sets the gRPC variables that are not set yet, in `environ` (default: `os.environ`)."""
    environ = os.environ if environ is None else environ
    for name, value in _SETTINGS.items():
        environ.setdefault(name, value)
