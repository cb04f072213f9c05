"""Admission and expiry of rows (Monolith: Liu et al., arXiv 2209.07663, section 2.2)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import keras

from het_tf.runtime.validation import INT32_MAX, INT64_MAX, check_integer, check_number

# A counter of a sketch has 4 bits.
_MAX_SKETCH_COUNT = 15
# About the largest float32.
_MAX_NORM = 3.4e38


@dataclasses.dataclass(frozen=True)
class _Serializable:
    """Base class of frozen dataclasses that Keras can serialize."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for Keras serialization."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Creates an object from the result of `get_config`."""
        return cls(**config)


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(frozen=True)
class Admission(_Serializable):
    """Rule for the admission of ids: the first admitted update of an id creates its row.

    The table drops an update that it does not admit. The id then still reads as its initial value.
    A worker's cache pushes several updates of an id at once. They are admitted or dropped together.

    Attributes:
      count: number of the update that creates the id's row, from 1 to `2**31 - 1`.
      sketch_bytes: None: the table counts ids without a row exactly. A counted id takes 16 bytes
        and a place in an index. The table forgets it when it gets a row, or gets no update for the
        shortest age of its `Expiry`. A number, from 16384 on: every shard counts in a sketch of
        this size, and `count` is at most 15. The sketch admits some ids early and some late. It is
        a count-min sketch that halves every counter once in `sketch_bytes / 2` updates of ids
        without a row, as in TinyLFU (Einziger et al., ACM ToS 2017).
      probability: probability from 0 to 1 that an update is admitted, instead of a count.

    Raises:
      ValueError: an attribute is out of range. The message names the attribute and its value.
    """

    count: int = 1
    sketch_bytes: int | None = None
    probability: float = 1.0

    def __post_init__(self) -> None:
        most = INT32_MAX if self.sketch_bytes is None else _MAX_SKETCH_COUNT
        why = "" if self.sketch_bytes is None else " (with sketch_bytes)"
        object.__setattr__(self, "count", check_integer("count", self.count, 1, most, why))
        if self.sketch_bytes is not None:
            # Every one of a shard's 32 stripes has a part of the sketch.
            size = check_integer("sketch_bytes", self.sketch_bytes, 1 << 14, 1 << 33, " or None")
            object.__setattr__(self, "sketch_bytes", size)
        probability = check_number("probability", self.probability, 0.0, 1.0)
        object.__setattr__(self, "probability", probability)
        if probability < 1 and (self.count > 1 or self.sketch_bytes is not None):
            raise ValueError(
                f"probability = {probability} excludes count = {self.count} and sketch_bytes ="
                f" {self.sketch_bytes}"
            )

    def clause(self) -> str:
        """Returns the rule as text for the ops."""
        if self.probability < 1:
            return f"admit probability={self.probability!r}"
        return f"admit count={self.count} sketch={self.sketch_bytes or 0}"


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(frozen=True)
class Expiry(_Serializable):
    """Rule for the expiry of rows: a row expires when all conditions of the rule hold.

    With several `Expiry`, a row expires when one of them applies. Nothing of an expired row is
    kept, and its id reads as its initial value. A later update is an update of an id without a row,
    even if a worker computed it from a cached copy of the row.

    Attributes:
      age: smallest time since the row's last update, an integer from 0 to `2**31 - 1`. A row may
        stay longer. With `time="given"` it stays until the next call of `table.expire`. With
        seconds it stays for up to a 16th of the table's shortest age (1 s to 1 h) and the time of
        one pass over the rows.
      updates_below: the row has had fewer updates than this. Not available with the clock "drift".
      norm_below: the L2 norm of the row's value is smaller than this.
      time: unit of `age`. "seconds": measured by the row's server. The time between a checkpoint
        and its restore does not count. "given": the unit of `table.expire(now)`, such as days of
        the data, or steps.

    Raises:
      ValueError: an attribute is out of range. The message names the attribute and its value.
    """

    age: int
    updates_below: int | None = None
    norm_below: float | None = None
    time: str = "seconds"

    def __post_init__(self) -> None:
        object.__setattr__(self, "age", check_integer("age", self.age, 0, INT32_MAX))
        if self.updates_below is not None:
            below = check_integer("updates_below", self.updates_below, 1, INT64_MAX >> 10)
            object.__setattr__(self, "updates_below", below)
        if self.norm_below is not None:
            norm = check_number("norm_below", self.norm_below, 0.0, _MAX_NORM)
            object.__setattr__(self, "norm_below", norm)
        if self.time not in ("seconds", "given"):
            raise ValueError(f'time must be "seconds" or "given", not {self.time!r}')

    def clause(self) -> str:
        """Returns the rule as text for the ops."""
        conditions = {"updates_below": self.updates_below, "norm_below": self.norm_below}
        given = [f" {name}={value!r}" for name, value in conditions.items() if value is not None]
        return f"expire age={self.age}{''.join(given)}"


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(frozen=True)
class KeyRange:
    """A range of ids with its own rules, such as the ids of a feature that shares a layer.

    The rules replace the rules of the layer.

    Attributes:
      first: smallest id, int64.
      last: largest id, int64.
      admission: admission of these ids. None: every updated id gets a row.
      expiry: expiry of these ids' rows. None: the rows do not expire.
      initializer: a Keras initializer or its name. Its `input_dim` is the number of these ids.
        None: the initializer of the layer.

    Raises:
      ValueError: an attribute is out of range. The message names the attribute and its value.
    """

    first: int
    last: int
    admission: Admission | None = None
    expiry: Expiry | Sequence[Expiry] | None = None
    initializer: str | keras.initializers.Initializer | None = None

    def __post_init__(self) -> None:
        first = check_integer("first", self.first, -INT64_MAX - 1, INT64_MAX)
        object.__setattr__(self, "first", first)
        last = check_integer("last", self.last, first, INT64_MAX)
        object.__setattr__(self, "last", last)
        object.__setattr__(self, "expiry", checked(self.admission, self.expiry))
        if self.initializer is not None:
            object.__setattr__(self, "initializer", keras.initializers.get(self.initializer))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for Keras serialization."""
        initializer = self.initializer and keras.saving.serialize_keras_object(self.initializer)
        rules = serialized(self.admission, self.expiry)
        return {"first": self.first, "last": self.last, **rules, "initializer": initializer}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KeyRange:
        """Creates an object from the result of `get_config`."""
        return cls(**deserialized(config))


