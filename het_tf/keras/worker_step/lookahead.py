"""Steps that a worker prepares while others compute: their lookups are sent, then received."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from het_tf.keras.data.batch_structure import Batch, components_of, with_components
from het_tf.keras.worker_step.batched_lookups import Calls, Request, StepLookups
from het_tf.keras.worker_step.step_queue import Window
from het_tf.layers.embedding import HetEmbedding
from het_tf.layers.lookahead import Lookup, Room


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the batches of a loop come from. What it carries from step to step is its own.

    Attributes:
      first: whether there is a first batch to be got -> what to carry at the start.
      has: carried -> whether there is a batch.
      get: number of the batch, carried -> the batch.
      next: whether another batch is wanted, carried -> what to carry on.
    """

    first: Callable[[tf.Tensor], tuple[Any, ...]]
    has: Callable[..., tf.Tensor]
    get: Callable[..., Batch]
    next: Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class _SentStep:
    """A step whose lookups are under way.

    Attributes:
      there: bool scalar: whether there is such a step, and not only a place for one.
      components: of its batch.
      requests: its lookups.
    """

    there: tf.Tensor
    components: list[tf.Tensor]
    requests: list[Request]


@dataclasses.dataclass(frozen=True)
class _Sent:
    """Steps whose lookups are under way together: what one loop passes on to another."""

    calls: Calls
    steps: list[_SentStep]

    def tensors(self) -> list[tf.Tensor]:
        """All that `unpack` makes the same of."""
        tensors = list(self.calls.tensors)
        for step in self.steps:
            tensors += [step.there, *step.components]
            tensors += [x for each in step.requests for x in (each.unique_ids, each.ticket)]
        return tensors

    def unpack(self, optional: tf.Tensor) -> _Sent:
        """The same of what an optional of such tensors has."""
        like = self.tensors()
        tensors = iter(
            tf.raw_ops.OptionalGetValue(
                optional=optional,
                output_types=[x.dtype for x in like],
                output_shapes=[x.shape for x in like],
            )
        )
        calls = dataclasses.replace(self.calls, tensors=[next(tensors) for _ in self.calls.tensors])
        steps = []
        for step in self.steps:
            there = next(tensors)
            components = [next(tensors) for _ in step.components]
            requests = [
                Request(request.layer, next(tensors), next(tensors), [])
                for request in step.requests
            ]
            steps.append(_SentStep(there, components, requests))
        return _Sent(calls, steps)


