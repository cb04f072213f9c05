"""Hot phases of `het_tf.data.hot_batches`: the worker trains its cached rows without messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from het_tf.keras.data.batch_structure import Batch, components_of, with_components
from het_tf.keras.worker_step.batched_lookups import Keys, StepLookups, requests_op
from het_tf.keras.worker_step.source import Source
from het_tf.layers.embedding import embeddings_of
from het_tf.layers.lookahead import Call
from het_tf.runtime.planned_batch import PhasedBatch


class HotPhases:
    """Begins and ends hot phases when a batch is read whose rows are looked up next."""

    def __init__(
        self,
        model: keras.Model,
        element_spec: Any,
        find_keys: Callable[[Any], Keys] | None,
    ):
        """Stores the arguments.

        Args:
          model: built model.
          element_spec: spec of one batch.
          find_keys: result of `find_keys_fn`. None: the rows of a phase are fetched when a step
            looks them up.
        """
        self._element_spec = element_spec
        self._find_keys = find_keys
        self._layers = [x for x in embeddings_of(model) if x.built and x.stored.is_cached]
        self._caches = list({id(x.worker_cache): x.worker_cache for x in self._layers}.values())

    def batch_op(self, source: Source, *state: Any) -> Batch:
        """Returns `source.get(*state)` after its phase has begun, if it is the first of a phase."""
        batch = source.get(*state)
        if source.phased is None:
            return batch
        for layer in self._layers:
            if layer.worker_cache.on_device:
                raise ValueError(
                    f"hot_batches needs the rows of layer {layer.name!r} in the memory of the host,"
                    " but its cache has a device_capacity"
                )
        with tf.control_dependencies(self._begin_op(source.phased(*state))):
            components = [tf.identity(x) for x in components_of(batch)]
        return with_components(batch, components)

    def _begin_op(self, phased: PhasedBatch) -> Sequence[tf.Operation]:
        """Fetches the rows of a phase, and decides whether the caches keep their updates."""
        phase = components_of(phased.phase)
        begins = tf.shape(phase[0])[0] > 0
        none = tf.zeros([0], tf.int64)

        def keep_ops(keeps: tf.Tensor) -> list[tf.Operation]:
            return [cache.keep_op(keeps, none) for cache in self._caches]

        def fetch(_: tf.Tensor) -> tf.Tensor:
            found = self._find_keys(with_components(self._element_spec, phase))
            calls = [Call(layer, k, True) for layer, k in found if layer.stored.is_cached]
            lookups = StepLookups(None, None)
            requests = requests_op(calls)
            replies, _ = lookups.receive_op(lookups.call_op(requests))
            made = lookups.install_op(requests, replies)
            with tf.control_dependencies([lookup.ticket for lookup in made]):
                return tf.constant(False)

        # A hot phase may follow a hot phase. The updates of the first travel with the fetch. The
        # fetched rows stay in the caches, because the caches already keep updates.
        ended = keep_ops(tf.logical_and(phased.hot, tf.logical_not(begins)))
        with tf.control_dependencies(ended):
            begun = keep_ops(phased.hot)
        if self._find_keys is None:
            return begun
        with tf.control_dependencies(begun):
            # A loop, because tf.cond does not pass on captures from the function's caller.
            more = tf.identity(begins)
            return [tf.while_loop(lambda more: more, fetch, [more], parallel_iterations=1)]
