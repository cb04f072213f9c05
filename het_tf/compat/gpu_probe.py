"""Suppression of TensorFlow's error message about a missing GPU.

On a machine without an NVIDIA driver, the first device search of TensorFlow logs "failed call to
cuInit: INTERNAL: CUDA error", which looks like a fault. No setting disables this line alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile

import tensorflow as tf

_STDERR = 2


def look_for_devices() -> None:
    """Lists the physical devices, and drops TensorFlow's message about a missing driver.

    Does nothing if there is a driver. Passes all other output to stderr on.
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
