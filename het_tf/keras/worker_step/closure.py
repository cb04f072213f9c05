"""Functions that run on the workers: several steps of training, evaluation or prediction."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf.compat.function_graphs import run_beside
from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.closure_runner import ClosureRunner
from het_tf.distribute.step_rounds import StepRounds
from het_tf.distribute.worker_state import Holder, report_ops, reports_size
from het_tf.keras.data.batch_structure import Batch, read_weights, stacked_signature, take_batch
from het_tf.keras.data.feeds import Filler, Pass, StreamFeed, release_without_wait
from het_tf.keras.worker_step.batched_lookups import (
    SharedLookups,
    StepLookups,
    commit_op,
    find_keys_fn,
    shared,
)
from het_tf.keras.worker_step.dense_variables import DenseVariables
from het_tf.keras.worker_step.hot_phases import HotPhases
from het_tf.keras.worker_step.lookahead import StepsAhead
from het_tf.keras.worker_step.metrics import MetricScope
from het_tf.keras.worker_step.model_step import ModelStep, States, on_one_replica
from het_tf.keras.worker_step.source import Source
from het_tf.keras.worker_step.step_queue import Window
from het_tf.keras.worker_step.synchronous import EndOfStep, SynchronousSteps
from het_tf.layers.embedding import embeddings_of
from het_tf.layers.lookahead import Lookup
from het_tf.optimizers.joint_optimizer import ending_with
from het_tf.runtime.planned_batch import PhasedBatch, PlannedBatch, unplanned


class PredictClosure:
    """Runs `model.predict_step` over several batches on a worker.

    Attributes:
      strategy: strategy under which the model was created.
    """

    def __init__(self, model: keras.Model, strategy: HetParameterServerStrategy, element_spec: Any):
        """Creates the function, traced on first use. Arguments as for `StepClosure`."""
        self._model = model
        self.strategy = strategy
        self._element_spec = element_spec
        signature = stacked_signature(element_spec)
        self.on_batches = tf.function(self._on_batches, input_signature=signature, autograph=False)

    def _on_batches(self, *stacked: tf.Tensor) -> Any:
        """Returns the outputs of the model, stacked over the steps: [steps, batch, ...]."""
        weights = read_weights(self._model)
        variables = list(self._model.variables)

        @tf.function(input_signature=[tf.TensorSpec([], tf.int32)], autograph=False)
        def step(i: tf.Tensor) -> Any:
            batch = take_batch(self._element_spec, stacked, i)
            scope = MetricScope(weights, variables)
            sharing = shared(SharedLookups(self._model, scope, []))
            with scope, on_one_replica(self.strategy), sharing:
                return self._model.predict_step(batch)

        outputs = step.get_concrete_function().structured_outputs
        for output in tf.nest.flatten(outputs):
            if not isinstance(output, tf.Tensor):
                raise ValueError(
                    f"predict under HetParameterServerStrategy needs dense outputs, got {output}."
                )
        return tf.map_fn(
            step,
            tf.range(tf.shape(stacked[0])[0]),
            fn_output_signature=tf.nest.map_structure(tf.TensorSpec.from_tensor, outputs),
            parallel_iterations=1,
        )


def predict_in_order(
    closure: PredictClosure,
    feed: StreamFeed,
    steps_per_closure: int,
    callbacks: keras.callbacks.CallbackList,
    should_stop: Callable[[], bool],
) -> Any:
    """Runs a closure on all batches of a feed.

    Returns:
      The model's outputs as arrays, concatenated in the order of the batches.

    Raises:
      ValueError: the feed has no batches.
    """
    results: dict[int, Any] = {}
    handed_on = done = 0  # Numbers of closures and steps passed to callbacks.
    with ClosureRunner(closure.strategy) as runner:
        data = feed.start(steps_per_closure)
        filler = Filler(runner, data, closure.on_batches)
        while True:
            filler.fill(should_stop())
            if not runner.in_flight:
                break
            work, stacked = runner.wait()
            data.has_begun = True
            results[work.index] = stacked
            while handed_on in results:
                steps = tf.nest.flatten(results[handed_on])[0].shape[0]
                results[handed_on] = outputs = tf.nest.map_structure(
                    lambda a: a.reshape(-1, *a.shape[2:]) if a.ndim > 1 else a,
                    results[handed_on],
                )
                callbacks.on_predict_batch_begin(done)
                callbacks.on_predict_batch_end(done + steps - 1, {"outputs": outputs})
                handed_on, done = handed_on + 1, done + steps
    if not results:
        raise ValueError("The data has no batches.")
    in_order = [results[i] for i in range(handed_on)]
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *in_order)


# Worker index, steps, steps that waited for lookups, waiting time in microseconds, lookahead,
# whether the worker was refused, next step of its plan.
_HEADER = 7

# Number of steps that waited, waiting time in microseconds, width of the window, whether the worker
# may not make synchronous steps, and the next step of its plan.
Waited = tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class ClosureResult:
    """Result of a closure of training or evaluation steps.

    Attributes:
      worker: task index of the worker that ran the closure.
      steps: number of steps made. Fewer than requested if the worker's data ended.
      waited_steps: number of steps that waited for their lookups.
      waited_seconds: waiting time of all steps together.
      lookahead: number of steps by which lookups ran ahead.
      refused: whether the worker may not make the synchronous steps of the closure.
      plan_step: number of the next step of the worker's planned input. -1: there is no plan.
      cache_reports: int64, reports of `StepClosure.caches` in their order (`report_ops`).
      metric_states: float64[all metric states], summed over the steps.
      step_logs: logs of the last step, except results of metrics that the step updates.
    """

    worker: int
    steps: int
    waited_steps: int
    waited_seconds: float
    lookahead: int
    refused: bool
    plan_step: int
    cache_reports: np.ndarray
    metric_states: np.ndarray
    step_logs: dict[str, Any]


class StepClosure:
    """Runs `model.train_step` or `model.test_step` several times on a worker.

    The result is one int64 vector, because every tensor that a closure returns costs a message.

    Attributes:
      caches: caches of the model, and its dense replicas. Closures return their reports.
      looks_ahead: whether rows are looked up before the step that needs them.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: HetParameterServerStrategy,
        element_spec: Any,
        training: bool,
        dense: DenseVariables | None = None,
        rounds: StepRounds | None = None,
    ):
        """Creates the functions, traced on first use.

        Args:
          model: compiled and built model.
          strategy: strategy under which the model was created.
          element_spec: spec of one batch.
          training: whether to run `train_step`. False: `test_step`.
          dense: variables that workers replicate, for training.
          rounds: rounds of synchronous training steps.
        """
        self._dense = dense
        self._model = model
        self._strategy = strategy
        self._element_spec = element_spec
        self._training = training
        self._model_step = ModelStep(model, strategy, training, dense)
        self._layer_caches = [x.worker_cache for x in embeddings_of(model) if x.built]
        self._trained = dense if dense is not None and dense.trains else None
        self.caches: list[Holder] = [*self._layer_caches]
        if self._trained is not None:
            self.caches.append(dense.replicas)
        self._num_states = sum(int(np.prod(v.shape)) for v in self._model_step.metrics)
        self._synchronous: SynchronousSteps | None = None
        if rounds is None:
            self._plan_lookups()
        else:
            self._plan_synchronous(rounds)
        self._once = training and strategy.exactly_once
        signature = stacked_signature(element_spec)
        if self._once:
            signature += [tf.TensorSpec([], tf.int64)] * 2  # results of ClosureNumbers.take
        if self._synchronous is not None:
            signature += [tf.TensorSpec([5], tf.int64)]  # StepRounds.turns
        self.on_batches = tf.function(self._on_batches, input_signature=signature, autograph=False)
        self.on_iterator = tf.function(self._on_iterator, autograph=False)

    def _plan_lookups(self) -> None:
        """Decides which lookups run ahead of their step, and which run when the step begins."""
        find_keys = find_keys_fn(self._model, self._element_spec) if self._training else None
        layers = embeddings_of(self._model) if find_keys is not None else []
        replicas = None if self._trained is None else self._trained.replicas
        # Replicas with a bound of 0 exchange after every step. The next step waits for this.
        waits = replicas is not None and self._strategy.dense_staleness == 0
        travels = None if waits else replicas
        ahead = {
            id(layer): cache.steps_ahead(waits)
            for layer in layers
            if (cache := layer.stored.cache) is not None and cache.steps_ahead(waits) > 0
        }
        self.looks_ahead = bool(ahead)
        self.lookahead = max([*ahead.values(), 0 if travels is None else 1])
        self._is_ahead: Callable[[Any], bool] = lambda layer: id(layer) in ahead
        self._exchanging = travels
        inline = find_keys if len(ahead) < len(layers) else None
        self._carries = inline is not None and waits
        self._inline = StepLookups(inline, replicas if self._carries else None)
        self._phases = HotPhases(self._model, self._element_spec, find_keys)
        given = [x.stored.cache.lookahead or 0 for x in layers if id(x) in ahead]
        self.window = Window(self.lookahead, max([1, *given])) if self.lookahead else None
        self._ahead = None
        if self.window is not None:
            lookups = StepLookups(find_keys if ahead else None, travels)
            per_message = min(
                [x.worker_cache.steps_per_message for x in layers if id(x) in ahead and x.built]
                + [(self.lookahead + 1) // 2]
            )
            self._ahead = StepsAhead(
                self.window, self._element_spec, lookups, self._is_ahead, per_message, self._phases
            )

    def _plan_synchronous(self, rounds: StepRounds) -> None:
        """Every step looks up the rows of the next one."""
        find_keys = find_keys_fn(self._model, self._element_spec)
        self._synchronous = SynchronousSteps(self._model, self._element_spec, find_keys, rounds)
        self.looks_ahead, self.lookahead, self.window, self._ahead = False, 0, None, None
        self._is_ahead = lambda layer: True
        self._exchanging, self._carries = None, False
        self._inline = StepLookups(None, None)

    @contextlib.contextmanager
    def steps_of(self, data: Pass) -> Iterator[None]:
        """Context of a pass. Prepared steps in this context belong to the batches of the pass."""
        if self.window is None:
            yield
            return
        with self.window.of(data.name, data.goes_on):
            yield

    @property
    def log_names(self) -> tuple[str, ...]:
        """Names of the step's logs, metrics included, in the step's order. Empty until traced."""
        return self._model_step.log_names

    def unpack(self, packed: np.ndarray) -> ClosureResult:
        """Unpacks the vector that `on_batches` or `on_iterator` returns."""
        ends = np.cumsum([_HEADER, reports_size(self.caches), self._num_states])
        header, reports, states, logs = np.split(packed, ends)
        names = self._model_step.scalar_log_names() if header[1] else ()
        return ClosureResult(
            worker=int(header[0]),
            steps=int(header[1]),
            waited_steps=int(header[2]),
            waited_seconds=int(header[3]) * 1e-6,
            lookahead=int(header[4]),
            refused=bool(header[5]),
            plan_step=int(header[6]),
            cache_reports=reports,
            metric_states=states.view(np.float64),
            # A closure that made no step returns no logs.
            step_logs=dict(zip(names, logs.view(np.float64).tolist(), strict=True)),
        )

    # Methods for graphs.

    def _on_batches(self, *stacked: tf.Tensor) -> tf.Tensor:
        """Runs steps over the closure's batches. Every component is stacked over the steps.

        With `exactly_once`, the closure's number and `done` are two more arguments. Of synchronous
        steps, the turn is one more (`StepRounds.turns`).
        """
        closure = turn = None
        if self._once:
            stacked, closure = stacked[:-2], stacked[-2:]
        if self._synchronous is not None:
            stacked, turn = stacked[:-1], stacked[-1]
        source = Source(
            first=lambda wanted: (),
            has=lambda: tf.constant(True),
            get=lambda i: take_batch(self._element_spec, stacked, i),
            next=lambda more: (),
        )
        return self._loop(source, tf.shape(stacked[0])[0], None, closure, turn)

    def _on_iterator(
        self, iterator: tf.data.Iterator, num_steps: tf.Tensor, ahead: tf.Tensor, *turn: tf.Tensor
    ) -> tf.Tensor:
        """Runs up to `num_steps` steps over batches of the worker's own dataset.

        Lookahead may read up to `ahead` more batches for the next closure. No other unused batch is
        read, because the iterator cannot return a batch twice.
        """
        release_without_wait(iterator)
        none = tf.experimental.Optional.empty(iterator.element_spec)
        is_planned = isinstance(iterator.element_spec, PlannedBatch)
        is_phased = isinstance(iterator.element_spec, PhasedBatch)

        def element(i: tf.Tensor, batch: tf.experimental.Optional) -> Any:
            return batch.get_value()

        def batch_in(i: tf.Tensor, batch: tf.experimental.Optional) -> Batch:
            return batch.get_value().batch

        source = Source(
            first=lambda wanted: (tf.cond(wanted, iterator.get_next_as_optional, lambda: none),),
            has=lambda batch: batch.has_value(),
            get=batch_in if is_planned or is_phased else element,
            planned=element if is_planned else None,
            phased=element if is_phased and self._training else None,
            next=lambda more, batch: (tf.cond(more, iterator.get_next_as_optional, lambda: batch),),
        )
        return self._loop(source, num_steps, ahead, None, *turn)

    def _loop(
        self,
        source: Source,
        num_steps: tf.Tensor,
        ahead: tf.Tensor | None,
        closure: tuple[tf.Tensor, tf.Tensor] | None = None,
        turn: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Builds the closure. `ahead` None: only steps of this closure are prepared."""
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        for cache in self._layer_caches:
            cache.open_op()
        runs = []
        if closure is not None:
            number, done = closure
            runs = [cache.begin_closure_op(number) for cache in self._layer_caches]
            with tf.control_dependencies(runs):
                num_steps = tf.identity(num_steps)
        states = self._model_step.zero_states()
        self._model_step.read_constants()
        # The shape is unknown, because tracing the loop's body determines the number of logs.
        logs = tf.compat.v1.placeholder_with_default(tf.zeros([0], tf.float64), [None])
        if turn is not None:
            steps, states, logs, waited = self._run_together(
                self._synchronous, source, num_steps, (worker, turn), states, logs
            )
        else:
            run = self._run_inline if self.window is None else self._run_ahead
            steps, states, logs, waited = run(source, num_steps, ahead, states, logs)
        with tf.control_dependencies([steps]):
            if self._dense is not None:
                self._dense.replicas.settle_op(tf.cast(steps > 0, tf.int64), reads=False)
            ended = commit_op(self._layer_caches, runs, done) if runs else []
        with tf.control_dependencies([steps, *ended]):
            reports = report_ops(self.caches)
        floats = [tf.reshape(tf.cast(s, tf.float64), [-1]) for s in states] + [logs]
        header = tf.stack([tf.cast(x, tf.int64) for x in (worker, steps, *waited)])
        return tf.concat([header, reports, tf.bitcast(tf.concat(floats, 0), tf.int64)], 0)

    def _run_inline(
        self,
        source: Source,
        num_steps: tf.Tensor,
        ahead: tf.Tensor | None,
        states: States,
        logs: tf.Tensor,
    ) -> tuple[tf.Tensor, States, tf.Tensor, Waited]:
        """Runs one step after the other, without lookahead."""
        del ahead

        def cond(step: tf.Tensor, states: States, logs: tf.Tensor, *carry: Any) -> tf.Tensor:
            del states, logs
            return tf.logical_and(step < num_steps, source.has(*carry))

        def body(step: tf.Tensor, states: States, logs: tf.Tensor, *carry: Any) -> Any:
            del logs
            batch = self._phases.batch_op(source, step, *carry)
            states, logs = self._step(step, batch, [], states)
            return step + 1, states, logs, *source.next(step + 1 < num_steps, *carry)

        first = (tf.constant(0), states, logs, *source.first(num_steps > 0))
        steps, states, logs, *_ = tf.while_loop(cond, body, first, parallel_iterations=1)
        return steps, states, logs, _no_wait()

    def _run_together(
        self,
        together: SynchronousSteps,
        source: Source,
        num_steps: tf.Tensor,
        worker_turn: tuple[tf.Tensor, tf.Tensor],
        states: States,
        logs: tf.Tensor,
    ) -> tuple[tf.Tensor, States, tf.Tensor, Waited]:
        """Runs synchronous steps, if the worker may make them (`StepRounds.turns`)."""
        replicas = self._dense.replicas
        worker, turn = worker_turn
        round_number, member, members, made, plan_step = tf.unstack(turn)
        read = source.planned or (lambda *state: unplanned(source.get(*state)))
        # A worker that was started since, or made fewer steps, has other dense variables.
        made_here = replicas.report_op()[2 + replicas.counter_names.index("steps")]
        joined = together.rounds.join_op(round_number, member, worker)
        allowed = tf.logical_and(tf.equal(made, made_here), joined)
        wanted = tf.logical_and(allowed, num_steps > 0)
        carry = source.first(wanted)
        there = tf.logical_and(wanted, source.has(*carry))
        prepared = together.prepare(there, lambda: read(tf.constant(0), *carry))
        # A worker that was started since has another part of its plan before it.
        follows = tf.logical_or(plan_step < 0, tf.equal(prepared.step, plan_step))
        there = tf.logical_and(there, follows)
        allowed = tf.logical_and(allowed, tf.logical_or(tf.logical_not(prepared.there), follows))
        keeps_updates = plan_step >= 0 if source.planned is not None else None
        found = together.look_up(dataclasses.replace(prepared, there=there), keeps_updates)

        def body(
            step: tf.Tensor,
            there: tf.Tensor,
            components: list[tf.Tensor],
            found: list[tf.Tensor],
            states: States,
            logs: tf.Tensor,
            carry: tuple[Any, ...],
        ) -> Any:
            del logs
            more = step + 1 < num_steps
            carry = source.next(more, *carry)
            more = tf.logical_and(more, source.has(*carry))
            following = together.prepare(more, lambda: read(step + 1, *carry))
            lookups = together.lookups(found)
            place = (round_number, member, step, tf.logical_not(more))
            end = EndOfStep(together, place, members, following, lookups, keeps_updates)
            with ending_with(end):
                states, logs = self._step(step, together.batch(components), lookups, states)
            return step + 1, more, following.components, end.next_lookups(), states, logs, carry

        first = (tf.constant(0), there, prepared.components, found, states, logs, carry)
        shapes = tf.nest.map_structure(_shape_of, first)
        shapes = (*shapes[:2], together.shapes, *shapes[3:])
        steps, _, _, _, states, logs, _ = tf.while_loop(
            lambda step, there, *_: there,
            body,
            first,
            shape_invariants=shapes,
            parallel_iterations=1,
        )
        with tf.control_dependencies(
            together.rounds.leave_op(round_number, member, tf.equal(steps, 0))
        ):
            steps = tf.identity(steps)
        # The steps of a plan have successive numbers.
        made_steps = prepared.step + tf.cast(steps, tf.int64)
        next_step = tf.where(prepared.step < 0, prepared.step, made_steps)
        return steps, states, logs, (*_no_wait()[:3], tf.logical_not(allowed), next_step)

    def _run_ahead(
        self,
        source: Source,
        num_steps: tf.Tensor,
        ahead: tf.Tensor | None,
        states: States,
        logs: tf.Tensor,
    ) -> tuple[tf.Tensor, States, tf.Tensor, Waited]:
        """Runs parallel loops: two prepare steps, one computes, one exchanges contributions."""
        window = self.window
        with tf.control_dependencies([num_steps]):
            kept = window.open_op(keeps=ahead is not None)
        opened = [] if self._exchanging is None else [self._exchanging.open_loop_op()]
        with tf.control_dependencies([kept, *opened]):
            num_steps = tf.identity(num_steps)
        if ahead is None:
            count = num_steps - kept
        else:
            count = num_steps + tf.minimum(ahead, window.width) - kept
        run_beside(lambda: self._ahead.prepare_op(source, count))
        if self._exchanging is not None:
            with tf.control_dependencies(opened):
                run_beside(self._exchanging.exchange_loop_op)

        def cond(step: tf.Tensor, optional: tf.Tensor, *_: Any) -> tf.Tensor:
            more = tf.raw_ops.OptionalHasValue(optional=optional)
            return tf.logical_and(step < num_steps, more)

        def body(
            step: tf.Tensor,
            optional: tf.Tensor,
            waits: tf.Tensor,
            seconds: tf.Tensor,
            states: States,
            logs: tf.Tensor,
        ) -> Any:
            del logs
            batch, lookups = self._ahead.unpack(optional)
            states, logs = self._step(step, batch, lookups, states)
            # `take_op` frees a place for the next lookup, which carries this step's due updates.
            updates = [update for lookup in lookups[:1] for update in lookup.room.updates()]
            with tf.control_dependencies([*states, logs, *updates]):
                again = step + 1 < num_steps
            none = tf.zeros([], tf.float64)
            optional, waited = tf.cond(again, window.take_op, lambda: (tf.identity(optional), none))
            waits += tf.cast(waited > 0, tf.int32)
            return step + 1, optional, waits, seconds + waited, states, logs

        optional, waited = window.take_op()
        first_waits = tf.cast(waited > 0, tf.int32)
        first = (tf.constant(0), optional, first_waits, waited, states, logs)
        steps, _, waits, seconds, states, logs = tf.while_loop(
            cond, body, first, parallel_iterations=1
        )
        # The first step waits in any window if no closure before has prepared it.
        window.adapt_op(steps, waits - tf.where(kept > 0, 0, first_waits))
        if self._exchanging is not None:
            with tf.control_dependencies([steps]):
                self._exchanging.close_loop_op()
        return steps, states, logs, (waits, seconds * 1e6, window.width, *_no_wait()[3:])

    def _step(
        self, step: tf.Tensor, batch: Batch, lookups: list[Lookup], states: States
    ) -> tuple[States, tf.Tensor]:
        lookups = list(lookups)

        def look_up() -> list[tf.Operation]:
            found, received = self._inline.begin_op(batch, lambda x: not self._is_ahead(x))
            lookups.extend(found)
            return received

        if not self._carries:
            look_up()
        if self._dense is not None:
            made = tf.cast(step > 0, tf.int64)
            carrier = look_up if self._carries else None
            self._dense.replicas.settle_op(made, reads=True, carrier=carrier)
        return self._model_step.trace(batch, lookups, states)


def _no_wait() -> Waited:
    none = tf.constant(0)
    return none, tf.constant(0.0, tf.float64), none, none, tf.constant(-1)


def _shape_of(tensor: Any) -> Any:
    return tensor.shape if tf.is_tensor(tensor) else tf.type_spec_from_value(tensor)
