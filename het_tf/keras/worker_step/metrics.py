"""Metrics of asynchronous training: the workers return sums and the coordinator adds them.

Every step reads, changes and writes the variables of Keras metrics. On a parameter server, these
variables would lose updates of overlapping workers and count repeated closures twice. Metrics are
therefore tensors inside a closure, and start from zero. The closure returns their states, and the
coordinator adds the states of finished closures. The result is exact for every metric whose state
is a sum over examples. All metrics of Keras are such sums.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf.keras.worker_step.step_count import StepCount


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of all metrics of the model, including losses."""
    return [variable for metric in model.metrics for variable in metric.variables]


def flat(logs: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns logs without nesting, as Keras does. A metric's result may be a dict.

    Must be called in the `MetricScope`: a metric's variable as a result has another value outside.
    """
    found: dict[str, tf.Tensor] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            found.update(flat(value))
        else:
            found[name] = tf.convert_to_tensor(value)
    return found


def results_of(metric: keras.metrics.Metric) -> dict[str, tf.Tensor]:
    """Returns a metric's results by name. Same conditions as `flat`."""
    return flat({metric.name: metric.result()})


def without_names(model: keras.Model, logs: Mapping[str, float]) -> list[float] | float:
    """Returns results as `evaluate` does: in the order of the model's metrics, or the only one."""
    # In some versions of Keras, logs have another order than the metrics.
    metrics = [m for metric in model.metrics for m in getattr(metric, "metrics", [metric])]
    names = [metric.name for metric in metrics if metric.name in logs]
    values = [logs[name] for name in names + sorted(logs.keys() - set(names))]
    return values[0] if len(values) == 1 else values


def check_resets_to_zero(model: keras.Model) -> None:
    """Resets the metrics and checks that each starts from zero.

    Raises:
      ValueError: a metric does not, so its state is no sum. The message names its variable.
    """
    model.reset_metrics()
    for metric in model.metrics:
        for variable in metric.variables:
            if np.any(variable.numpy() != 0):
                raise ValueError(
                    f"The metric with the variable {variable.path!r} cannot be used under"
                    " HetParameterServerStrategy, since the variable does not reset to zero. The"
                    " states of metrics are added up over workers, so they must be sums over"
                    " examples (as those of all of Keras' metrics are)."
                )


class MetricScope(keras.StatelessScope):
    """Scope in which captured variables are tensors, and other variables remain variables.

    In a `keras.StatelessScope` alone, no assignment would change any variable.
    """

    def __init__(
        self,
        captured: Sequence[tuple[keras.Variable, tf.Tensor]],
        others: Sequence[keras.Variable] = (),
        replicas: Mapping[int, tf.Variable] | None = None,
        counts: Sequence[StepCount] = (),
    ):
        """Creates a scope that can be entered once.

        Args:
          captured: variables to capture, with their initial values.
          others: variables of the model and its optimizers.
          replicas: id of a native variable -> the variable that replaces it.
          counts: step counts. Their variables are captured, too.
        """
        captured = [*captured, *((count.variable, count.seen) for count in counts)]
        super().__init__(
            state_mapping=list(captured), collect_losses=True, initialize_variables=False
        )
        self._captured = {id(variable) for variable, _ in captured}
        self._counts = {id(count.variable): count for count in counts}
        self._on_slots = False
        self._graph = tf.compat.v1.get_default_graph()
        # In this scope, `variable.value` calls the scope, so native variables are read before. For
        # regularized variables, Keras calls the scope directly.
        self._native = {id(v): v.value for v in others if id(v) not in self._captured}
        for key, native in self._native.items():
            self._native[key] = (replicas or {}).get(id(native), native)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Stores an assignment in the scope if the variable is captured. Otherwise assigns."""
        variable, value = update
        count = self._counts.get(id(variable))
        # A tensor in a branch of tf.cond cannot leave the branch, so the branch counts the step.
        if count is not None and tf.compat.v1.get_default_graph() is not self._graph:
            count.take(value)
        elif id(variable) in self._captured:
            super().add_update(update)
        else:
            native = self._native.get(id(variable))
            native = variable.value if native is None else native
            native.assign(tf.cast(value, native.dtype))

    def count_step(self) -> None:
        """Adds the assigned counts to the count variables, except for counts made in branches."""
        for count in self._counts.values():
            value = self.get_current_value(count.variable)
            if value is not count.seen:
                count.take(value)

    @contextlib.contextmanager
    def on_slots(self) -> Iterator[None]:
        """Context in which counts include only the steps that made the worker's slots."""
        self._on_slots = True
        try:
            yield
        finally:
            self._on_slots = False

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | tf.Variable | None:
        """Returns a captured variable's value, or the native variable of one of `others`."""
        value = super().get_current_value(variable)
        if self._on_slots and (count := self._counts.get(id(variable))) is not None:
            return value if count.less is None else value - count.less
        return self._native.get(id(variable)) if value is None else value


class MetricSums:
    """Sums of the metric states of finished closures, on the coordinator."""

    def __init__(self, model: keras.Model):
        """Creates sums of zero. The model must be built."""
        self._variables = metric_variables(model)
        self._sizes = [int(np.prod(v.shape)) for v in self._variables]
        self._sums = np.zeros(sum(self._sizes), np.float64)

        @tf.function
        def results(states: list[tf.Tensor]) -> dict[str, tf.Tensor]:
            with MetricScope(list(zip(self._variables, states, strict=True))):
                return flat(model.get_metrics_result())

        # Traced explicitly, because TensorFlow warns of calls that trace again for every model.
        self._results = functools.cache(
            lambda: results.get_concrete_function(
                [tf.TensorSpec(v.shape, v.dtype) for v in self._variables]
            )
        )

    def clear(self) -> None:
        """Sets the sums to zero."""
        self._sums[:] = 0.0

    @contextlib.contextmanager
    def from_zero(self) -> Iterator[None]:
        """Context that starts with sums of zero. The earlier sums are restored at its end."""
        before = self._sums.copy()
        self.clear()
        try:
            yield
        finally:
            self._sums[:] = before

    def add(self, states: np.ndarray) -> None:
        """Adds the states of one closure, float64 [values in all states]."""
        self._sums += states

    def results(self) -> dict[str, float | np.ndarray]:
        """Returns the current results by name. A metric with several results has an array."""
        results = {n: np.asarray(value) for n, value in self._results()(self._states()).items()}
        return {n: value if value.ndim else float(value) for n, value in results.items()}

    def write(self) -> None:
        """Writes the sums into the metrics' variables, for callers of `metric.result()`."""
        for variable, state in zip(self._variables, self._states(), strict=True):
            variable.assign(state)

    def _states(self) -> list[tf.Tensor]:
        parts = np.split(self._sums, np.cumsum(self._sizes))[:-1]
        return [
            tf.constant(part.reshape(v.shape).astype(v.dtype), v.dtype)
            for part, v in zip(parts, self._variables, strict=True)
        ]
