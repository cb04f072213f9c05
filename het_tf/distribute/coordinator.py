"""The coordinator of a strategy."""

from __future__ import annotations

import sys

import tensorflow as tf

from het_tf._threads import call_in_daemon


class Coordinator(tf.distribute.coordinator.ClusterCoordinator):
    """TensorFlow's, but its end waits for no worker that is gone, nor does the program's."""

    def __del__(self) -> None:
        """Ends its threads; one of them may be waiting for such a worker."""
        if not sys.is_finalizing():  # Then they have ended, and no other can begin.
            call_in_daemon(super().__del__)
