"""Checks of arguments that users pass. The errors name the argument and its value."""

from __future__ import annotations

import numbers
from typing import Any

INT32_MAX = 2**31 - 1
MAX_DIM = 2**24  # ops/core/row/rule.h
INT64_MAX = 2**63 - 1


def check_integer(name: str, value: Any, low: int, high: int, otherwise: str = "") -> int:
    """Returns `value` as an int after checking that it is an integer from `low` to `high`.

    Args:
      name: name of the argument.
      value: value of the argument. Any integer type except bool is allowed.
      low: smallest value allowed.
      high: largest value allowed.
      otherwise: text for the message about other values that the argument may have.

    Raises:
      ValueError: `value` is not such an integer.
    """
    if _is_number(value, numbers.Integral) and low <= value <= high:
        return int(value)
    raise ValueError(f"{name} must be an integer from {low} to {high}{otherwise}, not {value!r}")


def check_number(name: str, value: Any, low: float, high: float, otherwise: str = "") -> float:
    """Returns `value` as a float after checking that it is a number from `low` to `high`.

    Arguments and errors are those of `check_integer`. NaN is in no range.
    """
    if _is_number(value, numbers.Real) and low <= value <= high:
        return float(value)
    raise ValueError(f"{name} must be a number from {low:g} to {high:g}{otherwise}, not {value!r}")


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_clock(clock: Any) -> None:
    """Raises a ValueError if `clock` is not the name of a clock."""
    if clock not in ("count", "lamport", "drift"):
        raise ValueError(f'clock must be "count", "lamport" or "drift", not {clock!r}')


def check_float_dtype(name: str, value: Any) -> str:
    """Returns `value` after checking that it is a dtype of rows and messages."""
    if value not in ("float32", "bfloat16"):
        raise ValueError(f'{name} must be "float32" or "bfloat16", not {value!r}')
    return value
