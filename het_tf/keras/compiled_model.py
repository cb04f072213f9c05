"""State of a compiled model: closures, replicas of dense variables, sums of metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from het_tf.compat import keras_internals
from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.closure_runner import ClosureRunner
from het_tf.distribute.dense.replicas import NoRuleError
from het_tf.distribute.failures.cluster_health import runs_ops
from het_tf.distribute.failures.connection import lookup_table_error
from het_tf.distribute.step_rounds import StepRounds
from het_tf.keras.data.batch_structure import components_of
from het_tf.keras.data.feeds import Filler, Pass, SynchronousFiller
from het_tf.keras.worker_step.closure import PredictClosure, StepClosure
from het_tf.keras.worker_step.dense_variables import (
    DenseVariables,
    accumulated_steps,
    has_own,
    optimizers_of,
)
from het_tf.keras.worker_step.metrics import MetricSums, check_resets_to_zero, metric_variables
from het_tf.layers.embedding import embeddings_of
from het_tf.optimizers.joint_optimizer import innermost, scaler_of


def check_one_gpu(strategy: HetParameterServerStrategy) -> None:
    """Raises a ValueError if a worker task has several GPUs."""
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "het_tf.keras.Model uses one GPU per worker task, but the workers have "
            f"{strategy.num_replicas_in_sync}: list one worker per GPU in the cluster, and start "
            "each with `python -m het_tf.server`, which takes one of its host's GPUs."
        )


def check_placement(variables: Iterable[keras.Variable]) -> None:
    """Raises a ValueError for a variable that is not on a parameter server."""
    for variable in variables:
        if "/job:ps" not in variable.value.device:
            raise ValueError(
                f"Variable {variable.path!r} was not made under the strategy, so the workers "
                "cannot use it: make the model, its layers and the optimizer inside "
                "`with strategy.scope():`."
            )


def check_lookup_tables(model: keras.Model) -> None:
    """Checks that the lookup tables of layers still exist.

    Raises:
      ValueError: a layer, such as a `StringLookup`, was created before the strategy.
    """
    for layer in keras_internals.nested_layers(model):
        table = getattr(layer, "lookup_table", None)
        if table is None:
            continue
        try:
            table.size()
        except tf.errors.NotFoundError as error:
            raise lookup_table_error(f"Layer {layer.name!r} of model {model.name!r}") from error


def check_inputs(model: keras.Model, element_spec: Any) -> None:
    """Raises a ValueError if `x` contains strings and no input of the model accepts strings."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    inputs = getattr(model, "inputs", None) or ()  # A subclassed model has no inputs.
    takes_strings = not inputs or any(each.dtype == "string" for each in inputs)
    if takes_strings or all(spec.dtype != tf.string for spec in components_of(x)):
        return
    names = ", ".join(f"{each.name!r} of {each.dtype}" for each in inputs)
    raise ValueError(
        f"x holds strings, and the model's inputs take none ({names}): make integers of them, by"
        " keras.layers.StringLookup in the dataset's map or on an Input of dtype='string'."
    )


def check_optimizers(model: keras.Model, strategy: HetParameterServerStrategy) -> None:
    """Raises a ValueError if an optimizer does not work with the strategy."""
    steps = accumulated_steps(model.optimizer)
    if steps and strategy.exactly_once:
        raise ValueError(
            f"gradient_accumulation_steps={steps} does not work with exactly_once=True: a worker "
            "that dies takes the gradients along that it had accumulated. Use larger batches."
        )
    if strategy.synchronous:
        _check_synchronous(model.optimizer, steps)
    for optimizer in optimizers_of(model):
        if optimizer is not model.optimizer and has_own(optimizer):
            raise ValueError(
                f"The optimizer {optimizer.name!r} accumulates gradients or scales the loss, which"
                " under HetParameterServerStrategy only the one can that the model is compiled"
                " with."
            )


def _check_synchronous(optimizer: keras.optimizers.Optimizer, accumulated: int) -> None:
    clip = innermost(optimizer).global_clipnorm
    if clip:
        raise ValueError(
            f"global_clipnorm={clip!r} does not work with synchronous=True: no worker knows the"
            " norm of all gradients of rows. Use clipnorm or clipvalue, which are of each variable"
            " and row."
        )
    if accumulated:
        raise ValueError(
            f"gradient_accumulation_steps={accumulated!r} does not work with synchronous=True:"
            " more workers, or larger batches, have the same effect."
        )
    if scaler_of(optimizer) is not None:
        raise ValueError(
            "A LossScaleOptimizer does not work with synchronous=True: whether a step is skipped"
            " depends on the gradients of all workers. Use mixed_bfloat16, which needs no scale."
        )


def check_callbacks(model: keras.Model, callbacks: keras.callbacks.CallbackList) -> None:
    """Raises a ValueError for a callback that would restore only a part of the model."""
    for callback in callbacks.callbacks:
        if getattr(callback, "restore_best_weights", False) and embeddings_of(model):
            raise ValueError(
                f"{type(callback).__name__}(restore_best_weights=True) restores Keras weights, and "
                f"not the table of layer {embeddings_of(model)[0].name!r}: use "
                "ModelCheckpoint(path, save_best_only=True, save_weights_only=True), and "
                "load_weights(path) afterwards."
            )


