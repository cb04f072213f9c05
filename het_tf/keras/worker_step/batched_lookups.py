"""Exchanges that carry all lookups of one or more steps, and the dense replicas' requests.

See docs/protocol.md, section 7.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from het_tf.compat import keras_internals
from het_tf.distribute.dense.replicas import DenseReplicas
from het_tf.keras.worker_step.dense_variables import is_seed
from het_tf.layers import lookahead
from het_tf.layers.embedding import HetEmbedding, embeddings_of
from het_tf.tables.exchange import Exchange
from het_tf.tables.table import EmbeddingTable
from het_tf.tables.worker_cache import WorkerCache, install_complete_op

Keys = list[tuple[HetEmbedding, tf.Tensor]]


def find_keys_fn(model: keras.Model, element_spec: Any) -> Callable[[Any], Keys] | None:
    """Returns a function that finds the keys that a training step looks up, if possible.

    Args:
      model: built model.
      element_spec: spec of one batch.

    Returns:
      A function from a batch to layers and their int64 keys, in the order of the calls. None if the
      model has no built embeddings, or if only its calls show the keys. The latter is logged.
    """
    layers = [layer for layer in embeddings_of(model) if layer.built]
    if not layers:
        return None
    if hasattr(model, "lookahead_ids"):

        def ask(batch: Any) -> Keys:
            found = model.lookahead_ids(batch)
            if not isinstance(found, dict) or not all(isinstance(k, HetEmbedding) for k in found):
                raise ValueError(
                    "lookahead_ids(batch) must return a dict from HetEmbedding layers to their ids,"
                    f" not {found!r}"
                )
            return [(layer, layer.lookup_keys(layer.keys_of(x))) for layer, x in found.items()]

        return ask
    if not keras_internals.trains_as_keras_does(model):
        logging.info(
            "%s has its own call or train_step, so its ids are looked up when its layers are"
            " called: write a method lookahead_ids(batch) that returns {layer: ids}, and they are"
            " looked up while the step before computes",
            model.name,
        )
        return None

    def record(batch: Any) -> Keys:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        return [(call.layer, call.keys) for call in _record_calls(model, (x,), {"training": True})]

    if {id(layer) for layer in layers} <= {id(layer) for layer in _layers_called_by(model)}:
        return record
    # Another layer may call an embedding in its own function. Only a call of the model shows this.
    keys_of = tf.function(lambda batch: [keys for _, keys in record(batch)], autograph=False)
    try:
        keys_of.get_concrete_function(element_spec)
    except lookahead.CannotLookAhead:
        logging.info(
            "%s has a layer that calls an embedding within a tf.function or tf.cond, so its ids are"
            " looked up when its layers are called",
            model.name,
        )
        return None
    return record


def _layers_called_by(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields the layers of a functional or sequential model and of such models inside."""
    for layer in model.layers:
        yield layer
        if isinstance(layer, keras.Model) and keras_internals.calls_as_keras_does(layer):
            yield from _layers_called_by(layer)


class SharedLookups:
    """Sends all lookups of a model's call in one message to each server.

    In a context of `shared`, `lookups_of_call` applies this object to calls.
    """

    def __init__(
        self, model: keras.Model, scope: keras.StatelessScope, made: list[lookahead.Lookup]
    ):
        """Stores the arguments.

        Args:
          model: model whose calls share lookups.
          scope: scope with the values of the model's variables.
          made: list to which the lookups are added.
        """
        self._model, self._scope, self._made = model, scope, made
        cached = [layer for layer in embeddings_of(model) if layer.built and layer.stored.is_cached]
        self._is_worth = len(cached) > 1 and keras_internals.calls_as_keras_does(model)
        self._graph = tf.compat.v1.get_default_graph()

    @contextlib.contextmanager
    def of_call(self, model: keras.Model, args: Any, kwargs: Any) -> Iterator[None]:
        """Context of a model's call. Prepares the call's lookups if the model is this one."""
        here = self._graph is tf.compat.v1.get_default_graph()
        if not self._is_worth or model is not self._model or lookahead.is_recording() or not here:
            yield
            return
        try:
            calls = _record_calls(model, args, kwargs, self._scope)
        except lookahead.CannotLookAhead:
            calls = []
        lookups = StepLookups(None, None)
        requests = requests_op([call for call in calls if call.layer.stored.is_cached])
        replies, _ = lookups.receive_op(lookups.call_op(requests))
        made = lookups.install_op(requests, replies)
        self._made += made
        with lookahead.prepared(made):
            yield


_shared: contextvars.ContextVar[SharedLookups | None] = contextvars.ContextVar(
    "shared_lookups", default=None
)