Expiries = Expiry | Sequence[Expiry] | None


def checked(admission: Any, expiry: Any) -> tuple[Expiry, ...]:
    """Returns `expiry` as a tuple after checking the types of both arguments.

    Raises:
      ValueError: an argument has another type.
    """
    if admission is not None and not isinstance(admission, Admission):
        raise ValueError(f"admission must be a het_tf.Admission or None, not {admission!r}")
    if expiry is None:
        return ()
    expiries = (expiry,) if isinstance(expiry, Expiry) else expiry
    if isinstance(expiries, (list, tuple)) and all(isinstance(rule, Expiry) for rule in expiries):
        return tuple(expiries)
    raise ValueError(f"expiry must be a het_tf.Expiry, a sequence of them or None, not {expiry!r}")


def spec(admission: Admission | None, expiry: Expiries, key_ranges: Sequence[KeyRange] = ()) -> str:
    """Returns the rules as text for the ops.

    Empty: every updated id gets a row, and rows do not expire.

    Raises:
      ValueError: an argument has another type, the times of expiries differ, or ranges overlap.
    """
    expiries = checked(admission, expiry)
    if not isinstance(key_ranges, (list, tuple)):
        raise ValueError(f"key_ranges must be a sequence of het_tf.KeyRange, not {key_ranges!r}")
    for key_range in key_ranges:
        if not isinstance(key_range, KeyRange):
            raise ValueError(f"key_ranges must hold het_tf.KeyRange, not {key_range!r}")
    ordered = sorted(key_ranges, key=lambda key_range: key_range.first)
    for lower, upper in itertools.pairwise(ordered):
        if upper.first <= lower.last:
            raise ValueError(f"key_ranges overlap: {lower} and {upper}")
    all_expiries = [*expiries, *(rule for key_range in ordered for rule in key_range.expiry)]
    times = {rule.time for rule in all_expiries}
    if len(times) > 1:
        raise ValueError('all expiries of a layer must have one time, not "seconds" and "given"')
    admissions = [admission, *(key_range.admission for key_range in ordered)]
    if not all_expiries and all(rule is None for rule in admissions):
        return ""
    clauses = ["given"] if times == {"given"} else []
    clauses += _clauses(admission, expiries)
    for key_range in ordered:
        clauses += [
            f"keys {key_range.first} {key_range.last}",
            *_clauses(key_range.admission, key_range.expiry),
        ]
    return "; ".join(clauses)


def time_of(text: str) -> str | None:
    """Returns the time of ages in a `spec`: "seconds" or "given". None: no row expires."""
    clauses = [clause.split()[0] for clause in text.split(";")] if text else []
    if "expire" not in clauses:
        return None
    return "given" if "given" in clauses else "seconds"


def admission_of(text: str) -> str:
    """Returns the admission rules of a `spec`. Empty: every updated id gets a row."""
    clauses = [clause.strip() for clause in text.split(";")]
    clauses = [clause for clause in clauses if clause.startswith(("admit ", "keys "))]
    return "; ".join(clauses) if any(clause.startswith("admit ") for clause in clauses) else ""


def has_sketch(admission: str) -> bool:
    """Whether admission rules count in a sketch."""
    return re.search(r" sketch=[1-9]", admission) is not None


def serialized(admission: Admission | None, expiry: Any) -> dict[str, Any]:
    """Returns the entries of a Keras config for an admission and a sequence of expiries."""
    serialize = keras.saving.serialize_keras_object
    return {
        "admission": None if admission is None else serialize(admission),
        "expiry": [serialize(rule) for rule in expiry],
    }


def deserialized(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config whose entries of `serialized` are replaced by their objects."""

    def deserialize(value: Any) -> Any:
        return keras.saving.deserialize_keras_object(value) if isinstance(value, dict) else value

    admission, expiry = config.get("admission"), config.get("expiry")
    if isinstance(expiry, (list, tuple)):
        expiry = [deserialize(rule) for rule in expiry]
    return {**config, "admission": deserialize(admission), "expiry": deserialize(expiry)}


def _clauses(admission: Admission | None, expiries: Sequence[Expiry]) -> list[str]:
    admits = [] if admission is None else [admission.clause()]
    return admits + [rule.clause() for rule in expiries]
