"""All lookups of a step, or of several, in one exchange, with the dense variables'.

docs/protocol.md, 7.
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
from het_tf.runtime.broadcast import cluster_devices
from het_tf.tables.exchange import Exchange
from het_tf.tables.table import EmbeddingTable
from het_tf.tables.worker_cache import WorkerCache, install_complete_op

Keys = list[tuple[HetEmbedding, tf.Tensor]]


def find_keys_fn(model: keras.Model, element_spec: Any) -> Callable[[Any], Keys] | None:
    """How to find out from a batch which keys a training step of a model will look up.

    Args:
      model: built.
      element_spec: spec of one batch.

    Returns:
      A function from a batch to layers and their int64 keys, in the order of the calls; None, with
      a line in the log, if there is no way.
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
    # A layer around it may call one in a function of its own, which only a call of the model shows.
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
    """Of a functional or sequential model, those in its graph and in the graphs within."""
    for layer in model.layers:
        yield layer
        if isinstance(layer, keras.Model) and keras_internals.calls_as_keras_does(layer):
            yield from _layers_called_by(layer)


class SharedLookups:
    """While a model is called, what its layers look up goes in one message to each server.

    Calls ask it through `of_call`, in a context of `shared`.
    """

    def __init__(
        self, model: keras.Model, scope: keras.StatelessScope, made: list[lookahead.Lookup]
    ):
        """Describes them.

        Args:
          model: to be called.
          scope: with the values of its variables.
          made: to have the lookups.
        """
        self._model, self._scope, self._made = model, scope, made
        cached = [layer for layer in embeddings_of(model) if layer.built and layer.stored.is_cached]
        self._is_worth = len(cached) > 1 and keras_internals.calls_as_keras_does(model)
        self._graph = tf.compat.v1.get_default_graph()

    @contextlib.contextmanager
    def of_call(self, model: keras.Model, args: Any, kwargs: Any) -> Iterator[None]:
        """Prepares what a call of a model looks up, if it is this model."""
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
    """Calls in this context look up through `lookups`."""
    token = _shared.set(lookups)
    try:
        yield
    finally:
        _shared.reset(token)


def lookups_of_call(model: keras.Model, args: Any, kwargs: Any) -> AbstractContextManager[None]:
    """To be entered around a call of a model with these arguments."""
    lookups = _shared.get()
    return contextlib.nullcontext() if lookups is None else lookups.of_call(model, args, kwargs)


def _record_calls(
    model: keras.Model,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    scope: keras.StatelessScope | None = None,
) -> list[lookahead.Call]:
    """The calls of its layers that a call of a model makes: it is run up to there.

    Without those of layers whose keys only the call itself has: drawn by chance, or of rows or
    trained variables. Such a layer looks up when it is called.
    """
    made: list[lookahead.Call] = []

    # In a function, of which TensorFlow drops what the keys do not need.
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
    """In it, a model's variables are zeros, but for those that keys may depend on.

    TensorFlow drops what is computed of the others, but not that they are read from their servers.
    """

    def __init__(self, model: keras.Model, scope: keras.StatelessScope | None):
        """scope: with the values of those that keys may depend on, if not their own."""
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
    """A lookup for which requests are written."""

    layer: HetEmbedding
    unique_ids: tf.Tensor
    ticket: tf.Tensor
    requests: list[tf.Tensor]  # uint8 [bytes], one for each server

    def tensors(self) -> list[tf.Tensor]:
        """Its tensors, to be carried out of a branch."""
        return [self.unique_ids, self.ticket, *self.requests]

    def with_tensors(self, tensors: Sequence[tf.Tensor]) -> Request:
        """The same lookup of what `tensors` were made of."""
        unique_ids, ticket, *requests = tensors
        return Request(self.layer, unique_ids, ticket, requests)


