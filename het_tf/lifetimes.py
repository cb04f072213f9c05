"""Which ids get a row, and when rows go (Monolith: Liu et al., arXiv 2209.07663, section 2.2)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import keras

from het_tf.runtime.validation import INT32_MAX, INT64_MAX, check_integer, check_number

# A sketch counts in half a byte.
_MAX_SKETCH_COUNT = 15
# Of float32.
_MAX_NORM = 3.4e38


class _Serializable:
    """A frozen dataclass as Keras serializes it."""

    def get_config(self) -> dict[str, Any]:
        """The arguments, for Keras serialization."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The inverse of `get_config`."""
        return cls(**config)


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(frozen=True)
class Admission(_Serializable):
    """When an id that has no row gets one: at an update, not before one is admitted.

    An update that is refused is dropped, and the id reads as its initial value. A worker's cache
    sends several updates of an id at once, and they are admitted or refused together.

    Attributes:
      count: the id's how manieth update makes its row, from 1 to `2**31 - 1`.
      sketch_bytes: None: ids without a row are counted exactly, in 16 bytes and a place in an index
        each, until they get one or have not come for the shortest age of their `Expiry`. Or how
        many bytes a shard counts them in (a count-min sketch whose counters are halved as others
        come, as of TinyLFU: Einziger et al., ACM ToS 2017), from 16384 on: some ids are
        then admitted early, and some late: each counter is halved once in `sketch_bytes / 2`
        updates of ids without a row. count is at most 15 then.
      probability: instead of a count: that an update is admitted, from 0 to 1.

    Raises:
      ValueError: an attribute is out of its range; the message names it and its value.
    """

    count: int = 1
    sketch_bytes: int | None = None
    probability: float = 1.0

    def __post_init__(self) -> None:
        most = INT32_MAX if self.sketch_bytes is None else _MAX_SKETCH_COUNT
        why = "" if self.sketch_bytes is None else " (with sketch_bytes)"
        object.__setattr__(self, "count", check_integer("count", self.count, 1, most, why))
        if self.sketch_bytes is not None:
            # Each of a shard's 32 stripes has its own.
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
        """As the ops take it."""
        if self.probability < 1:
            return f"admit probability={self.probability!r}"
        return f"admit count={self.count} sketch={self.sketch_bytes or 0}"


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(frozen=True)
class Expiry(_Serializable):
    """When a row goes: once all that is given here holds for it. Several of them are alternatives.

    Nothing is kept of a row that went: it reads as its initial value, and an update that comes
    later, also one that a worker made on the row as it was, is one of an id without a row.

    Attributes:
      age: how long ago its last update is at least, an integer from 0 to `2**31 - 1`. How long a
        row stays beyond its age: in seconds, a 16th of the shortest age of the table, from 1 s to
        1 h, and the time that a pass over the rows takes; otherwise until the next call of
        `table.expire`.
      updates_below: it has had fewer updates than this. Not with the clock "drift".
      norm_below: the L2 norm of its value is smaller than this.
      time: what age is in. "seconds": of the server that has the row, while it has it: not those
        between a checkpoint and its restoring. "given": in the unit of what `table.expire(now)` is
        given, such as days of the data, or steps.

    Raises:
      ValueError: an attribute is out of its range; the message names it and its value.
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
        """As the ops take it."""
        conditions = {"updates_below": self.updates_below, "norm_below": self.norm_below}
        given = [f" {name}={value!r}" for name, value in conditions.items() if value is not None]
        return f"expire age={self.age}{''.join(given)}"


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(frozen=True)
class KeyRange:
    """Ids with rules of their own, such as those of one of the features that share a layer.

    Attributes:
      first: the smallest id, int64.
      last: the largest, int64.
      admission: of these ids, in the place of the layer's; None: all get a row.
      expiry: of these ids, in the place of the layer's; None: their rows stay.
      initializer: of these ids, as a Keras initializer or its name, with their number as input_dim;
        None: the layer's.

    Raises:
      ValueError: an attribute is out of its range; the message names it and its value.
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
        """The arguments, for Keras serialization."""
        initializer = self.initializer and keras.saving.serialize_keras_object(self.initializer)
        rules = serialized(self.admission, self.expiry)
        return {"first": self.first, "last": self.last, **rules, "initializer": initializer}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KeyRange:
        """The inverse of `get_config`."""
        return cls(**deserialized(config))


