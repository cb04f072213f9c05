"""Keeping TensorFlow from reporting a missing GPU as an error.

On a machine without an NVIDIA driver TensorFlow logs, when it looks for devices first, "failed call
to cuInit: INTERNAL: CUDA error", in red to many. There is no setting for that line alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile

import tensorflow as tf

_STDERR = 2


def look_for_devices() -> None:
    """Has TensorFlow look for devices now, and drops what it says of a driver that is not there.

    Only where there is none. Everything else that is written to stderr meanwhile is passed on.
    """
    if sys.stderr is None or _has_driver():
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        stderr = os.dup(_STDERR)
        os.dup2(said.fileno(), _STDERR)
        try:
            tf.config.list_physical_devices()
        finally:
            os.dup2(stderr, _STDERR)
            os.close(stderr)
            said.seek(0)
            for line in said:
                if b"cuInit" not in line:
                    os.write(_STDERR, line)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
