"""Preparation of steps while earlier steps compute: lookups are sent, then received."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from het_tf.keras.data.batch_structure import Batch, components_of, with_components
from het_tf.keras.worker_step.batched_lookups import Calls, Request, StepLookups
from het_tf.keras.worker_step.hot_phases import HotPhases
from het_tf.keras.worker_step.source import Source
from het_tf.keras.worker_step.step_queue import Window
from het_tf.layers.embedding import HetEmbedding
from het_tf.layers.lookahead import Lookup, Room


@dataclasses.dataclass(frozen=True)
class _SentStep:
    """A step whose lookups were sent.

    Attributes:
      there: bool scalar, whether the step exists. If false, the other tensors are empty.
      components: components of the step's batch.
      requests: requests of the step's lookups.
    """

    there: tf.Tensor
    components: list[tf.Tensor]
    requests: list[Request]


@dataclasses.dataclass(frozen=True)
class _Sent:
    """Steps whose lookups share a message. The sending loop passes them to the receiving loop."""

    calls: Calls
    steps: list[_SentStep]

    def tensors(self) -> list[tf.Tensor]:
        """Returns the tensors of the calls and the steps, in the order that `unpack` reads."""
        tensors = list(self.calls.tensors)
        for step in self.steps:
            tensors += [step.there, *step.components]
            tensors += [x for each in step.requests for x in (each.unique_ids, each.ticket)]
        return tensors

    def unpack(self, optional: tf.Tensor) -> _Sent:
        """Returns the same structure with the tensors of an optional."""
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

    In the graph of a closure, `prepare_op` must be called before `unpack`.
    """

    def __init__(
        self,
        window: Window,
        element_spec: Any,
        lookups: StepLookups,
        wanted: Callable[[HetEmbedding], bool],
        per_message: int,
        phases: HotPhases,
    ):
        """Stores the arguments.

        Args:
          window: window for the prepared steps.
          element_spec: spec of one batch.
          lookups: lookups of the steps.
          wanted: whether to look up a layer's rows ahead.
          per_message: number of steps that share a message, at most `window.size`.
          phases: phases of the source's batches.
        """
        self._window = window
        self._element_spec = element_spec
        self._lookups = lookups
        self._wanted = wanted
        self._per_message = per_message
        self._phases = phases
        self._sent: _Sent | None = None  # Traced by `_send_ahead`, for `_receive_ahead`.
        self._layers: list[HetEmbedding] = []  # Traced layers, in the order of the calls.

    def prepare_op(self, source: Source, count: tf.Tensor) -> None:
        """Prepares `count` steps. Every step first waits for a place in the window.

        One loop sends and another loop receives, so that several messages may be in flight. The
        caller builds both loops with `run_beside`, in parallel with the steps.
        """
        made = self._send_ahead(source, count)
        self._receive_ahead(made, count)

    def _send_ahead(self, source: Source, count: tf.Tensor) -> tf.Tensor:
        """Sends the lookups of `count` steps, or fewer if the data ends. Returns their number."""
        window = self._window

        def cond(i: tf.Tensor, *carry: Any) -> tf.Tensor:
            return tf.logical_and(i < count, source.has(*carry))

        def request(i: tf.Tensor, carry: Sequence[Any]) -> tuple[list[tf.Tensor], list[Request]]:
            with tf.control_dependencies([window.reserve_op()]):
                batch = self._phases.batch_op(source, i, *carry)
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
            # The replica asks for its number of missed steps only when the steps have places.
            with tf.control_dependencies([x for _, components, _ in steps for x in components]):
                calls = self._lookups.call_op([x for _, _, requests in steps for x in requests])
            sent = _Sent(calls, [_SentStep(*step) for step in steps])
            window.send_op(sent.tensors())
            self._sent = sent
            i += tf.add_n([tf.cast(there, tf.int32) for there, _, _ in steps])
            return i, *source.next(i < count, *carry)

        # No batch is read if no step is to be prepared.
        first = (tf.constant(0), *source.first(count > 0))
        made = tf.while_loop(cond, body, first, parallel_iterations=1)[0]
        with tf.control_dependencies([made]):
            window.send_end_op()
        return made

    def _receive_ahead(self, made: tf.Tensor, count: tf.Tensor) -> None:
        """Receives the replies to `_send_ahead` and puts the steps into the window."""
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
                    # The replica must know its number of missed steps before the step begins.
                    with tf.control_dependencies(told):
                        window.put_op([*step.components, *tickets])
                    return tf.constant(True)

                put() if number == 0 else tf.cond(step.there, put, lambda: tf.constant(False))
            self._layers = [request.layer for request in sent.steps[0].requests]
            return tf.constant(True)

        def body(_: tf.Tensor) -> list[tf.Tensor]:
            # Not dequeued before the loop: TensorFlow would make this op wait for `send_end_op`.
            optional = window.receive_op()
            there = tf.raw_ops.OptionalHasValue(optional=optional)
            return [tf.cond(there, lambda: take(optional), lambda: tf.constant(False))]

        with tf.control_dependencies([count]):  # `count` is known once the window is open.
            more = tf.constant(True)
        (more,) = tf.while_loop(lambda more: more, body, [more], parallel_iterations=1)

        def end() -> tf.Tensor:
            with tf.control_dependencies([window.put_end_op()]):
                return tf.constant(True)

        with tf.control_dependencies([more]):
            ended = made < count
        tf.cond(ended, end, lambda: tf.constant(False))

    def unpack(self, optional: tf.Tensor) -> tuple[Batch, list[Lookup]]:
        """Returns the batch and the lookups of a step from `Window.take_op`."""
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
    """Returns the result of `request`, or empty tensors of the same dtypes if not `there`."""

    def once(_: tf.Tensor, *__: tf.Tensor) -> list[tf.Tensor]:
        components, requests = request(i, carry)
        return [tf.constant(False), *components, *(x for r in requests for x in r.tensors())]

    # A loop, because tf.cond does not pass on captures from the function's caller. On a cluster,
    # the tables of Keras's lookup layers are such captures.
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