Expiries = Expiry | Sequence[Expiry] | None


def checked(admission: Any, expiry: Any) -> tuple[Expiry, ...]:
    """The expiries, if these are an admission and expiries.

    Raises:
      ValueError: they are not.
    """
    if admission is not None and not isinstance(admission, Admission):
        raise ValueError(f"admission must be a het_tf.Admission or None, not {admission!r}")
    if expiry is None:
        return ()
    expiries = (expiry,) if isinstance(expiry, Expiry) else expiry
    if isinstance(expiries, (list, tuple)) and all(isinstance(each, Expiry) for each in expiries):
        return tuple(expiries)
    raise ValueError(f"expiry must be a het_tf.Expiry, a sequence of them or None, not {expiry!r}")


def spec(admission: Admission | None, expiry: Expiries, key_ranges: Sequence[KeyRange] = ()) -> str:
    """Rules as the ops take them; empty: all ids get rows, which stay.

    Raises:
      ValueError: they are of another type, their times differ, or ranges overlap.
    """
    expiries = checked(admission, expiry)
    if not isinstance(key_ranges, (list, tuple)):
        raise ValueError(f"key_ranges must be a sequence of het_tf.KeyRange, not {key_ranges!r}")
    for each in key_ranges:
        if not isinstance(each, KeyRange):
            raise ValueError(f"key_ranges must hold het_tf.KeyRange, not {each!r}")
    ordered = sorted(key_ranges, key=lambda each: each.first)
    for before, after in itertools.pairwise(ordered):
        if after.first <= before.last:
            raise ValueError(f"key_ranges overlap: {before} and {after}")
    everything = [*expiries, *(one for each in ordered for one in each.expiry)]
    times = {each.time for each in everything}
    if len(times) > 1:
        raise ValueError('all expiries of a layer must have one time, not "seconds" and "given"')
    admissions = [admission, *(each.admission for each in ordered)]
    if not everything and all(each is None for each in admissions):
        return ""
    clauses = ["given"] if times == {"given"} else []
    clauses += _clauses(admission, expiries)
    for each in ordered:
        clauses += [f"keys {each.first} {each.last}", *_clauses(each.admission, each.expiry)]
    return "; ".join(clauses)


def time_of(text: str) -> str | None:
    """What ages are in, "seconds" or "given", under rules of `spec`; None: no row goes."""
    clauses = [clause.split()[0] for clause in text.split(";")] if text else []
    if "expire" not in clauses:
        return None
    return "given" if "given" in clauses else "seconds"


def admission_of(text: str) -> str:
    """The part of a `spec` that says which ids get a row; empty: all do."""
    clauses = [clause.strip() for clause in text.split(";")]
    clauses = [clause for clause in clauses if clause.startswith(("admit ", "keys "))]
    return "; ".join(clauses) if any(each.startswith("admit ") for each in clauses) else ""


def has_sketch(admission: str) -> bool:
    """Whether a part of a `spec` counts in sketches."""
    return re.search(r" sketch=[1-9]", admission) is not None


def serialized(admission: Admission | None, expiry: Sequence[Expiry]) -> dict[str, Any]:
    """Both, as parts of a config."""
    serialize = keras.saving.serialize_keras_object
    return {
        "admission": None if admission is None else serialize(admission),
        "expiry": [serialize(each) for each in expiry],
    }


def deserialized(config: dict[str, Any]) -> dict[str, Any]:
    """The config, with what `serialized` made of them made again."""

    def again(value: Any) -> Any:
        return keras.saving.deserialize_keras_object(value) if isinstance(value, dict) else value

    admission, expiry = config.get("admission"), config.get("expiry")
    if isinstance(expiry, (list, tuple)):
        expiry = [again(each) for each in expiry]
    return {**config, "admission": again(admission), "expiry": again(expiry)}


def _clauses(admission: Admission | None, expiries: Sequence[Expiry]) -> list[str]:
    admits = [] if admission is None else [admission.clause()]
    return admits + [each.clause() for each in expiries]