def requests_op(calls: Sequence[lookahead.Call]) -> list[Request]:
    """Requests for what calls of layers look up, in their order."""
    caches = [call.layer.worker_cache for call in calls]
    unique_ids = [cache.unique_ids_op(call.keys) for cache, call in zip(caches, calls, strict=True)]
    return [
        Request(call.layer, unique, *cache.request_op(unique, call.fresh))
        for call, cache, unique in zip(calls, caches, unique_ids, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Calls:
    """What has been sent and not yet been answered.

    Attributes:
      exchange: None: nothing was sent.
      tensors: scalar variants: of `exchange.call_op`, and the replicas' ticket, if there is one.
    """

    exchange: Exchange | None
    tensors: list[tf.Tensor]


class StepLookups:
    """Looks up what steps need, all in one message to each parameter server."""

    def __init__(
        self,
        find_keys: Callable[[Any], Keys] | None,
        replicas: DenseReplicas | None,
    ):
        """Describes the lookups.

        Args:
          find_keys: from `find_keys_fn`; None: layers look up for themselves.
          replicas: whose requests travel along.
        """
        self._find_keys = find_keys
        self._replicas = replicas
        # Of those that ask again: steps of the same layers do so in the same way.
        self._exchanges: dict[tuple[EmbeddingTable, ...], Exchange] = {}

    def request_op(self, batch: Any, wanted: Callable[[HetEmbedding], bool]) -> list[Request]:
        """Requests for what the layers that are wanted will ask for in a step.

        Args:
          batch: of the step.
          wanted: says of a layer whether to.

        Returns:
          The requests, in the order of the calls.
        """
        keys = [] if self._find_keys is None else self._find_keys(batch)
        return requests_op([lookahead.Call(layer, k, False) for layer, k in keys if wanted(layer)])

    def call_op(self, requests: Sequence[Request]) -> Calls:
        """Sends what was requested, for any number of steps, and for the replicas."""
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
        exchange = Exchange(cluster_devices("ps"), parties)
        return Calls(exchange, [exchange.call_op(messages), *dense])

    def receive_op(self, calls: Calls) -> tuple[list[list[tf.Tensor]], list[tf.Operation]]:
        """Waits for the replies.

        Returns:
          replies: to each of the requests, for `install_op`.
          received: when these are done, the replicas know what was answered to them.
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
        """Looks up what a step needs: requests, exchanges and installs.

        Returns:
          lookups: in the order of the calls; when they are there, so are the rows.
          received: as of `receive_op`.
        """
        requests = self.request_op(batch, wanted)
        replies, received = self.receive_op(self.call_op(requests))
        return self.install_op(requests, replies), received

    def install_op(
        self, requests: Sequence[Request], replies: Sequence[list[tf.Tensor]]
    ) -> list[lookahead.Lookup]:
        """Takes the replies; when the lookups are there, so are the rows."""
        caches = [request.layer.worker_cache for request in requests]
        tables = tuple(cache.table for cache in caches if cache.is_watched)

        def send_op(messages: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
            if tables not in self._exchanges:
                self._exchanges[tables] = Exchange(cluster_devices("ps"), tables)
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
    """After the last step of a closure: sends all its updates, in one message to each server.

    Args:
      caches: in each of which the closure was begun.
      closures: what that gave, in their order.
      done: of `ops.cache_commit_closure`.

    Returns:
      Ops that have run when the closure has ended.
    """
    begun = [
        cache.commit_request_op(run, done) for cache, run in zip(caches, closures, strict=True)
    ]
    exchange = Exchange(cluster_devices("ps"), [cache.table for cache in caches])
    replies = exchange.send_op([requests for _, requests in begun])
    installed = [
        cache.install_op(ticket, reply)[0]
        for cache, (ticket, _), reply in zip(caches, begun, replies, strict=True)
    ]
    with tf.control_dependencies(installed):
        return [cache.end_closure_op(run) for cache, run in zip(caches, closures, strict=True)]


def write_through_op(lookups: list[lookahead.Lookup]) -> None:
    """After a step's updates: sends those that must not wait, in one message to each server."""
    layers = {id(lookup.layer): lookup.layer for lookup in lookups}
    caches = [layer.worker_cache for layer in layers.values() if layer.worker_cache.writes_through]
    if not caches:
        return
    tickets, requests = zip(*(cache.flush_request_op() for cache in caches), strict=True)
    exchange = Exchange(cluster_devices("ps"), [cache.table for cache in caches])
    install_complete_op(caches, tickets, exchange.send_op(requests), exchange.send_op)
