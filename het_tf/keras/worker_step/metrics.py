"""Metrics of asynchronous training: sums that the workers return and the coordinator adds.

Keras metrics are variables that every step reads, changes and writes. As variables on a parameter
server that loses updates whenever two workers overlap, and a repeated closure would count twice. So
inside a closure a metric starts from zero, in tensors; the closure returns what it came to, and the
coordinator adds up the results of closures that finished. That is exact for every metric whose
state is a sum over examples, which are all metrics Keras has.
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
    """The variables of all metrics of the model, losses included."""
    return [variable for metric in model.metrics for variable in metric.variables]


def flat(logs: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Logs without nesting, as Keras has them: a metric's result may be a dict of its own.

    In the scope of the metrics: a result may be a variable of theirs, which out of it is another.
    """
    found: dict[str, tf.Tensor] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            found.update(flat(value))
        else:
            found[name] = tf.convert_to_tensor(value)
    return found


def results_of(metric: keras.metrics.Metric) -> dict[str, tf.Tensor]:
    """A metric's results by their names; as `flat`."""
    return flat({metric.name: metric.result()})


def without_names(model: keras.Model, logs: Mapping[str, float]) -> list[float] | float:
    """Results as `evaluate` returns them: in the order of the model's metrics, or the only one."""
    # The order of the metrics, which that of the logs is not in every version of Keras.
    metrics = [m for metric in model.metrics for m in getattr(metric, "metrics", [metric])]
    names = [metric.name for metric in metrics if metric.name in logs]
    values = [logs[name] for name in names + sorted(logs.keys() - set(names))]
    return values[0] if len(values) == 1 else values


def check_resets_to_zero(model: keras.Model) -> None:
    """Resets the metrics and checks that each starts from zero.

    Raises:
      ValueError: names the metric that does not, since its state cannot be a sum.
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
    """Within it, captured variables live in tensors, all others stay real variables.

    `keras.StatelessScope` alone takes every variable out of the graph's side effects; here only the
    given ones are taken.
    """

    def __init__(
        self,
        captured: Sequence[tuple[keras.Variable, tf.Tensor]],
        others: Sequence[keras.Variable] = (),
        replicas: Mapping[int, tf.Variable] | None = None,
        counts: Sequence[StepCount] = (),
    ):
        """Creates the scope, to be entered once.

        Args:
          captured: variables to take out and their values at the start.
          others: the model's and the optimizer's variables.
          replicas: id of a native variable -> the variable to use in its place.
          counts: of the steps; their variables are captured, too.
        """
        captured = [*captured, *((count.variable, count.seen) for count in counts)]
        super().__init__(
            state_mapping=list(captured), collect_losses=True, initialize_variables=False
        )
        self._captured = {id(variable) for variable, _ in captured}
        self._counts = {id(count.variable): count for count in counts}
        self._on_slots = False
        self._graph = tf.compat.v1.get_default_graph()
        # `variable.value` asks this scope, so the native variables are looked up before it is
        # entered. Keras asks the scope directly for the variables it regularizes.
        self._native = {id(v): v.value for v in others if id(v) not in self._captured}
        for key, native in self._native.items():
            self._native[key] = (replicas or {}).get(id(native), native)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Takes an assignment to a Keras variable: into the scope, or on to the variable."""
        variable, value = update
        count = self._counts.get(id(variable))
        # A branch of tf.cond keeps its tensors.
        if count is not None and tf.compat.v1.get_default_graph() is not self._graph:
            count.take(value)
        elif id(variable) in self._captured:
            super().add_update(update)
        else:
            native = self._native.get(id(variable))
            native = variable.value if native is None else native
            native.assign(tf.cast(value, native.dtype))

    def count_step(self) -> None:
        """Counts what was added to the counts, but for what branches have counted."""
        for count in self._counts.values():
            value = self.get_current_value(count.variable)
            if value is not count.seen:
                count.take(value)

    @contextlib.contextmanager
    def on_slots(self) -> Iterator[None]:
        """In this context counts are of the steps that the worker's slots were made by."""
        self._on_slots = True
        try:
            yield
        finally:
            self._on_slots = False

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | tf.Variable | None:
        """Value of a captured variable; the native variable of a known other one."""
        value = super().get_current_value(variable)
        if self._on_slots and (count := self._counts.get(id(variable))) is not None:
            return value if count.less is None else value - count.less
        return self._native.get(id(variable)) if value is None else value


class MetricSums:
    """Adds up the metric states of finished closures, on the coordinator."""

    def __init__(self, model: keras.Model):
        """Starts from zero. The model must be built."""
        self._variables = metric_variables(model)
        self._sizes = [int(np.prod(v.shape)) for v in self._variables]
        self._sums = np.zeros(sum(self._sizes), np.float64)

        @tf.function
        def results(states: list[tf.Tensor]) -> dict[str, tf.Tensor]:
            with MetricScope(list(zip(self._variables, states, strict=True))):
                return flat(model.get_metrics_result())

        # Traced by hand: TensorFlow takes a call that traces, model after model, for a mistake.
        self._results = functools.cache(
            lambda: results.get_concrete_function(
                [tf.TensorSpec(v.shape, v.dtype) for v in self._variables]
            )
        )

    def clear(self) -> None:
        """Starts from zero again."""
        self._sums[:] = 0.0

    @contextlib.contextmanager
    def from_zero(self) -> Iterator[None]:
        """Starts from zero, and goes on with what there was when it ends."""
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
        """What the metrics amount to now, by name; an array where a metric has several results."""
        results = {n: np.asarray(value) for n, value in self._results()(self._states()).items()}
        return {n: value if value.ndim else float(value) for n, value in results.items()}

    def write(self) -> None:
        """Writes the sums into the metrics' variables, for whoever asks `metric.result()`."""
        for variable, state in zip(self._variables, self._states(), strict=True):
            variable.assign(state)

    def _states(self) -> list[tf.Tensor]:
        parts = np.split(self._sums, np.cumsum(self._sizes))[:-1]
        return [
            tf.constant(part.reshape(v.shape).astype(v.dtype), v.dtype)
            for part, v in zip(parts, self._variables, strict=True)
        ]
