"""Optimizers of embedding rows.

They run where the row is, in C++ (ops/core/row/optimizer.cc); these classes name one and its
parameters. Formulas and defaults are those of `keras.optimizers` where it has the optimizer, with
two differences: the bias correction of Adam and LAMB counts the updates of its own row, and weight
decay acts on a row when it is updated.

How merges: workers that hold updates of a row back send what these add to a row, whatever it was,
and every gradient counts once. Slots that are averages with decay (velocities, moments) come out as
of a serial run over the same gradients in the order of merging, and sums (Adagrad's) as well. The
value takes the sum of what the updates did to it, but for what each class says.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeAlias

import keras
import numpy as np

from het_tf.runtime.validation import check_number

# Those of ops/core/row/optimizer.cc. Parameters that are not here are from 0 to 1e30.
_RANGES = {
    "momentum": (0.0, 1.0),
    "beta_1": (0.0, 1 - 1e-9),
    "beta_2": (0.0, 1 - 1e-9),
    "rho": (0.0, 1 - 1e-9),
    "epsilon": (1e-30, 1e30),
}
# Of single optimizers.
_OWN_RANGES = {("lion", "beta_1"): (0.0, 1.0)}

_FLAGS = ("nesterov", "nonnegative", "centered")

LearningRate: TypeAlias = "float | keras.optimizers.schedules.LearningRateSchedule"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What all optimizers take.

    Attributes:
      learning_rate: a number, or a `LearningRateSchedule`, which is asked with the number of
        updates that the layer has made.
      weight_decay: each update first takes `learning_rate * weight_decay` of the row away; 0: off.
      l2: each update's gradient is that of the loss plus `l2 * sum(row**2)`, as with a Keras
        regularizer, of which only rows that are updated take notice; 0: off. (Of `Ftrl` its own.)
      clipnorm: bound of the L2 norm of a row's gradient; 0: off.
      cowclip: bound of the L2 norm of a row's gradient, as a share of that of the row's value, for
        each time that its id is in the batch; 0: off. It is put before anything else, where the
        gradient is computed, on the row as its worker has it; so it merges as if the shorter
        gradient had been the loss's. CowClip's r (Zheng et al., AAAI 2023, algorithm 1), there 1.
      cowclip_floor: the least that cowclip takes `cowclip * norm of the row` for (zeta).
      min_norm: the least L2 norm of a row's value after an update, if it is not all zeros; 0: off.
      max_norm: bound of the L2 norm of a row's value after an update; 0: off.
      nonnegative: whether an update makes what is negative in a row zero.

    Raises:
      ValueError: a parameter is out of its range; the message names it and its value.
    """

    name: ClassVar[str]

    learning_rate: LearningRate = dataclasses.field(default=0.01, kw_only=False)
    weight_decay: float = 0.0
    l2: float = 0.0
    clipnorm: float = 0.0
    cowclip: float = 0.0
    cowclip_floor: float = 1e-5
    min_norm: float = 0.0
    max_norm: float = 0.0
    nonnegative: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.learning_rate, dict):  # from get_config
            schedule = keras.optimizers.schedules.deserialize(self.learning_rate)
            object.__setattr__(self, "learning_rate", schedule)
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, self._checked(field.name))

    def _checked(self, name: str) -> Any:
        """The parameter as it is kept: a float, a bool or a schedule."""
        value = getattr(self, name)
        if name in _FLAGS:
            if not isinstance(value, (bool, np.bool_)):
                raise ValueError(f"{name} must be True or False, not {value!r}")
            return bool(value)
        if name != "learning_rate":
            bounds = _OWN_RANGES.get((self.name, name), _RANGES.get(name, (0.0, 1e30)))
            return check_number(name, value, *bounds)
        if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
            return value
        largest = float(np.finfo(np.float32).max)
        return check_number(name, value, 0.0, largest, " or a LearningRateSchedule")

    def spec(self) -> str:
        """The optimizer as the ops take it: its name and parameters, without the learning rate."""
        words = [self.name]
        for field in dataclasses.fields(self):
            if field.name != "learning_rate":
                words.append(f"{field.name}={float(getattr(self, field.name))!r}")
        return " ".join(words)

    def get_config(self) -> dict[str, Any]:
        """The arguments, for Keras serialization."""
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if isinstance(self.learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            config["learning_rate"] = keras.optimizers.schedules.serialize(self.learning_rate)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Optimizer:
        """The inverse of `get_config`."""
        return cls(**config)


def _rate(default: float) -> Any:
    """A learning rate's field, where Keras's default is another than the base class's."""
    return dataclasses.field(default=default, kw_only=False)


def _register(cls: type) -> type:
    return keras.saving.register_keras_serializable("het_tf")(
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    )


@_register
class SGD(Optimizer):
    """`value -= learning_rate * gradient`. No slots."""

    name: ClassVar[str] = "sgd"


@_register
class Momentum(Optimizer):
    """`keras.optimizers.SGD` with momentum. Slots: velocity[dim].

    The value merges as the velocity has it: that of the row rolls on through the merged updates.
    """

    name: ClassVar[str] = "momentum"
    momentum: float = 0.9
    nesterov: bool = False


@_register
class Adagrad(Optimizer):
    """`keras.optimizers.Adagrad`. Slots: accumulator[dim]."""

    name: ClassVar[str] = "adagrad"
    learning_rate: LearningRate = _rate(0.001)
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7


@_register
class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator a row, of the mean square of the gradient. Slots: accumulator.

    Source: DLRM (Naumov et al., 2019) and FBGEMM's `EXACT_ROWWISE_ADAGRAD`.
    """

    name: ClassVar[str] = "row_wise_adagrad"
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7


@_register
class Adam(Optimizer):
    """`keras.optimizers.Adam` by the row's own updates. Slots: m[dim], v[dim], t.

    The part of the value's change that the row's m made, not the updates' own gradients, is made
    again of the m that the updates are merged into.
    """

    name: ClassVar[str] = "adam"
    learning_rate: LearningRate = _rate(0.001)
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@_register
class RowWiseAdam(Optimizer):
    """Adam with one second moment a row, of the mean square. Slots: m[dim], v, t. Merges alike."""

    name: ClassVar[str] = "row_wise_adam"
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@_register
class AdamW(Optimizer):
    """`keras.optimizers.AdamW`: `Adam` with a weight decay from the start. Merges alike."""

    name: ClassVar[str] = "adam"
    learning_rate: LearningRate = _rate(0.001)
    weight_decay: float = 0.004
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@_register
class RMSprop(Optimizer):
    """`keras.optimizers.RMSprop`.

    Slots: v[dim], with `centered` average[dim], with a momentum velocity[dim].

    v and the average merge as Adam's moments do. What an update puts into the velocity or the
    value is divided by the root of the v that its worker had, and the velocity of the row rolls on
    through the merged updates, as `Momentum`'s.
    """

    name: ClassVar[str] = "rmsprop"
    learning_rate: LearningRate = _rate(0.001)
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False


@_register
class Lion(Optimizer):
    """`keras.optimizers.Lion` (Chen et al., 2023). Slots: m[dim].

    A sign cannot be taken back: an update moves each column by the learning rate, in the direction
    that its worker saw, and merging adds that. So late updates move a row no further than as many
    in time would; they turn later.
    """

    name: ClassVar[str] = "lion"
    learning_rate: LearningRate = _rate(0.001)
    beta_1: float = 0.9
    beta_2: float = 0.99


@_register
class LAMB(Optimizer):
    """`keras.optimizers.Lamb` (You et al., 2020) with each row for itself, as a layer there.

    Slots: m[dim], v[dim], t, the row's own updates.

    An update moves the row by the learning rate times the row's norm. What updates did is merged in
    proportion: as long for the row that takes it as it was for the one on which they began. (Rows
    without a length take it as it is.)
    """

    name: ClassVar[str] = "lamb"
    learning_rate: LearningRate = _rate(0.001)
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@_register
class Ftrl(Optimizer):
    """`keras.optimizers.Ftrl` with `learning_rate_power=-0.5`. Slots: n[dim], z[dim].

    n and z add up, and the value is computed from the sums.
    """

    name: ClassVar[str] = "ftrl"
    learning_rate: LearningRate = _rate(0.001)
    initial_accumulator_value: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    l2_shrinkage: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay:
            raise ValueError(f"Ftrl takes l2 instead of weight_decay = {self.weight_decay!r}")


def get(identifier: Optimizer | dict[str, Any]) -> Optimizer:
    """An optimizer from itself or from its serialized form.

    Raises:
      ValueError: `identifier` is neither.
    """
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if not isinstance(identifier, Optimizer):
        raise ValueError(
            "optimizer must be one of het_tf.optimizers, for example"
            f" het_tf.optimizers.RowWiseAdagrad(0.05), not {identifier!r}"
        )
    return identifier


def constrained(optimizer: Optimizer, constraint: keras.constraints.Constraint | None) -> Optimizer:
    """The optimizer with a constraint of Keras, which it applies after each update of a row.

    Raises:
      ValueError: there is no such constraint of a single row, or it contradicts the optimizer's own
        bounds.
    """
    kinds = keras.constraints
    match constraint:
        case None:
            return optimizer
        case kinds.NonNeg():
            bounds: dict[str, Any] = {"nonnegative": True}
        case kinds.MaxNorm(axis=1 | -1 | [1] | [-1]):
            bounds = {"max_norm": constraint.max_value}
        case kinds.MinMaxNorm(axis=1 | -1 | [1] | [-1], rate=1.0):
            bounds = {"min_norm": constraint.min_value, "max_norm": constraint.max_value}
        case kinds.UnitNorm(axis=1 | -1 | [1] | [-1]):
            bounds = {"min_norm": 1.0, "max_norm": 1.0}
        case _:
            config = constraint.get_config() if hasattr(constraint, "get_config") else ""
            raise ValueError(
                "embeddings_constraint must be one that holds for each row by itself: NonNeg(), or"
                " MaxNorm, MinMaxNorm (with rate=1) and UnitNorm with axis=1 (Keras's default"
                f" axis=0 runs over all rows), not {type(constraint).__name__} {config}"
            )
    if bounds.get("max_norm") == 0:
        raise ValueError(f"embeddings_constraint {type(constraint).__name__} leaves only zeros")
    for name, value in bounds.items():
        own = getattr(optimizer, name)
        if own and own != value:
            raise ValueError(
                f"embeddings_constraint wants {name} = {value}, the optimizer {name} = {own}"
            )
    return dataclasses.replace(optimizer, **bounds)
