"""In which context of `tf.distribute` a worker makes a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def on_one_replica(strategy: tf.distribute.ParameterServerStrategy) -> Iterator[None]:
    """In this context Keras builds a step as in a process of one replica, on a worker's device.

    A step of a worker is that, and needs nothing of `strategy.run`, which builds it in a thread of
    its own. There Keras has optimizers step through `merge_call`, which the branches of `tf.cond`
    cannot, as loss scaling and the accumulation of gradients have it.
    """
    with tf.Graph().as_default():  # Where no strategy is in scope.
        one_replica = tf.distribute.get_replica_context()
    with one_replica, tf.device(strategy.extended.worker_devices[0]):
        yield
