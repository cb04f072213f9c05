"""What workers have of a compiled model: its functions, replicas of variables, sums of metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from het_tf import _keras
from het_tf.distribute import HetParameterServerStrategy
from het_tf.keras import checks
from het_tf.keras.closures import StepClosure
from het_tf.keras.dense import DenseVariables, has_own, optimizers_of
from het_tf.keras.metric_state import MetricSums, check_resets_to_zero, metric_variables
from het_tf.keras.predictions import PredictClosure


class CompiledModel:
    """A model as long as it is compiled as it is, and its servers are the processes that they are.

    Attributes:
      closures: what runs on the workers, by what it is for and the type of the data.
      dense: the variables that workers have replicas of; None before `build`, and where they have
        none.
      sums: of the metrics; None before `build`.
    """

    def __init__(self, model: keras.Model, strategy: HetParameterServerStrategy):
        """Of a model that was made under a strategy. Nothing is built or traced yet."""
        self._model = model
        self._strategy = strategy
        self._recoveries = strategy.recoveries
        self._is_built = self._is_on_workers = False
        self._metrics: list[int] = []  # ids of the variables in `sums`
        self.closures: dict[Any, StepClosure | PredictClosure] = {}
        self.dense: DenseVariables | None = None
        self.sums: MetricSums | None = None

    @property
    def is_of_lost_servers(self) -> bool:
        """Whether a server is another process by now: what was traced is of the one before."""
        return self._recoveries != self._strategy.recoveries

    @property
    def has_replicas(self) -> bool:
        """Whether the workers have replicas of the dense variables now."""
        return self.dense is not None and self.dense.replicas.in_use

    def build(self, element_spec: Any) -> None:
        """Builds what is not built yet, for `fit` and `evaluate`.

        Args:
          element_spec: of the dataset's batches.

        Raises:
          ValueError: the model is not compiled, or does not take such batches, or a part of it
            cannot be trained asynchronously.
        """
        model = self._model
        if not model.compiled:
            raise ValueError("Call compile() before fit() or evaluate().")
        if not self._is_built:
            checks.check_one_gpu(self._strategy)
            # Before Keras builds on them, and after for what it has built.
            checks.check_placement(_all_variables(model))
            with self._strategy.scope():
                _keras.build_from_spec(model, element_spec)
            checks.check_optimizers(model, self._strategy)
            checks.check_placement(_all_variables(model))
            check_resets_to_zero(model)
            if self._strategy.dense_staleness is not None or has_own(model.optimizer):
                self.dense = DenseVariables(model, self._strategy)
                self._strategy.register_replicas(self.dense.replicas)
            self._is_built = True
        checks.check_inputs(model, element_spec)
        metrics = [id(variable) for variable in metric_variables(model)]
        if self.sums is None or metrics != self._metrics:
            self._metrics = metrics
            self.sums = MetricSums(model)
            self.closures.clear()

    def build_weights(self, element_spec: Any) -> None:
        """Builds what `predict` needs: it takes a model that is not compiled, too."""
        model = self._model
        with self._strategy.scope():
            if not all(layer.built for layer in [model, *model.layers]):
                x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
                model(tf.nest.map_structure(_symbol, x))
        checks.check_inputs(model, element_spec)
        checks.check_placement(model.variables)

    def step_closure(self, element_spec: Any, training: bool) -> StepClosure:
        """The function of training steps, or of those of `evaluate`."""
        key = (training, _hashable(element_spec))
        if key not in self.closures:
            dense = self.dense if training else None
            self.closures[key] = StepClosure(
                self._model, self._strategy, element_spec, training, dense
            )
        return self.closures[key]

    def predict_closure(self, element_spec: Any) -> PredictClosure:
        """The function of `predict`."""
        key = ("predict", _hashable(element_spec))
        if key not in self.closures:
            self.closures[key] = PredictClosure(self._model, self._strategy, element_spec)
        return self.closures[key]

    @contextlib.contextmanager
    def on_workers(self) -> Iterator[None]:
        """Frees what `fit` leaves on the workers: replicas, and steps that were prepared.

        Within another such context, as in a callback of `fit`, that one's steps stay.
        """
        is_outer, self._is_on_workers = not self._is_on_workers, True
        try:
            yield
        finally:
            self._is_on_workers = not is_outer
            for closure in self.closures.values() if is_outer else ():
                if isinstance(closure, StepClosure) and closure.window is not None:
                    closure.window.clear()
            if self.dense is not None:
                self.dense.replicas.destroy()


def _all_variables(model: keras.Model) -> list[keras.Variable]:
    """The model's and its optimizers'."""
    return [*model.variables, *(v for each in optimizers_of(model) for v in each.variables)]


def _symbol(spec: tf.TypeSpec | None) -> keras.KerasTensor | None:
    return None if spec is None else keras.KerasTensor(spec.shape, spec.dtype.name)


def _hashable(spec: Any) -> Any:
    return str(tf.nest.map_structure(str, spec))
