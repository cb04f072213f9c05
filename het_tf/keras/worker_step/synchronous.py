"""Synchronous steps: at its end, a step exchanges with all workers what it has changed.

See docs/protocol.md, section 9. The message at the end of a step also looks up the rows of the
worker's next step, so that a step needs one message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf.distribute.step_rounds import StepRounds
from het_tf.keras.data.batch_structure import Batch, components_of, with_components
from het_tf.keras.worker_step.batched_lookups import Keys, Request, StepLookups, requests_op
from het_tf.layers.embedding import HetEmbedding, embeddings_of
from het_tf.layers.lookahead import Call, Lookup, Room
from het_tf.runtime.planned_batch import PlannedBatch, fingerprint

_NO_PLAN = np.int64(-1)


def layers_of_keys(find_keys: Callable[[Any], Keys], element_spec: Any) -> list[HetEmbedding]:
    """Returns the layers of `find_keys`, in its order. Traces it apart, and drops the trace."""
    layers: list[HetEmbedding] = []

    def find(batch: Batch) -> list[tf.Tensor]:
        keys = find_keys(batch)
        layers[:] = [layer for layer, _ in keys]
        return [k for _, k in keys]

    tf.function(find, autograph=False).get_concrete_function(element_spec)
    return layers


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """The batch of a step, and the keys that the step looks up. Empty if there is no such step.

    Attributes:
      there: bool scalar, whether the step exists.
      components: components of the batch.
      keys: int64 [keys], by call.
      due: int64 [keys], rows whose updates are pushed before the step looks up its rows.
      step: int64 scalar, number of the step in the plan. -1: there is no plan.
    """

    there: tf.Tensor
    components: list[tf.Tensor]
    keys: list[tf.Tensor]
    due: tf.Tensor
    step: tf.Tensor


class SynchronousSteps:
    """Builds the exchanges of a closure's synchronous steps.

    Attributes:
      rounds: the rounds of the training.
    """

    def __init__(
        self,
        model: keras.Model,
        element_spec: Any,
        find_keys: Callable[[Any], Keys] | None,
        rounds: StepRounds,
    ):
        """Stores the arguments. `find_keys` None: the model has no embeddings."""
        self.rounds = rounds
        self._element_spec = element_spec
        self._find_keys = find_keys or (lambda batch: [])
        self._layers = layers_of_keys(self._find_keys, element_spec)
        ahead = {id(layer) for layer in self._layers}
        # Layers whose keys only their call shows. Their updates travel with the step's message.
        self._others = [x for x in embeddings_of(model) if x.built and id(x) not in ahead]

    def prepare(self, there: tf.Tensor, get: Callable[[], PlannedBatch]) -> PreparedStep:
        """Reads the batch of a step and finds its keys, if the step exists.

        Args:
          there: bool scalar, whether the step exists.
          get: returns the batch. Called in a graph that runs only if the step exists.
        """

        def once(_: tf.Tensor, *__: tf.Tensor) -> list[tf.Tensor]:
            planned = get()
            components = [tf.identity(x) for x in components_of(planned.batch)]
            found = self._find_keys(with_components(self._element_spec, components))
            keys = [tf.reshape(k, [-1]) for _, k in found]
            with tf.control_dependencies([_check_plan(planned, keys)]):
                step = tf.identity(planned.step)
            return [tf.constant(False), *components, *keys, planned.due, step]

        specs = components_of(self._element_spec)
        count = len(specs)
        specs += [tf.TensorSpec([None], tf.int64)] * (len(self._layers) + 1)
        specs += [tf.TensorSpec([], tf.int64)]
        # A loop, because tf.cond does not pass on captures from the function's caller.
        _, *found = tf.while_loop(
            lambda more, *_: more,
            once,
            [there, *(_nothing_of(spec) for spec in specs)],
            shape_invariants=[there.shape, *(spec.shape for spec in specs)],
            parallel_iterations=1,
        )
        *keys, due, step = found[count:]
        return PreparedStep(there, found[:count], keys, due, tf.where(there, step, _NO_PLAN))

    @property
    def shapes(self) -> list[tf.TensorShape]:
        """Shapes of the components of a batch."""
        return [spec.shape for spec in components_of(self._element_spec)]

    def batch(self, components: Sequence[tf.Tensor]) -> Batch:
        """Returns the batch of a step that exists, from its components."""
        return with_components(self._element_spec, components)

    def look_up(self, prepared: PreparedStep, keeps_updates: tf.Tensor | None) -> list[tf.Tensor]:
        """Looks up the rows of a closure's first step. Returns `_tensors_of` the lookups.

        Args:
          prepared: the step.
          keeps_updates: as for `exchange`.
        """
        lookups = StepLookups(None, None)
        with tf.control_dependencies(self._keep_ops(prepared, keeps_updates)):
            requests = self._requests_op(prepared)
        replies, _ = lookups.receive_op(lookups.call_op(requests))
        return _tensors_of(lookups.install_op(requests, replies))

    def lookups(self, tensors: Sequence[tf.Tensor]) -> list[Lookup]:
        """Returns the lookups with these tensors, for the step that reads their rows."""
        caches = [layer.worker_cache for layer in self._layers]
        unique_ids, tickets = tensors[::2], tensors[1::2]
        room = Room(list(zip(caches, tickets, strict=True)))
        return [
            Lookup(layer, unique, ticket, room)
            for layer, unique, ticket in zip(self._layers, unique_ids, tickets, strict=True)
        ]

    def _requests_op(self, prepared: PreparedStep) -> list[Request]:
        keys = zip(self._layers, prepared.keys, strict=True)
        return requests_op([Call(layer, k, False) for layer, k in keys])

    def _keep_ops(
        self, following: PreparedStep, keeps_updates: tf.Tensor | None
    ) -> list[tf.Operation]:
        """Pushes the due rows, with the next request. At the end of a closure, all rows."""
        if keeps_updates is None:
            return []
        keeps_updates = tf.logical_and(keeps_updates, following.there)
        due = tf.where(keeps_updates, tf.size(following.due), 0)
        caches = {id(layer): layer.worker_cache for layer in self._layers}
        return [cache.keep_op(keeps_updates, following.due[:due]) for cache in caches.values()]

    def exchange(
        self,
        place: Sequence[tf.Tensor],
        following: PreparedStep,
        numbers: tf.Tensor,
        keeps_updates: tf.Tensor | None,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sends the updates of a step, and looks up the rows of the next step.

        Args:
          place: as for `StepRounds.exchange_op`.
          following: the next step.
          numbers: float32 [numbers].
          keeps_updates: bool scalar, whether rows are pushed when the plan says so. None: there is
            no plan.

        Returns:
          Tensors of the next step's lookups, and the mean of `numbers` over the members.
        """
        with tf.control_dependencies(self._keep_ops(following, keeps_updates)):
            requests = self._requests_op(following)
        pushes = [layer.worker_cache.flush_request_op() for layer in self._others]
        tables = [x.layer.table for x in requests] + [x.table for x in self._others]
        messages = [x.requests for x in requests] + [messages for _, messages in pushes]
        replies, mean = self.rounds.exchange_op(place, tables, messages, numbers)
        made = StepLookups(None, None).install_op(requests, replies[: len(requests)])
        installed = [
            layer.worker_cache.install_op(ticket, reply)[0]
            for layer, (ticket, _), reply in zip(
                self._others, pushes, replies[len(requests) :], strict=True
            )
        ]
        with tf.control_dependencies(installed):
            return _tensors_of(made), tf.identity(mean)


