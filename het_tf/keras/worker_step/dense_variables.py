"""Variables of a Keras model that workers replicate, and the merge rule of each variable."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from het_tf import ops
from het_tf.compat import keras_internals
from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.dense.replicas import DenseReplicas, check_assignable
from het_tf.keras.worker_step.metrics import metric_variables
from het_tf.keras.worker_step.step_count import StepCount, counted_variable
from het_tf.layers.embedding import embeddings_of
from het_tf.optimizers.joint_optimizer import innermost, scaler_of

# Builds a step's ops from an optimizer, a variable, its gradient and the learning rate.
_Step = Callable[[Any, tf.Variable, tf.Tensor, tf.Tensor], None]


def fused_update_step(optimizer: Any) -> Callable[..., None] | None:
    """Returns an `update_step` with fused ops, or None if the optimizer has no fused ops.

    Trained variables and slots must be float32 resource variables on the device of the step.
    """
    step = _STEPS.get(type(optimizer))  # A subclass may have another step.
    if step is None or getattr(optimizer, "amsgrad", False):
        return None
    of_keras = optimizer.update_step

    def update_step(gradient: Any, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            of_keras(gradient, variable, learning_rate)
            return
        rate = tf.cast(learning_rate, variable.dtype)
        step(optimizer, variable, tf.cast(gradient, variable.dtype), rate)

    return update_step


def _sgd(optimizer: Any, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    if not optimizer.momentum:
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=_slot(optimizer, "momentums", variable),
        lr=rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, rate.dtype),
        use_nesterov=optimizer.nesterov,
    )


def _adam(optimizer: Any, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    count = tf.cast(optimizer.iterations + 1, tf.float32)
    left_1 = 1 - tf.pow(tf.constant(optimizer.beta_1, tf.float32), count)
    left_2 = 1 - tf.pow(tf.constant(optimizer.beta_2, tf.float32), count)
    ops.apply_adam(
        variable.handle,
        _slot(optimizer, "momentums", variable),
        _slot(optimizer, "velocities", variable),
        gradient,
        rate * tf.sqrt(left_2) / left_1,
        one_minus_beta_1=1 - optimizer.beta_1,
        one_minus_beta_2=1 - optimizer.beta_2,
        epsilon=optimizer.epsilon,
    )


def _adagrad(optimizer: Any, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor) -> None:
    ops.apply_adagrad(
        variable.handle,
        _slot(optimizer, "accumulators", variable),
        gradient,
        rate,
        epsilon=optimizer.epsilon,
    )


def _slot(optimizer: Any, name: str, variable: tf.Variable) -> tf.Tensor:
    return keras_internals.slot_of(optimizer, name, variable).value.handle


_STEPS: dict[type[keras.optimizers.Optimizer], _Step] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adagrad: _adagrad,
}


# Steps of these optimizers add up over workers as over steps (linear scaling: Goyal et al. 2017).
# Others divide by a moving average of gradients, or by their norm. Steps of N workers then count
# 1 / sqrt(N) each (square-root scaling: Malladi et al., NeurIPS 2022).
_COUNT_IN_FULL = (keras.optimizers.SGD, keras.optimizers.Adagrad, keras.optimizers.Ftrl)


class DenseVariables:
    """Variables of a model and its optimizers, by merge rule (docs/protocol.md, section 8).

    Attributes:
      replicas: replicas of all variables that steps use, except settings, if `trains`. Otherwise
        replicas of the variables of which every worker has its own (`has_own`).
      trains: whether the replicas include the trained variables.
      settings: learning rates, which only callbacks change. Every closure reads them once.
    """

    def __init__(self, model: keras.Model, strategy: HetParameterServerStrategy, trains: bool):
        """Assigns merge rules to the variables of a compiled and built model.

        Args:
          model: compiled and built model.
          strategy: strategy of the model.
          trains: whether to replicate the trained variables.

        Raises:
          NoRuleError: a variable has no rule. The message names the variable.
        """
        self.trains = trains
        self.settings: list[keras.Variable] = []
        optimizer = model.optimizer
        self._cycle = accumulated_steps(optimizer)
        trainable: list[keras.Variable] = []
        slots: list[keras.Variable] = []
        seeds: list[keras.Variable] = []
        others: list[keras.Variable] = []
        least = _scaler_state(optimizer)
        if self._cycle:
            slots = keras_internals.accumulated_gradients(innermost(optimizer))
        counting = optimizers_of(model) if self.trains else [optimizer] if self._cycle else []
        self._accumulating = counted_variable(optimizer)
        # Pairs: count of all workers' steps, count of the worker's own steps.
        self._counts: list[tuple[keras.Variable, tf.Variable]] = []
        for variable in [] if strategy.synchronous else map(counted_variable, counting):
            if variable is not None and id(variable) not in _ids([v for v, _ in self._counts]):
                with strategy.scope():
                    own = tf.Variable(variable.value, trainable=False, name="own_iterations")
                self._counts.append((variable, own))
        if self.trains:
            rates = [layer.binding.rate_variable for layer in embeddings_of(model)]
            self.settings = [rate for rate in rates if rate is not None]
            trainable = list(model.trainable_variables)
            for each in optimizers_of(model):
                others += [*_unchanged_by_scaler(each), counted_variable(each)]
                rate = keras_internals.learning_rate_variable(innermost(each))
                if rate is not None:
                    self.settings.append(rate)
                known = _ids(others, self.settings, least, slots)
                rest = [v for v in each.variables if id(v) not in known]
                # Adafactor stores integers as placeholders of slots that a variable lacks.
                slots += [v for v in rest if not _is_integer(v)]
                others += [v for v in rest if _is_integer(v)]
            known = _ids(*(trainable, slots, least, others, self.settings, metric_variables(model)))
            rest = [v for v in model.variables if id(v) not in known]
            seeds = [v for v in rest if is_seed(v)]
            others += [v for v in rest if not is_seed(v)]
            # Which variables a step assigns is not known yet. It may be any of these.
            if strategy.dense_is_auto:
                for variable in rest:
                    if not is_seed(variable):
                        check_assignable(variable.value)
        if strategy.synchronous:
            # Moving statistics are of each worker's batches. All else the workers change alike.
            averaged = [v for v in others if v.dtype == "float32"]
            known = _ids(averaged)
            rest = [v for v in (*least, *others) if id(v) not in known]
            same = [v.value for v in (*trainable, *slots, *rest)]
            seed_states, means = [v.value for v in seeds], [v.value for v in averaged]
            self.replicas = DenseReplicas(strategy, None, [], means, [], seed_states, [], same=same)
            return
        natives = [[v.value for v in kind] for kind in (trainable, slots, least, seeds, others)]
        counts = [(own, variable.value) for variable, own in self._counts]
        constraints = [variable.constraint for variable in trainable]
        owed = _owed_of(model, strategy, trainable) if self.trains else None
        in_full = all(isinstance(innermost(each), _COUNT_IN_FULL) for each in optimizers_of(model))
        variables: list[Any] = [*natives, owed, in_full, constraints, counts]
        staleness = strategy.dense_staleness if trains else None
        self.replicas = DenseReplicas(strategy, staleness, *variables)

    def begin_counts(self) -> list[StepCount]:
        """Reads the step counts of which workers have their own, at the beginning of a step."""
        replicas = self.replicas.variables
        return [
            StepCount(
                variable,
                replicas.get(id(variable.value), variable.value),
                replicas[id(own)],
                self._cycle if variable is self._accumulating else 0,
                own_slots=self.trains,
            )
            for variable, own in self._counts
        ]

    def open_op(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Makes the replicas usable and reads the settings, at the start of a function's graph.

        Returns:
          The settings with their values.
        """
        self.replicas.open_op()
        # One tensor has all settings of a server.
        by_device = collections.defaultdict(list)
        for setting in self.settings:
            by_device[setting.value.device].append(setting)
        values = []
        for device, settings in by_device.items():
            with tf.device(device):
                packed = tf.stack([tf.cast(s.value.read_value(), tf.float64) for s in settings])
            for i, setting in enumerate(settings):
                values.append((setting, tf.cast(packed[i], setting.dtype)))
        return values


