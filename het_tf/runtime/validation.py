"""Checks of what a user passes: an error names the argument and its value."""

from __future__ import annotations

import numbers
from typing import Any

INT32_MAX = 2**31 - 1
MAX_DIM = 2**24  # ops/core/row/rule.h
INT64_MAX = 2**63 - 1


def check_integer(name: str, value: Any, low: int, high: int, otherwise: str = "") -> int:
    """`value` as an int, if it is an integer of any type but bool from `low` to `high`.

    Args:
      name: of the argument.
      value: what was passed.
      low: smallest value allowed.
      high: largest value allowed.
      otherwise: what else the argument may be, for the message.

    Raises:
      ValueError: it is not.
    """
    if _is_number(value, numbers.Integral) and low <= value <= high:
        return int(value)
    raise ValueError(f"{name} must be an integer from {low} to {high}{otherwise}, not {value!r}")


def check_number(name: str, value: Any, low: float, high: float, otherwise: str = "") -> float:
    """`value` as a float, if it is a number of any type but bool from `low` to `high`.

    Args and Raises: as for `check_integer`. NaN is in no range.
    """
    if _is_number(value, numbers.Real) and low <= value <= high:
        return float(value)
    raise ValueError(f"{name} must be a number from {low:g} to {high:g}{otherwise}, not {value!r}")


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_clock(clock: Any) -> None:
    """Raises a ValueError if rows have no such clock."""
    if clock not in ("count", "lamport", "drift"):
        raise ValueError(f'clock must be "count", "lamport" or "drift", not {clock!r}')


def check_float_dtype(name: str, value: Any) -> str:
    """The name of the dtype, if it is one of the two that rows and messages have."""
    if value not in ("float32", "bfloat16"):
        raise ValueError(f'{name} must be "float32" or "bfloat16", not {value!r}')
    return value