@contextlib.contextmanager
def shared(lookups: SharedLookups) -> Iterator[None]:
    """Context in which calls of the model use `lookups`."""
    token = _shared.set(lookups)
    try:
        yield
    finally:
        _shared.reset(token)


def lookups_of_call(model: keras.Model, args: Any, kwargs: Any) -> AbstractContextManager[None]:
    """Returns the context for a call of a model with these arguments."""
    lookups = _shared.get()
    return contextlib.nullcontext() if lookups is None else lookups.of_call(model, args, kwargs)


def _record_calls(
    model: keras.Model,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    scope: keras.StatelessScope | None = None,
) -> list[lookahead.Call]:
    """Returns the calls of embeddings in a model's call. Runs the model until the keys are known.

    Omits layers whose keys are random, or depend on rows or trained variables. Such a layer looks
    up its rows when it is called.
    """
    made: list[lookahead.Call] = []

    # A function, because TensorFlow prunes the ops that the keys do not need.
    @tf.function(autograph=False)
    def keys_of(args: Any, kwargs: Any) -> list[tf.Tensor]:
        with _UpToTheKeys(model, scope), lookahead.recording() as calls:
            model(*args, **kwargs)
            of_calls = zip(calls, lookahead.depend_on_unknown(calls), strict=True)
        late = {call.layer for call, is_late in of_calls if is_late}
        for layer in late:
            logging.info(
                "ids of layer %s are drawn by chance, or depend on rows or trained variables, so"
                " they are looked up when it is called",
                layer.name,
            )
        made[:] = [call for call in calls if call.layer not in late]
        return [call.keys for call in made]

    keys = keys_of(args, kwargs)
    return [dataclasses.replace(call, keys=k) for call, k in zip(made, keys, strict=True)]


class _UpToTheKeys(keras.StatelessScope):
    """Scope in which a model's variables are zeros, unless keys may depend on them.

    TensorFlow prunes ops that keys do not need, but not the reads of variables from the servers.
    """

    def __init__(self, model: keras.Model, scope: keras.StatelessScope | None):
        """`scope` may have other values of the variables that keys may depend on."""
        super().__init__(initialize_variables=False)
        self._scope = scope
        layers = keras_internals.nested_layers(model)
        unused = [*model.trainable_variables, *(v for v in model.variables if is_seed(v))]
        for layer in layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                unused += layer.variables
        self._unused = {id(v) for v in unused}

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        value = super().get_current_value(variable)
        if value is None and id(variable) in self._unused:
            return lookahead.unknown(tf.zeros(variable.shape, variable.dtype))
        if value is None and self._scope is not None:
            return self._scope.get_current_value(variable)
        return value


@dataclasses.dataclass(frozen=True)
class Request:
    """A lookup and its requests to the servers."""

    layer: HetEmbedding
    unique_ids: tf.Tensor
    ticket: tf.Tensor
    requests: list[tf.Tensor]  # uint8 [bytes], one for each server

    def tensors(self) -> list[tf.Tensor]:
        """Returns all tensors, for example to pass them out of a loop."""
        return [self.unique_ids, self.ticket, *self.requests]

    def with_tensors(self, tensors: Sequence[tf.Tensor]) -> Request:
        """Returns a request of the same layer with other tensors, in the order of `tensors`."""
        unique_ids, ticket, *requests = tensors
        return Request(self.layer, unique_ids, ticket, requests)