class StepsAhead:
    """Prepares steps for a window.

    In the graph of a closure, `prepare_op` comes before `unpack`.
    """

    def __init__(
        self,
        window: Window,
        element_spec: Any,
        lookups: StepLookups,
        wanted: Callable[[HetEmbedding], bool],
        per_message: int,
    ):
        """Describes the steps.

        Args:
          window: where they go.
          element_spec: of their batches.
          lookups: what they look up.
          wanted: for which layers.
          per_message: how many share a message, at most as many as the window has.
        """
        self._window = window
        self._element_spec = element_spec
        self._lookups = lookups
        self._wanted = wanted
        self._per_message = per_message
        self._sent: _Sent | None = None  # As traced, for whoever takes it up.
        self._layers: list[HetEmbedding] = []  # The same, in the order of the calls.

    def prepare_op(self, source: Source, count: tf.Tensor) -> None:
        """Looks ahead for `count` steps, several in one message where the window has room.

        One loop sends and another one receives, so several messages may be under way; both run
        beside the steps (`run_beside`).
        """
        made = self._send_ahead(source, count)
        self._receive_ahead(made, count)

    def _send_ahead(self, source: Source, count: tf.Tensor) -> tf.Tensor:
        """Sends the lookups of `count` steps. Returns of how many; fewer: the data has ended."""
        window = self._window

        def cond(i: tf.Tensor, *carry: Any) -> tf.Tensor:
            return tf.logical_and(i < count, source.has(*carry))

        def request(i: tf.Tensor, carry: Sequence[Any]) -> tuple[list[tf.Tensor], list[Request]]:
            with tf.control_dependencies([window.reserve_op()]):
                batch = source.get(i, *carry)
                components = [tf.identity(x) for x in components_of(batch)]
                batch = with_components(batch, components)
                requests = self._lookups.request_op(batch, self._wanted)
            return components, requests

        def body(i: tf.Tensor, *carry: Any) -> Any:
            steps = [(tf.constant(True), *request(i, carry))]
            components, like = steps[0][1:]
            for j in range(1, self._per_message):
                carry = source.next(i + j < count, *carry)
                there = cond(i + j, *carry)
                steps.append((there, *_request_if(there, request, i + j, carry, components, like)))
            # What a replica lacks is asked when there is a place for the step, and not before.
            with tf.control_dependencies([x for _, components, _ in steps for x in components]):
                calls = self._lookups.call_op([x for _, _, requests in steps for x in requests])
            sent = _Sent(calls, [_SentStep(*step) for step in steps])
            window.send_op(sent.tensors())
            self._sent = sent
            i += tf.add_n([tf.cast(there, tf.int32) for there, _, _ in steps])
            return i, *source.next(i < count, *carry)

        # Nothing is taken from the data where nothing is to be prepared.
        first = (tf.constant(0), *source.first(count > 0))
        made = tf.while_loop(cond, body, first, parallel_iterations=1)[0]
        with tf.control_dependencies([made]):
            window.send_end_op()
        return made

    def _receive_ahead(self, made: tf.Tensor, count: tf.Tensor) -> None:
        """Takes the replies to what `_send_ahead` sends, and puts the steps into the window."""
        window = self._window

        def take(optional: tf.Tensor) -> tf.Tensor:
            sent = self._sent.unpack(optional)
            all_replies, told = self._lookups.receive_op(sent.calls)
            replies = iter(all_replies)
            for number, step in enumerate(sent.steps):
                received = [next(replies) for _ in step.requests]

                def put(step: _SentStep = step, received: Any = received) -> tf.Tensor:
                    lookups = self._lookups.install_op(step.requests, received)
                    tickets = [x for lookup in lookups for x in (lookup.unique_ids, lookup.ticket)]
                    # A step begins when it is known how much its replica lacks.
                    with tf.control_dependencies(told):
                        window.put_op([*step.components, *tickets])
                    return tf.constant(True)

                put() if number == 0 else tf.cond(step.there, put, lambda: tf.constant(False))
            self._layers = [request.layer for request in sent.steps[0].requests]
            return tf.constant(True)

        def body(_: tf.Tensor) -> list[tf.Tensor]:
            # Not taken out before the loop: TensorFlow would have that wait for what sends the end.
            optional = window.receive_op()
            there = tf.raw_ops.OptionalHasValue(optional=optional)
            return [tf.cond(there, lambda: take(optional), lambda: tf.constant(False))]

        with tf.control_dependencies([count]):  # Then the window is open.
            more = tf.constant(True)
        (more,) = tf.while_loop(lambda more: more, body, [more], parallel_iterations=1)

        def end() -> tf.Tensor:
            with tf.control_dependencies([window.put_end_op()]):
                return tf.constant(True)

        with tf.control_dependencies([more]):
            ended = made < count
        tf.cond(ended, end, lambda: tf.constant(False))

    def unpack(self, optional: tf.Tensor) -> tuple[Batch, list[Lookup]]:
        """The batch and the lookups of what `Window.take_op` gives."""
        spec = components_of(self._element_spec)
        tickets = 2 * len(self._layers)
        components = tf.raw_ops.OptionalGetValue(
            optional=optional,
            output_types=[s.dtype for s in spec] + [tf.variant] * tickets,
            output_shapes=[s.shape for s in spec] + [tf.TensorShape([])] * tickets,
        )
        batch = with_components(self._element_spec, components[: len(spec)])
        unique_ids, tickets = components[len(spec) :: 2], components[len(spec) + 1 :: 2]
        caches = [layer.worker_cache for layer in self._layers]
        room = Room(list(zip(caches, tickets, strict=True)))
        lookups = [
            Lookup(*found, room) for found in zip(self._layers, unique_ids, tickets, strict=True)
        ]
        return batch, lookups


def _request_if(
    there: tf.Tensor,
    request: Callable[..., tuple[list[tf.Tensor], list[Request]]],
    i: tf.Tensor,
    carry: Sequence[Any],
    components: Sequence[tf.Tensor],
    like: Sequence[Request],
) -> tuple[list[tf.Tensor], list[Request]]:
    """What `request` of a step gives, or nothing of the same kind where there is no such step."""

    def once(_: tf.Tensor, *__: tf.Tensor) -> list[tf.Tensor]:
        components, requests = request(i, carry)
        return [tf.constant(False), *components, *(x for r in requests for x in r.tensors())]

    # A loop, since tf.cond does not hand on what comes from the function's caller, as the tables
    # of Keras's lookup layers do on a cluster.
    kinds = [*components, *(x for each in like for x in each.tensors())]
    _, *tensors = tf.while_loop(
        lambda more, *_: more,
        once,
        [there, *(_nothing_of(kind.dtype) for kind in kinds)],
        shape_invariants=[there.shape, *(_any_shape_of(kind.dtype) for kind in kinds)],
        parallel_iterations=1,
    )
    known, tensors = tensors[: len(components)], tensors[len(components) :]
    requests = []
    for each in like:
        count = len(each.tensors())
        requests.append(each.with_tensors(tensors[:count]))
        tensors = tensors[count:]
    return known, requests


def _nothing_of(dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.variant:
        return tf.raw_ops.OptionalNone()
    return tf.zeros([0], dtype)


def _any_shape_of(dtype: tf.DType) -> tf.TensorShape:
    return tf.TensorShape([] if dtype == tf.variant else None)
