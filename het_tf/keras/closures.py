"""The functions that run on the workers: several steps of training, evaluation or prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.cache_reports import REPORT_SIZE, report_ops
from het_tf.keras.dense import DenseVariables
from het_tf.keras.metric_state import MetricScope, metric_variables
from het_tf.layers.embedding import embeddings_of

_HEADER = 2  # worker index, number of steps

Batch = Any
States = list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class ClosureResult:
    """What a closure of training or evaluation steps came to.

    Attributes:
      worker: task index of the worker that ran it.
      steps: steps done; fewer than asked for when the worker's data ended.
      cache_reports: int64[caches, 4], of the model's own caches in their order.
      metric_states: float64[all metric states], summed over the steps.
      step_logs: the logs of the last step that are no metric's result.
    """

    worker: int
    steps: int
    cache_reports: np.ndarray
    metric_states: np.ndarray
    step_logs: dict[str, float]


class StepClosure:
    """Runs `model.train_step` or `model.test_step` several times on a worker.

    Everything comes back in one int64 vector, since each tensor that a closure returns costs a
    message of its own.

    Attributes:
      caches: the model's own, and its replicas, on which the closures report.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: HetParameterServerStrategy,
        element_spec: Any,
        training: bool,
        dense: DenseVariables | None = None,
    ):
        """Prepares the functions; they are traced on first use.

        Args:
          model: compiled and built.
          strategy: the strategy the model was made under.
          element_spec: spec of one batch.
          training: `train_step` if true, else `test_step`.
          dense: the variables that workers have replicas of, for training.
        """
        self._dense = dense
        self._model = model
        self._strategy = strategy
        self._element_spec = element_spec
        self._training = training
        self._metrics = metric_variables(model)
        self.caches = [layer.worker_cache for layer in embeddings_of(model) if layer.built]
        if dense is not None:
            self.caches.append(dense.replicas)
        self._num_states = sum(int(np.prod(v.shape)) for v in self._metrics)
        self._log_names: tuple[str, ...] = ()  # Of the step's logs, known once traced.
        self._metric_names: frozenset[str] = frozenset()
        signature = stacked_signature(element_spec)
        self.on_batches = tf.function(self._on_batches, input_signature=signature, autograph=False)
        self.on_iterator = tf.function(self._on_iterator, autograph=False)

    @property
    def log_names(self) -> tuple[str, ...]:
        """Names of the step's logs, metrics included, in the step's order. Empty until traced."""
        return self._log_names

    def unpack(self, packed: np.ndarray) -> ClosureResult:
        """Reads the vector that either function returns."""
        ends = np.cumsum([_HEADER, len(self.caches) * REPORT_SIZE, self._num_states])
        header, reports, states, logs = np.split(packed, ends)
        return ClosureResult(
            worker=int(header[0]),
            steps=int(header[1]),
            cache_reports=reports.reshape(-1, REPORT_SIZE),
            metric_states=states.view(np.float64),
            step_logs=dict(
                zip(self._scalar_log_names(), logs.view(np.float64).tolist(), strict=True)
            ),
        )

    # Traced.

    def _on_batches(self, *stacked: tf.Tensor) -> tf.Tensor:
        """Steps over batches sent along: each component stacked over the steps."""
        num_steps = tf.shape(stacked[0])[0]

        def body(step: tf.Tensor, states: States, logs: tf.Tensor) -> Any:
            del logs
            batch = take_batch(self._element_spec, stacked, step)
            return (step + 1, *self._step(step, batch, states))

        return self._loop(lambda step, *_: step < num_steps, body, ())

    def _on_iterator(self, iterator: tf.data.Iterator, num_steps: tf.Tensor) -> tf.Tensor:
        """Up to `num_steps` steps over batches of the worker's own dataset."""

        def cond(step: tf.Tensor, states: States, logs: tf.Tensor, batch: Any) -> tf.Tensor:
            del states, logs
            return tf.logical_and(step < num_steps, batch.has_value())

        def body(step: tf.Tensor, states: States, logs: tf.Tensor, batch: Any) -> Any:
            del logs
            states, logs = self._step(step, batch.get_value(), states)
            # Not one batch more than is used: what is taken here is gone.
            batch = tf.cond(step + 1 < num_steps, iterator.get_next_as_optional, lambda: batch)
            return step + 1, states, logs, batch

        return self._loop(cond, body, (iterator.get_next_as_optional(),))

    def _loop(self, cond: Callable[..., Any], body: Callable[..., Any], carry: Any) -> tf.Tensor:
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        states = [tf.zeros(v.shape, v.dtype) for v in self._metrics]
        self._settings = self._dense.open_op() if self._dense is not None else []
        # Their number is known only once the loop's body is traced, hence the unknown shape.
        logs = tf.compat.v1.placeholder_with_default(tf.zeros([0], tf.float64), [None])
        steps, states, logs, *_ = tf.while_loop(
            cond, body, (tf.constant(0), states, logs, *carry), parallel_iterations=1
        )
        with tf.control_dependencies([steps]):
            if self._dense is not None:
                self._dense.replicas.settle_op(tf.cast(steps > 0, tf.int64), reads=False)
            reports = report_ops(self.caches)
        floats = [tf.reshape(tf.cast(s, tf.float64), [-1]) for s in states] + [logs]
        header = tf.stack([tf.cast(worker, tf.int64), tf.cast(steps, tf.int64)])
        return tf.concat(
            [header, tf.reshape(reports, [-1]), tf.bitcast(tf.concat(floats, 0), tf.int64)], 0
        )

    def _step(self, step: tf.Tensor, batch: Batch, states: States) -> tuple[States, tf.Tensor]:
        if self._dense is not None:
            self._dense.replicas.settle_op(tf.cast(step > 0, tf.int64), reads=True)
        model = self._model
        optimizer = model.optimizer if self._training else None
        captured = [*zip(self._metrics, states, strict=True), *self._settings]
        others = list(model.variables)
        if optimizer is not None:
            others.extend(optimizer.variables)
        replicas = None if self._dense is None else self._dense.replicas.variables
        iterations = before = None
        if optimizer is not None and replicas is None:
            # Keras counts by reading and assigning, which loses counts when workers overlap.
            iterations = optimizer.iterations
            before = tf.identity(iterations.value)
            captured.append((iterations, before))
        scope = MetricScope(captured, others, replicas)
        # The strategy runs the step in a thread of its own, but what Keras' optimizers do there in
        # this one. A scope is known in the threads that have entered it.
        with scope:
            logs = self._strategy.run(self._replica_step, args=(batch, scope))
        self._log_names = tuple(logs)
        for setting, value in self._settings:
            if scope.get_current_value(setting) is not value:
                raise ValueError(
                    f"A step assigns {setting.path!r}, which with dense_staleness only callbacks"
                    " can: use a LearningRateSchedule or dense_staleness=None."
                )
        if iterations is not None:
            # A step whose forward pass fails, as on a worker that is about to end, does not count.
            with tf.control_dependencies([x for x in tf.nest.flatten(logs) if tf.is_tensor(x)]):
                iterations.value.assign_add(scope.get_current_value(iterations) - before)
        scalars = [_scalar(name, logs[name]) for name in self._scalar_log_names()]
        states = [tf.ensure_shape(scope.get_current_value(v), v.shape) for v in self._metrics]
        return states, tf.stack(scalars) if scalars else tf.zeros([0], tf.float64)

    def _replica_step(self, batch: Batch, scope: MetricScope) -> dict[str, Any]:
        model = self._model
        with scope:
            logs = (model.train_step if self._training else model.test_step)(batch)
            self._metric_names = frozenset(model.get_metrics_result())
        return logs

    def _scalar_log_names(self) -> tuple[str, ...]:
        """The logs that come back as they are; metrics come back as states."""
        return tuple(name for name in self._log_names if name not in self._metric_names)