def _owed_of(
    model: keras.Model, strategy: HetParameterServerStrategy, trainable: list[keras.Variable]
) -> tf.Variable:
    """Returns the variable of contributions that the trained variables do not hold yet.

    The variable is an attribute of the model, so that a `tf.train.Checkpoint` of the model has it.
    """
    owed = getattr(model, "dense_owed", None)
    owed_to = [variable.path for variable in trainable]
    # Other layers may train since the last compile.
    if owed is None or owed.owed_to != owed_to:
        size = sum(variable.value.shape.num_elements() for variable in trainable)
        with strategy.scope():
            owed = tf.Variable(tf.zeros([size]), trainable=False, name="dense_owed")
        owed.owed_to = owed_to
        model.dense_owed = owed
    return owed


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the compiled optimizer, and the optimizers that an own `train_step` may use.

    The latter are attributes of the model, or elements of its list, tuple and dict attributes.
    """
    found: list[keras.optimizers.Optimizer] = []
    for value in [model.optimizer, *vars(model).values()]:
        values = list(value.values()) if isinstance(value, Mapping) else value
        for each in values if isinstance(values, (list, tuple)) else [values]:
            known = any(each is x or each is innermost(x) for x in found)
            if isinstance(each, keras.optimizers.Optimizer) and not known:
                found.append(each)
    return found


def has_own(optimizer: keras.optimizers.Optimizer | None) -> bool:
    """Whether every worker has its own state of an optimizer, even without `dense_staleness`."""
    return bool(_scaler_state(optimizer)) or accumulated_steps(optimizer) > 0


def averages_weights(optimizer: Any) -> bool:
    """Whether an optimizer averages weights (`use_ema`). Callbacks swap averages and weights."""
    return bool(getattr(innermost(optimizer), "use_ema", False))


def accumulated_steps(optimizer: Any) -> int:
    """Returns the number of steps per applied mean gradient. 0: no gradient accumulation."""
    return getattr(innermost(optimizer), "gradient_accumulation_steps", None) or 0


def _scaler_state(optimizer: Any) -> list[keras.Variable]:
    """Returns the loss scale and its age in steps, of which every worker has its own."""
    scaler = scaler_of(optimizer)
    return [] if scaler is None else [scaler.dynamic_scale, scaler.step_counter]


def _unchanged_by_scaler(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns a `LossScaleOptimizer`'s variables with counterparts in its inner optimizer."""
    inner = innermost(optimizer)
    if inner is optimizer:
        return []
    known = _ids(inner.variables, _scaler_state(optimizer))
    return [v for v in optimizer.variables if id(v) not in known]


def _ids(*kinds: Iterable[keras.Variable]) -> set[int]:
    return {id(variable) for kind in kinds for variable in kind}


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.path.endswith("seed_generator_state")


def _is_integer(variable: keras.Variable) -> bool:
    return tf.as_dtype(variable.dtype).is_integer
