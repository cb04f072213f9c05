"""A training or test step of a model, as traced in the functions that run on the workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from het_tf.compat import keras_internals
from het_tf.distribute import HetParameterServerStrategy
from het_tf.keras.data.batch_structure import Batch, read_weights
from het_tf.keras.worker_step.batched_lookups import SharedLookups, shared, write_through_op
from het_tf.keras.worker_step.dense_variables import (
    DenseVariables,
    fused_update_step,
    optimizers_of,
)
from het_tf.keras.worker_step.metrics import (
    MetricScope,
    flat,
    metric_variables,
    results_of,
)
from het_tf.keras.worker_step.step_count import StepCount, counted_variable
from het_tf.layers.lookahead import Lookup, prepared
from het_tf.optimizers.joint_optimizer import innermost


class _OneReplica(tf.distribute.ReplicaContext):
    """Context of a single replica, in which `all_reduce` returns its argument.

    TensorFlow's `all_reduce` is a `tf.custom_gradient`, whose graphs TensorFlow never releases.
    """

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return value


@contextlib.contextmanager
def on_one_replica(strategy: tf.distribute.ParameterServerStrategy) -> Iterator[None]:
    """Context in which Keras builds a step for a single replica, on a worker's device.

    `strategy.run` is not used. It would build the step in another thread, and Keras would call
    `merge_call` for optimizer steps. `merge_call` fails in branches of `tf.cond`, in which loss
    scaling and gradient accumulation make their steps.
    """
    with tf.Graph().as_default():  # In this graph, no strategy is in scope.
        of_none = tf.distribute.get_strategy()
    with _OneReplica(of_none, 0), tf.device(strategy.extended.worker_devices[0]):
        yield


States = list[tf.Tensor]


class ModelStep:
    """`model.train_step` or `model.test_step`, with metric states as tensors.

    Attributes:
      metrics: metric variables, whose states are passed from step to step.
      log_names: names of the step's logs, metrics included, in the step's order. Empty until
        traced.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: HetParameterServerStrategy,
        training: bool,
        dense: DenseVariables | None,
    ):
        """Arguments as for `StepClosure`."""
        self._model = model
        self._strategy = strategy
        self._training = training
        self._dense = dense
        self._trains_replicas = dense is not None and dense.trains
        self.metrics = metric_variables(model)
        self.log_names: tuple[str, ...] = ()
        self._metric_names: frozenset[str] = frozenset()
        self._constants: list[tuple[keras.Variable, tf.Tensor]] = []

    def read_constants(self) -> None:
        """Reads the values that no step changes. Traced once, before the steps."""
        if self._dense is not None:
            self._constants = self._dense.open_op()
        else:
            self._constants = [] if self._training else read_weights(self._model)

    def zero_states(self) -> States:
        """Returns the states of `metrics` before the first step."""
        return [tf.zeros(v.shape, v.dtype) for v in self.metrics]

    def scalar_log_names(self) -> tuple[str, ...]:
        """Returns names of the logs without the metrics that a step updates, which have states."""
        return tuple(name for name in self.log_names if name not in self._metric_names)

    def trace(
        self, batch: Batch, lookups: list[Lookup], states: States
    ) -> tuple[States, tf.Tensor]:
        """Builds a step.

        Args:
          batch: argument of `train_step` or `test_step`.
          lookups: lookups made for the step. If empty, the lookups of the model's call are added.
          states: states of `metrics` before the step.

        Returns:
          The states after the step, and its logs, float64[len(scalar_log_names())].

        Raises:
          ValueError: a log is not a scalar, or the step assigns a variable that must not change.
        """
        model = self._model
        optimizers = optimizers_of(model) if self._training else []
        captured = [*zip(self.metrics, states, strict=True), *self._constants]
        others = list(model.variables)
        for optimizer in optimizers:
            others.extend(optimizer.variables)
        replicas = None if self._dense is None else self._dense.replicas.variables
        counts = [] if self._dense is None else self._dense.begin_counts()
        if not self._trains_replicas:
            counted = [count.variable for count in counts]
            counts += [
                StepCount(variable, variable.value)
                for variable in map(counted_variable, optimizers)
                if variable is not None and not any(variable is each for each in counted)
            ]
        scope = MetricScope(captured, others, replicas, counts)
        before = {id(v): state for v, state in zip(self.metrics, states, strict=True)}
        with scope, on_one_replica(self._strategy):
            logs = self._train_or_test(batch, lookups, scope)
            self._metric_names = frozenset(
                name
                for metric in model.metrics
                for name in results_of(metric)
                if any(id(v) in before and v.value is not before[id(v)] for v in metric.variables)
                or (name in logs and logs[name].shape.rank != 0)
            )
            if self._training and not self._strategy.exactly_once:  # else at the closure's end
                write_through_op(lookups)
        self.log_names = tuple(logs)
        for constant, value in self._constants:
            if scope.get_current_value(constant) is value:
                continue
            if not self._training:
                raise ValueError(f"test_step assigns {constant.path!r}, a weight that is trained.")
            raise ValueError(
                f"A step assigns {constant.path!r}, which with dense_staleness only callbacks"
                " can: use a LearningRateSchedule or dense_staleness=None."
            )
        # A step does not count if its forward pass fails, for example on a worker that ends.
        with tf.control_dependencies(list(logs.values())):
            scope.count_step()
        scalars = [_scalar(name, logs[name]) for name in self.scalar_log_names()]
        states = [
            tf.ensure_shape(scope.get_current_value(variable), variable.shape)
            for variable in self.metrics
        ]
        return states, tf.stack(scalars) if scalars else tf.zeros([0], tf.float64)

    def _train_or_test(
        self, batch: Batch, lookups: list[Lookup], scope: MetricScope
    ) -> dict[str, tf.Tensor]:
        model = self._model
        on_replicas: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._trains_replicas:
            on_replicas = self._stepping_on_replicas(scope)
        # Without lookups made for the step, the model's call makes them.
        sharing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not lookups:
            sharing = shared(SharedLookups(model, scope, lookups))
        with prepared(lookups), on_replicas, sharing:
            return flat((model.train_step if self._training else model.test_step)(batch))

    @contextlib.contextmanager
    def _stepping_on_replicas(self, scope: MetricScope) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for optimizer in map(innermost, optimizers_of(self._model)):
                stack.enter_context(
                    keras_internals.stepping_within(
                        optimizer, scope.on_slots, fused_update_step(optimizer)
                    )
                )
            yield


def _scalar(name: str, value: tf.Tensor) -> tf.Tensor:
    value = tf.cast(value, tf.float64)
    if value.shape.rank != 0:
        raise ValueError(
            f"train_step and test_step must return scalars, got {name!r} with shape {value.shape}."
        )
    return value