class CompiledModel:
    """State of a model from one `compile` to the next, while no parameter server is replaced.

    Attributes:
      closures: functions that run on the workers, by purpose and element spec.
      dense: variables that the workers replicate. None before `build`, or without replicas.
      sums: sums of the metrics over closures. None before `build`.
      rounds: rounds of synchronous steps. None before `build`, and of a strategy without them.
    """

    def __init__(self, model: keras.Model, strategy: HetParameterServerStrategy):
        """Creates the state of a model made under `strategy`. Does not build or trace the model."""
        self._model = model
        self._strategy = strategy
        self._recoveries = strategy.recoveries
        self._is_built = self._is_on_workers = False
        self._metrics: list[int] = []  # Ids of the variables in `sums`.
        self.closures: dict[Any, Any] = {}  # `StepClosure` or `PredictClosure`.
        self.dense: DenseVariables | None = None
        self.sums: MetricSums | None = None
        self.rounds: StepRounds | None = None

    @property
    def is_of_lost_servers(self) -> bool:
        """Whether a server was replaced by a new process. Traced functions are then invalid."""
        return self._recoveries != self._strategy.recoveries

    @property
    def has_replicas(self) -> bool:
        """Whether the workers currently have replicas of the dense variables."""
        return self.dense is not None and self.dense.replicas.in_use

    def build(self, element_spec: Any) -> None:
        """Builds the parts that `fit` and `evaluate` need, if they are not built yet.

        Args:
          element_spec: element spec of the batches.

        Raises:
          ValueError: the model is not compiled, or does not accept the batches, or a part of the
            model cannot be trained asynchronously.
        """
        model = self._model
        if not model.compiled:
            raise ValueError("Call compile() before fit() or evaluate().")
        if not self._is_built:
            check_one_gpu(self._strategy)
            # Checked before Keras builds on existing variables, and again for new variables.
            check_placement(_all_variables(model))
            with self._strategy.scope():
                keras_internals.build_from_spec(model, element_spec)
            check_optimizers(model, self._strategy)
            check_placement(_all_variables(model))
            check_resets_to_zero(model)
            self.dense = self._dense_variables()
            if self.dense is not None:
                self._strategy.held.register_replicas(self.dense.replicas)
            if self._strategy.synchronous:
                strategy = self._strategy
                self.rounds = StepRounds(
                    strategy.health.down_workers,
                    lambda worker, timeout: runs_ops(strategy.worker_device(worker), timeout),
                    strategy.num_workers,
                )
            self._is_built = True
        check_inputs(model, element_spec)
        check_lookup_tables(model)
        metrics = [id(variable) for variable in metric_variables(model)]
        if self.sums is None or metrics != self._metrics:
            self._metrics = metrics
            self.sums = MetricSums(model)
            self.closures.clear()

    def _dense_variables(self) -> DenseVariables | None:
        model, strategy = self._model, self._strategy
        if strategy.synchronous:
            return DenseVariables(model, strategy, trains=True)
        if strategy.dense_staleness is not None:
            try:
                return DenseVariables(model, strategy, trains=True)
            except NoRuleError as error:
                if not strategy.dense_is_auto:
                    raise
                logging.warning("Every step uses the variables on the parameter servers: %s", error)
        return DenseVariables(model, strategy, trains=False) if has_own(model.optimizer) else None

    def build_weights(self, element_spec: Any) -> None:
        """Builds the layers for `predict`. The model need not be compiled."""
        model = self._model
        with self._strategy.scope():
            if not all(layer.built for layer in [model, *model.layers]):
                x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
                model(tf.nest.map_structure(_symbol, x))
        check_inputs(model, element_spec)
        check_lookup_tables(model)
        check_placement(model.variables)

    def step_closure(self, element_spec: Any, training: bool) -> StepClosure:
        """Returns the closure function of training steps, or of the steps of `evaluate`."""
        key = (training, _hashable(element_spec))
        if key not in self.closures:
            dense, rounds = (self.dense, self.rounds) if training else (None, None)
            self.closures[key] = StepClosure(
                self._model, self._strategy, element_spec, training, dense, rounds
            )
        return self.closures[key]

    def filler(self, runner: ClosureRunner, data: Pass, fn: Any, training: bool) -> Filler:
        """Returns an object that schedules the closures of a pass."""
        if self.rounds is None or not training:
            return Filler(runner, data, fn)
        self._strategy.health.on_poll = self.rounds.drop_lost
        return SynchronousFiller(runner, data, fn, self.rounds, self.dense.replicas)

    def predict_closure(self, element_spec: Any) -> PredictClosure:
        """Returns the closure function of `predict`."""
        key = ("predict", _hashable(element_spec))
        if key not in self.closures:
            self.closures[key] = PredictClosure(self._model, self._strategy, element_spec)
        return self.closures[key]

    @contextlib.contextmanager
    def on_workers(self) -> Iterator[None]:
        """Frees replicas and prepared steps on the workers at the end of the context.

        A nested context, as in a callback of `fit`, keeps the prepared steps of the outer context.
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
    """Returns the variables of the model and of its optimizers."""
    return [*model.variables, *(v for each in optimizers_of(model) for v in each.variables)]


def _symbol(spec: tf.TypeSpec | None) -> keras.KerasTensor | None:
    return None if spec is None else keras.KerasTensor(spec.shape, spec.dtype.name)


def _hashable(spec: Any) -> Any:
    return str(tf.nest.map_structure(str, spec))