class PredictClosure:
    """Runs `model.predict_step` over several batches on a worker."""

    def __init__(self, model: keras.Model, strategy: HetParameterServerStrategy, element_spec: Any):
        """Prepares the function; it is traced on first use. Arguments as for `StepClosure`."""
        self._model = model
        self._strategy = strategy
        self._element_spec = element_spec
        signature = stacked_signature(element_spec)
        self.on_batches = tf.function(self._on_batches, input_signature=signature, autograph=False)

    def _on_batches(self, *stacked: tf.Tensor) -> Any:
        """Outputs of the model, each stacked over the steps: [steps, batch, ...]."""

        @tf.function(input_signature=[tf.TensorSpec([], tf.int32)], autograph=False)
        def step(i: tf.Tensor) -> Any:
            batch = take_batch(self._element_spec, stacked, i)
            return self._strategy.run(self._model.predict_step, args=(batch,))

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


def stacked_signature(element_spec: Any) -> list[tf.TensorSpec]:
    """Specs of the components of a batch, each stacked over any number of steps."""
    return [
        tf.TensorSpec(tf.TensorShape([None]).concatenate(spec.shape), spec.dtype)
        for spec in tf.nest.flatten(element_spec, expand_composites=True)
    ]


def take_batch(element_spec: Any, stacked: tuple[tf.Tensor, ...], step: tf.Tensor) -> Batch:
    """The batch of one step out of components stacked over steps, shaped as `element_spec`."""
    flat_spec = tf.nest.flatten(element_spec, expand_composites=True)
    components = [
        tf.ensure_shape(component[step], spec.shape)
        for component, spec in zip(stacked, flat_spec, strict=True)
    ]
    return tf.nest.pack_sequence_as(element_spec, components, expand_composites=True)


def _scalar(name: str, value: Any) -> tf.Tensor:
    value = tf.cast(tf.convert_to_tensor(value), tf.float64)
    if value.shape.rank != 0:
        raise ValueError(
            f"train_step and test_step must return scalars, got {name!r} with shape {value.shape}."
        )
    return value