class EndOfStep:
    """The exchange between the gradients of a step and the step of the optimizer.

    Attributes:
      share: float32 scalar, by which gradients of rows are multiplied.
      tensors: tensors of the next step's lookups. None until `mean_of` was called.
    """

    def __init__(
        self,
        synchronous: SynchronousSteps,
        place: Sequence[tf.Tensor],
        members: tf.Tensor,
        following: PreparedStep,
        lookups: Sequence[Lookup],
        keeps_updates: tf.Tensor | None,
    ):
        """Stores the arguments.

        Args:
          synchronous: builds the exchange.
          place: as for `StepRounds.exchange_op`.
          members: int64 scalar, number of members.
          following: the worker's next step.
          lookups: lookups of the step.
          keeps_updates: as for `SynchronousSteps.exchange`.
        """
        self._lookups = list(lookups)
        self._keeps = keeps_updates
        self._synchronous = synchronous
        self._place = place
        self._following = following
        self._graph = tf.compat.v1.get_default_graph()
        self.share = 1.0 / tf.cast(members, tf.float32)
        self.tensors: list[tf.Tensor] | None = None

    def next_lookups(self) -> list[tf.Tensor]:
        """Returns `tensors`.

        Raises:
          ValueError: no optimizer has ended the step.
        """
        if self.tensors is None:
            raise ValueError(
                "with synchronous=True, a train_step must apply gradients with the optimizer that"
                " the model is compiled with"
            )
        return self.tensors

    def mean_of(self, gradients: Sequence[Any]) -> list[Any]:
        """Sends the updates of the step's rows. Returns the means of gradients over all workers.

        Args:
          gradients: gradients of the dense variables. None: a variable has none.

        Raises:
          ValueError: a second optimizer step, or one in a branch of `tf.cond`.
        """
        if self.tensors is not None or tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError(
                "with synchronous=True, a train_step applies the gradients of one optimizer once,"
                " and not in a branch of tf.cond"
            )
        dense = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        flat = [tf.reshape(tf.cast(g, tf.float32), [-1]) for g in dense]
        numbers = tf.concat([*flat, tf.zeros([0])], 0)
        updates = [update for lookup in self._lookups[:1] for update in lookup.room.updates()]
        with tf.control_dependencies([numbers, *updates]):
            self.tensors, mean = self._synchronous.exchange(
                self._place, self._following, tf.identity(numbers), self._keeps
            )
        sizes = [int(np.prod(g.shape)) for g in dense]
        parts = iter(tf.split(mean, sizes) if sizes else [])
        means: list[Any] = []
        for gradient in gradients:
            if gradient is None:
                means.append(None)
            else:
                means.append(tf.cast(tf.reshape(next(parts), gradient.shape), gradient.dtype))
        return means


def _check_plan(planned: PlannedBatch, keys: Sequence[tf.Tensor]) -> tf.Operation:
    """Returns an op that fails if a plan has other keys than the layers look up."""
    looked_up = tf.concat([*keys, tf.zeros([0], tf.int64)], 0)
    are_same = tf.equal(fingerprint(planned.keys), fingerprint(looked_up))
    return tf.debugging.Assert(
        tf.logical_or(planned.step < 0, are_same),
        [
            "ids of location_aware returns other ids than the model's layers look up, which"
            " on_demand=True needs. Numbers of ids:",
            tf.size(planned.keys),
            tf.size(looked_up),
        ],
    )


def _tensors_of(lookups: Sequence[Lookup]) -> list[tf.Tensor]:
    return [x for lookup in lookups for x in (lookup.unique_ids, lookup.ticket)]


def _nothing_of(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([0 if size is None else size for size in spec.shape.as_list()], spec.dtype)