def requests_op(calls: Sequence[lookahead.Call]) -> list[Request]:
    """Builds the requests for calls of layers, in the order of the calls."""
    caches = [call.layer.worker_cache for call in calls]
    unique_ids = [cache.unique_ids_op(call.keys) for cache, call in zip(caches, calls, strict=True)]
    return [
        Request(call.layer, unique, *cache.request_op(unique, call.fresh))
        for call, cache, unique in zip(calls, caches, unique_ids, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Calls:
    """Requests that were sent and whose replies were not received yet.

    Attributes:
      exchange: exchange that sent the requests. None: nothing was sent.
      tensors: scalar variants: result of `exchange.call_op`, then the replicas' ticket, if any.
    """

    exchange: Exchange | None
    tensors: list[tf.Tensor]


class StepLookups:
    """Sends the lookups of one or more steps in one message to each parameter server."""

    def __init__(
        self,
        find_keys: Callable[[Any], Keys] | None,
        replicas: DenseReplicas | None,
    ):
        """Stores the arguments.

        Args:
          find_keys: result of `find_keys_fn`. None: every layer looks up its own rows.
          replicas: replicas whose requests are sent in the same messages.
        """
        self._find_keys = find_keys
        self._replicas = replicas
        # Exchanges for the further requests of lookups, by tables. Several steps share them.
        self._exchanges: dict[tuple[EmbeddingTable, ...], Exchange] = {}

    def request_op(self, batch: Any, wanted: Callable[[HetEmbedding], bool]) -> list[Request]:
        """Builds the requests for a step's lookups in some layers.

        Args:
          batch: batch of the step.
          wanted: whether to look up a layer's rows.

        Returns:
          The requests, in the order of the calls.
        """
        keys = [] if self._find_keys is None else self._find_keys(batch)
        return requests_op([lookahead.Call(layer, k, False) for layer, k in keys if wanted(layer)])

    def call_op(self, requests: Sequence[Request]) -> Calls:
        """Sends the requests of any number of steps, together with the replicas' requests."""
        parties: list[Any] = [request.layer.table for request in requests]
        messages = [request.requests for request in requests]
        dense = []
        if self._replicas is not None:
            ticket, dense_requests = self._replicas.request_op(asks=True)
            dense.append(ticket)
            parties.append(self._replicas)
            messages.append(dense_requests)
        if not parties:
            return Calls(None, [])
        exchange = Exchange(parties)
        return Calls(exchange, [exchange.call_op(messages), *dense])

    def receive_op(self, calls: Calls) -> tuple[list[list[tf.Tensor]], list[tf.Operation]]:
        """Waits for the replies.

        Returns:
          replies: replies to each request, for `install_op`.
          received: ops after which the replicas have stored their replies.
        """
        if calls.exchange is None:
            return [], []
        sent, *dense = calls.tensors
        replies = calls.exchange.receive_op(sent)
        received = [self._replicas.receive_op(ticket, replies.pop()) for ticket in dense]
        return replies, received

    def begin_op(
        self, batch: Any, wanted: Callable[[HetEmbedding], bool]
    ) -> tuple[list[lookahead.Lookup], list[tf.Operation]]:
        """Looks up the rows of a step: sends the requests and installs the replies.

        Returns:
          lookups: installed lookups, in the order of the calls.
          received: as from `receive_op`.
        """
        requests = self.request_op(batch, wanted)
        replies, received = self.receive_op(self.call_op(requests))
        return self.install_op(requests, replies), received

    def install_op(
        self, requests: Sequence[Request], replies: Sequence[list[tf.Tensor]]
    ) -> list[lookahead.Lookup]:
        """Installs replies. Returns the lookups, whose tensors depend on the installation."""
        caches = [request.layer.worker_cache for request in requests]
        tables = tuple(cache.table for cache in caches if cache.is_watched)

        def send_op(messages: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
            if tables not in self._exchanges:
                self._exchanges[tables] = Exchange(tables)
            return self._exchanges[tables].send_op(messages)

        tickets = install_complete_op(
            caches, [r.ticket for r in requests], replies, send_op, of_lookups=True
        )
        return [
            lookahead.Lookup(request.layer, request.unique_ids, ticket)
            for request, ticket in zip(requests, tickets, strict=True)
        ]


def commit_op(
    caches: Sequence[WorkerCache], closures: Sequence[tf.Tensor], done: tf.Tensor
) -> list[tf.Operation]:
    """Pushes all updates of a closure after its last step, in one message to each server.

    Args:
      caches: caches that began the closure.
      closures: results of `begin_closure_op`, in the order of `caches`.
      done: int64 scalar. Closures up to this number do not run again.

    Returns:
      Ops that end the closure in the caches.
    """
    begun = [
        cache.commit_request_op(run, done) for cache, run in zip(caches, closures, strict=True)
    ]
    exchange = Exchange([cache.table for cache in caches])
    replies = exchange.send_op([requests for _, requests in begun])
    installed = [
        cache.install_op(ticket, reply)[0]
        for cache, (ticket, _), reply in zip(caches, begun, replies, strict=True)
    ]
    with tf.control_dependencies(installed):
        return [cache.end_closure_op(run) for cache, run in zip(caches, closures, strict=True)]


def write_through_op(lookups: list[lookahead.Lookup]) -> None:
    """Pushes due updates of write-through caches, after a step, in one message to each server."""
    layers = {id(lookup.layer): lookup.layer for lookup in lookups}
    caches = [layer.worker_cache for layer in layers.values() if layer.worker_cache.writes_through]
    if not caches:
        return
    tickets, requests = zip(*(cache.flush_request_op() for cache in caches), strict=True)
    exchange = Exchange([cache.table for cache in caches])
    install_complete_op(caches, tickets, exchange.send_op(requests), exchange.send_op)
