"""Sizes and rates that users write with a unit."""

from __future__ import annotations

import numbers
import re
from typing import Any

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PREFIXES |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBER = r"(\d+(?:\.\d*)?)\s*"


def to_bytes(name: str, value: Any) -> int:
    """Returns a size in bytes, given as an integer or as a text such as "8GB" or "512MiB".

    Args:
      name: name of the argument, for the error.
      value: the size. GB is 10^9 bytes, GiB is 2^30 bytes.

    Raises:
      ValueError: `value` is no such size, or not positive.
    """
    return _parsed(name, value, r"B?", "bytes, such as 8_000_000_000 or '8GB'")


def to_bits_per_second(name: str, value: Any) -> int:
    """Returns a rate in bit/s, given as an integer or as a text such as "1Gbit".

    Args:
      name: name of the argument, for the error.
      value: the rate. Gbit is 10^9 bit/s.

    Raises:
      ValueError: `value` is no such rate, or not positive.
    """
    return _parsed(name, value, r"(?:bit|bit/s|bps)?", "bit/s, such as 1_000_000_000 or '1Gbit'")


def _parsed(name: str, value: Any, unit: str, what: str) -> int:
    size = 0
    if isinstance(value, str):
        found = re.fullmatch(f"{_NUMBER}([kmgt]i?)?{unit}", value.strip(), re.IGNORECASE)
        if found:
            size = round(float(found[1]) * _PREFIXES[(found[2] or "").lower()])
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        real = float(value)
        size = round(real) if 0 < real < float("inf") else 0
    if size <= 0:
        raise ValueError(f"{name} must be a positive number of {what}, not {value!r}")
    return size


def bytes_text(size: float) -> str:
    """Returns a size with three digits and a unit."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"
