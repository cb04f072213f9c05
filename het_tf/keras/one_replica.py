"""In which context of `tf.distribute` a worker makes a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class _OneReplica(tf.distribute.ReplicaContext):
    """Where a sum over all replicas is that of one.

    TensorFlow's own is a `tf.custom_gradient`, for which it keeps every graph that has one.
    """

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return value


@contextlib.contextmanager
def on_one_replica(strategy: tf.distribute.ParameterServerStrategy) -> Iterator[None]:
    """In this context Keras builds a step as in a process of one replica, on a worker's device.

    A step of a worker is that, and needs nothing of `strategy.run`, which builds it in a thread of
    its own. There Keras has optimizers step through `merge_call`, which the branches of `tf.cond`
    cannot, as loss scaling and the accumulation of gradients have it.
    """
    with tf.Graph().as_default():  # Where no strategy is in scope.
        of_none = tf.distribute.get_strategy()
    with _OneReplica(of_none, 0), tf.device(strategy.extended.worker_devices[0]):
        yield
