"""Rebuilding nested structures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def tuple_like(like: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple of `values`, with the fields of `like` where that is a namedtuple."""
    return type(like)(*values) if hasattr(like, "_fields") else tuple(values)
