"""Optimizers of embedding rows.

Each class names an optimizer and its parameters. The optimizer runs in C++, in the process that
holds the row (ops/core/row/optimizer.cc). Formulas and defaults equal those of `keras.optimizers`
where it has the optimizer, with two differences. The bias correction of Adam and LAMB counts the
updates of the row. Weight decay acts on a row when the row is updated.

Merging: a worker that holds back updates of a row sends their contribution, which can be merged
into any state of the row. Every gradient counts once. Decaying averages (velocities, moments) and
sums (Adagrad's accumulator) equal those of a serial run over the same gradients in the order of
merging. The value gets the sum of the changes of all updates, unless a class says otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeAlias

import keras
import numpy as np

from het_tf.runtime.validation import check_number

# As in ops/core/row/rule.cc. Parameters without an entry range from 0 to 1e30.
_RANGES = {
    "momentum": (0.0, 1.0),
    "beta_1": (0.0, 1 - 1e-9),
    "beta_2": (0.0, 1 - 1e-9),
    "rho": (0.0, 1 - 1e-9),
    "epsilon": (1e-30, 1e30),
}
# Ranges of single optimizers.
_OWN_RANGES = {("lion", "beta_1"): (0.0, 1.0)}

_FLAGS = ("nesterov", "nonnegative", "centered")

LearningRate: TypeAlias = "float | keras.optimizers.schedules.LearningRateSchedule"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Parameters of all optimizers of rows.

    Attributes:
      learning_rate: a number, or a `LearningRateSchedule` of the number of updates of the layer.
      weight_decay: each update first subtracts `learning_rate * weight_decay * row`. 0: off.
      l2: each update adds the gradient of `l2 * sum(row**2)`, like a Keras regularizer that only
        acts on updated rows. 0: off. `Ftrl` has an l2 of its own.
      clipnorm: largest L2 norm of a row's gradient. 0: off.
      cowclip: largest L2 norm of a row's gradient, relative to the norm of the row's value and per
        occurrence of the id in the batch. 0: off. Clipping precedes all else. It happens where the
        gradient is computed, and uses the worker's copy of the row. The clipped gradient merges
        like any gradient. Source: r of CowClip (Zheng et al., AAAI 2023, algorithm 1; r = 1 there).
      cowclip_floor: least value of `cowclip * norm of the row` (zeta of CowClip).
      min_norm: least L2 norm of a row's value after an update. Rows of zeros stay. 0: off.
      max_norm: largest L2 norm of a row's value after an update. 0: off.
      nonnegative: whether an update sets negative values of a row to zero.

    Raises:
      ValueError: a parameter is out of range; the message names the parameter and its value.
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
        """Returns the checked parameter: a float, a bool or a schedule."""
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
        """Returns the argument of the ops: name and parameters, without the learning rate."""
        words = [self.name]
        for field in dataclasses.fields(self):
            if field.name != "learning_rate":
                words.append(f"{field.name}={float(getattr(self, field.name))!r}")
        return " ".join(words)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for Keras serialization."""
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if isinstance(self.learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            config["learning_rate"] = keras.optimizers.schedules.serialize(self.learning_rate)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Optimizer:
        """Creates an optimizer from a config of `get_config`."""
        return cls(**config)


def _rate(default: float) -> Any:
    """Returns the field of a learning rate with a default other than the base class's."""
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

    Merging also moves the value by the row's own velocity, for as many updates as are merged.
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
    """Adagrad with one accumulator per row, of the gradient's mean square. Slots: accumulator.

    Source: DLRM (Naumov et al., 2019) and FBGEMM's `EXACT_ROWWISE_ADAGRAD`.
    """

    name: ClassVar[str] = "row_wise_adagrad"
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7


@_register
class Adam(Optimizer):
    """`keras.optimizers.Adam`, counting the row's own updates. Slots: m[dim], v[dim], t.

    A part of each change of the value comes from the m that the row had before. Merging computes
    this part again, from the m of the row that receives the updates.
    """

    name: ClassVar[str] = "adam"
    learning_rate: LearningRate = _rate(0.001)
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@_register
class RowWiseAdam(Optimizer):
    """`Adam` with one v per row, of the mean square. Slots: m[dim], v, t. Merges as `Adam`."""

    name: ClassVar[str] = "row_wise_adam"
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@_register
class AdamW(Optimizer):
    """`keras.optimizers.AdamW`: `Adam` with weight decay by default. Merges as `Adam`."""

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

    v and the average merge like Adam's moments. The contribution of an update to velocity and value
    is divided by the root of the worker's v. The velocity merges as in `Momentum`.
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

    An update moves each column by the learning rate, in the direction that the worker computed.
    Merging adds these moves and does not recompute their signs. Late updates therefore move a row
    no further than punctual updates would, but the row turns later.
    """

    name: ClassVar[str] = "lion"
    learning_rate: LearningRate = _rate(0.001)
    beta_1: float = 0.9
    beta_2: float = 0.99


@_register
class LAMB(Optimizer):
    """`keras.optimizers.Lamb` (You et al., 2020). Each row is treated as a layer.

    Slots: m[dim], v[dim], t, the number of the row's updates.

    An update moves the row by the learning rate times the row's norm. Merging scales the change by
    the norm of the receiving row, divided by the norm of the row on which the updates began. If one
    of the norms is 0, the change is not scaled.
    """

    name: ClassVar[str] = "lamb"
    learning_rate: LearningRate = _rate(0.001)
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@_register
class Ftrl(Optimizer):
    """`keras.optimizers.Ftrl` with `learning_rate_power=-0.5`. Slots: n[dim], z[dim].

    Merging adds n and z, and computes the value from the sums.
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
    """Returns an optimizer, given the optimizer or its serialized form.

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
    """Returns the optimizer with a Keras constraint, applied after each update of a row.

    Raises:
      ValueError: the constraint is not available for single rows, or contradicts the optimizer's
        own bounds.
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
