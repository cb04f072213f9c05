"""Implementation of `fit`, `evaluate` and `predict` under `HetParameterServerStrategy`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from het_tf.compat import keras_internals
from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.closure_runner import ClosureRunner
from het_tf.keras.callbacks.backup import Resuming
from het_tf.keras.callbacks.callback_list import (
    Logs,
    batch_hooks,
    callback_list,
    showing_status,
)
from het_tf.keras.callbacks.traffic import Traffic
from het_tf.keras.compiled_model import CompiledModel, check_callbacks
from het_tf.keras.data import datasets
from het_tf.keras.data.arguments import EvaluateArguments, FitArguments, PredictArguments
from het_tf.keras.data.feeds import Feed, Validation, eval_feed, predict_feed, train_feed
from het_tf.keras.worker_step.closure import predict_in_order
from het_tf.keras.worker_step.dense_variables import averages_weights
from het_tf.keras.worker_step.metrics import without_names

# Steps per closure by default. More steps hide the 1.2-1.7 ms of scheduling a closure. Fewer steps
# let the workers end an epoch together and keep logs fresh.
_DEFAULT_STEPS_PER_EXECUTION = 16
_AUTO_CLOSURES_PER_WORKER = 8


class _NoBatchesError(ValueError):
    """The data of a pass had no batches."""


class ParameterServerTrainer:
    """Trainer of one model. Schedules closures on the workers of the strategy."""

    def __init__(self, model: keras.Model, strategy: HetParameterServerStrategy):
        """Creates the trainer of a model that was made under `strategy`."""
        self._model = model
        self._strategy = strategy
        self._compiled = CompiledModel(model, strategy)
        self._epoch = 0  # Current epoch of the last `fit`.
        self._waits = np.zeros(4)  # Values of `lookahead_stats`.
        self._lookahead = 0
        self._traffic = Traffic(strategy)
        self.one_batches = datasets.OneBatches()

    def forget_compiled(self) -> None:
        """Drops all traced functions. Call it after `compile`."""
        self._compiled = CompiledModel(self._model, self._strategy)

    def _check_servers(self) -> None:
        """Checks that the cluster is open. Drops functions traced before a server recovered."""
        self._strategy.check_open()
        if self._compiled.is_of_lost_servers:
            self.forget_compiled()

    # Entry points, with the arguments of `keras.Model`.

    def fit(self, given: FitArguments) -> keras.callbacks.History:
        """Trains the model. Returns the history."""
        self._check_servers()
        model = self._model
        if given.validation_split and given.validation_data is None:
            given = datasets.split_validation(given)
        feed = train_feed(
            self._strategy,
            given.x,
            given.y,
            given.sample_weight,
            batch_size=given.batch_size,
            shuffle=given.shuffle,
            steps=given.steps_per_epoch,
            class_weight=given.class_weight,
        )
        self._compiled.build(feed.element_spec)
        self._traffic = Traffic(self._strategy)
        callbacks = callback_list(
            self._model, given.callbacks, feed, given.verbose, given.epochs, self._traffic
        )
        check_callbacks(model, callbacks)
        validation = Validation(self._strategy, given)
        model.stop_training = False
        with showing_status(callbacks):
            callbacks.on_train_begin()
            self._waits, self._lookahead = np.zeros(4), 0
            if self._strategy.exactly_once:
                self._strategy.flush()  # A numbered closure may push only its own updates.
            resuming = Resuming(model, self._strategy, callbacks)
            self._epoch = keras_internals.take_initial_epoch(model) or given.initial_epoch
            resuming.begin(self._epoch)
            while True:
                try:
                    logs = self._fit_epochs(feed, given.epochs, callbacks, validation, resuming)
                    break
                except tf.errors.UnavailableError as error:
                    self._epoch = resuming.go_on(error, self._epoch)
                self.forget_compiled()
                self._compiled.build(feed.element_spec)
            callbacks.on_train_end(logs)
        return model.history

    def _fit_epochs(
        self,
        feed: Feed,
        epochs: int,
        callbacks: keras.callbacks.CallbackList,
        validation: Validation,
        resuming: Resuming,
    ) -> Logs:
        """Trains from epoch `self._epoch` on, and advances `self._epoch`. Returns the last logs."""
        model = self._model
        logs: Logs = {}

        def end(batch: int, logs: Logs) -> None:
            callbacks.on_train_batch_end(batch, logs)
            resuming.note_steps()

        # The monitor also runs between passes: a worker that hangs would block the flush, too.
        with self._strategy.health.monitor, self._compiled.on_workers(), self._flushed_on_error():
            first = self._epoch
            for epoch in range(first, epochs):
                self._epoch = epoch
                model.reset_metrics()
                callbacks.on_epoch_begin(epoch)
                self._traffic.begin_epoch()
                if self._compiled.dense is not None:
                    self._compiled.dense.replicas.begin()
                try:
                    logs = self._run_steps(
                        feed,
                        training=True,
                        on_batch=batch_hooks(callbacks, callbacks.on_train_batch_begin, end),
                        should_stop=lambda: model.stop_training,
                    )
                except _NoBatchesError:
                    if epoch == first:
                        raise
                    warnings.warn(
                        f"The data ran out before epoch {epoch + 1} of {epochs}: fit ends here. A"
                        " generator is read once, a tf.data.Dataset or a keras.utils.PyDataset in"
                        " every epoch.",
                        stacklevel=5,
                    )
                    break
                logs.update(self._traffic.epoch_logs(_examples_of(model)))
                self._flush_for_callbacks()
                if validation.is_due(epoch):
                    logs.update(self._validate(validation, callbacks))
                callbacks.on_epoch_end(epoch, logs)
                if model.stop_training:
                    break
            self._strategy.flush()
            resuming.finish()
            if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
                model.optimizer.finalize_variable_values(model.trainable_weights)
        return logs

    def evaluate(self, given: EvaluateArguments) -> Logs | list[float] | float:
        """Evaluates the model. Returns the metrics in the form of `keras.Model.evaluate`."""
        self._check_servers()
        feed = eval_feed(
            self._strategy,
            given.x,
            given.y,
            given.sample_weight,
            batch_size=given.batch_size,
            steps=given.steps,
        )
        self._compiled.build(feed.element_spec)
        callbacks = callback_list(self._model, given.callbacks, feed, given.verbose)
        logs = self._evaluate(feed, callbacks)
        return logs if given.return_dict else without_names(self._model, logs)

    def run_on_batch(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        class_weight: Mapping[int, float] | None = None,
        *,
        training: bool,
        return_dict: bool,
    ) -> Logs | list[float] | float:
        """Runs one step on one worker. If `fit` is running, its metrics do not count the step."""
        self._check_servers()
        batch = self.one_batches.dataset(x, y, sample_weight)
        if batch is None:
            batch_size = datasets.num_examples(x)
        else:
            x, y, sample_weight, batch_size = batch, None, None, None
        if training:
            feed = train_feed(
                self._strategy,
                x,
                y,
                sample_weight,
                batch_size=batch_size,
                shuffle=False,
                steps=None,
                class_weight=class_weight,
            )
        else:
            feed = eval_feed(self._strategy, x, y, sample_weight, batch_size=batch_size)
            self._strategy.flush(slots=False)
        self._compiled.build(feed.element_spec)
        with self._one_step() if training else contextlib.nullcontext():
            logs = self._run_steps(
                feed,
                training=training,
                on_batch=lambda first, last, logs: None,
                should_stop=lambda: False,
            )
        return logs if return_dict else without_names(self._model, logs)

    def predict(self, given: PredictArguments) -> Any:
        """Predicts. Returns arrays in the order of the input."""
        self._check_servers()
        feed = predict_feed(given.x, given.batch_size, given.steps)
        self._compiled.build_weights(feed.element_spec)
        callbacks = callback_list(self._model, given.callbacks, feed, given.verbose)
        self._flush_for_callbacks()
        self._model.stop_predicting = False
        callbacks.on_predict_begin()
        outputs = predict_in_order(
            self._compiled.predict_closure(feed.element_spec),
            feed,
            self._steps_per_closure(feed),
            callbacks,
            lambda: self._model.stop_predicting,
        )
        callbacks.on_predict_end()
        return outputs

    def _steps_per_closure(self, feed: Feed) -> int:
        steps = self._model.steps_per_execution
        if steps != "auto":
            return steps
        if feed.num_steps is None:
            return _DEFAULT_STEPS_PER_EXECUTION
        closures = _AUTO_CLOSURES_PER_WORKER * self._strategy.num_workers
        return max(1, min(_DEFAULT_STEPS_PER_EXECUTION, feed.num_steps // closures))

    def _run_steps(
        self,
        feed: Feed,
        training: bool,
        on_batch: Callable[[int, int, Callable[[], Logs]], None],
        should_stop: Callable[[], bool],
    ) -> Logs:
        """Runs one pass. Returns the final logs, and stores the final states of the metrics."""
        compiled, sums = self._compiled, self._compiled.sums
        if sums is None:
            raise RuntimeError("compile was called by a callback: call it between two calls of fit")
        closure = compiled.step_closure(feed.element_spec, training)
        done = 0

        def logs_now() -> Logs:
            metrics = sums.results()
            return {n: last.step_logs.get(n, metrics.get(n)) for n in closure.log_names}

        numbered = training and self._strategy.exactly_once
        fn = closure.on_iterator if feed.on_iterator else closure.on_batches
        data = feed.start(self._steps_per_closure(feed), closure.lookahead)
        self._strategy.held.trace_flush()
        with (
            sums.from_zero(),
            closure.steps_of(data),
            ClosureRunner(self._strategy, numbered=numbered) as runner,
        ):
            filler = compiled.filler(runner, data, fn, training)
            while True:
                filler.fill(should_stop())
                if not runner.in_flight:
                    break
                work, packed = runner.wait()
                if training and compiled.dense is not None:
                    compiled.dense.replicas.note_steps()
                result = closure.unpack(packed)
                if training:
                    waited = result.steps, result.waited_steps, result.waited_seconds
                    self._waits += (result.steps, *(waited if closure.looks_ahead else (0, 0, 0)))
                    if closure.looks_ahead:
                        self._lookahead = max(self._lookahead, result.lookahead)
                        self._traffic.take_wait(result.waited_seconds)
                if training:
                    self._traffic.take(closure.caches, result.cache_reports, result.steps)
                else:
                    self._strategy.held.record_cache_reports(closure.caches, result.cache_reports)
                filler.finished(work, result.worker, result.steps, result.refused, result.plan_step)
                if not result.steps:
                    continue
                last, data.has_begun = result, True
                sums.add(result.metric_states)
                on_batch(done, done + result.steps - 1, logs_now)
                done += result.steps
            if done > 0:
                sums.write()
                return logs_now()
        raise _NoBatchesError("The data has no batches.")

    def _validate(self, validation: Validation, callbacks: keras.callbacks.CallbackList) -> Logs:
        try:
            logs = self._evaluate(validation.feed, callbacks)
        except _NoBatchesError as error:
            if not validation.had_batches:
                raise ValueError("validation_data has no batches.") from error
            warnings.warn(
                f"validation_data ran out before epoch {self._epoch + 1}, which has none. A"
                " generator is read once, a tf.data.Dataset or a keras.utils.PyDataset each time.",
                stacklevel=6,
            )
            return {}
        validation.had_batches = True
        return {f"val_{name}": value for name, value in logs.items()}

    def _evaluate(self, feed: Feed, callbacks: keras.callbacks.CallbackList) -> Logs:
        model = self._model
        self._flush_for_callbacks()
        self._compiled.build(feed.element_spec)
        model.stop_evaluating = False
        callbacks.on_test_begin()
        model.reset_metrics()
        logs = self._run_steps(
            feed,
            training=False,
            on_batch=batch_hooks(
                callbacks, callbacks.on_test_batch_begin, callbacks.on_test_batch_end
            ),
            should_stop=lambda: model.stop_evaluating,
        )
        callbacks.on_test_end(logs)
        return logs

    def _flush_for_callbacks(self) -> None:
        """Flushes the variables that callbacks read, with slots if slots average the weights."""
        optimizer = getattr(self._model, "optimizer", None)
        self._strategy.flush(slots=averages_weights(optimizer))

    @property
    def has_replicas(self) -> bool:
        """Whether the workers currently have replicas of the dense variables."""
        return self._compiled.has_replicas

    def lookahead_stats(self) -> dict[str, float]:
        """Returns the counters of the last `fit`. See `het_tf.keras.Model.lookahead_stats`."""
        *counts, seconds = self._waits.tolist()
        names = ("steps", "ahead_steps", "waited_steps")
        stats = dict(zip(names, map(int, counts), strict=True))
        return stats | {"waited_seconds": seconds, "lookahead": self._lookahead}

    @contextlib.contextmanager
    def _one_step(self) -> Iterator[None]:
        """Context of a single training step on one worker. `fit` may be running."""
        with self._compiled.on_workers(), self._flushed_on_error():
            self._strategy.join()  # Closures still scheduled would use this step's window.
            if self._compiled.has_replicas:
                self._strategy.flush()
            if self._compiled.dense is not None:
                self._compiled.dense.replicas.begin(workers=1)
            yield
            self._strategy.flush()

    @contextlib.contextmanager
    def _flushed_on_error(self) -> Iterator[None]:
        """Flushes the caches, if possible, when training stops with an error.

        Raises:
          tf.errors.UnavailableError: a parameter server was lost. Replaces any other error that the
            loss caused.
        """
        try:
            yield
        except BaseException as error:
            # Errors of callbacks and metrics, which access the servers directly, need explaining.
            explained = self._strategy.explain(error)
            if isinstance(explained, tf.errors.UnavailableError):
                raise explained from (None if explained is error else error)
            try:
                self._strategy.flush()
            except Exception:
                logging.exception("could not flush the caches after training failed")
            raise


def _examples_of(model: keras.Model) -> float | None:
    """Returns the number of examples whose losses Keras averages. None: it averages none.

    What an own `train_step` averages is unknown.
    """
    if type(model).train_step is not keras.Model.train_step:
        return None
    loss = next((metric for metric in model.metrics if metric.name == "loss"), None)
    return float(loss.count) if isinstance(loss, keras.metrics.Mean) else None
