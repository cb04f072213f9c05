"""Arguments of `fit`, `evaluate` and `predict`, passed from a model to its trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from het_tf.runtime.validation import INT32_MAX, check_integer

_A = TypeVar("_A", bound="Arguments")
_COUNTS = "batch_size", "steps", "steps_per_epoch", "validation_steps", "validation_batch_size"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of a method of `keras.Model`."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name, None)
            if value is not None:
                check_integer(name, value, 1, INT32_MAX, " or None")

    @classmethod
    def of(cls: type[_A], local_variables: Mapping[str, Any]) -> _A:
        """Creates the arguments from the local variables at the beginning of the method."""
        return cls(**{f.name: local_variables[f.name] for f in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitArguments(Arguments):
    """The arguments of `het_tf.keras.Model.fit`."""

    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: str | int
    callbacks: Any
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: Mapping[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: int | list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateArguments(Arguments):
    """The arguments of `het_tf.keras.Model.evaluate`."""

    x: Any
    y: Any
    batch_size: int | None
    verbose: str | int
    sample_weight: Any
    steps: int | None
    callbacks: Any
    return_dict: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictArguments(Arguments):
    """The arguments of `het_tf.keras.Model.predict`."""

    x: Any
    batch_size: int | None
    verbose: str | int
    steps: int | None
    callbacks: Any
