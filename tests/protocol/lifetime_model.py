"""Rows that come and go, in plain Python: what protocol_model.Shard has not.

Caches know nothing of it: they are those of protocol_model. All that a shard says to them is an
answer to a check of a row that is not there: its initial value, under a clock that fits no other
life of the row.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from optimizer_model import Row
from protocol_model import Config, Reply, Request, Sent, Shard

STRIPES = 32  # of a shard: each draws for itself
SEED = 3  # of the table
WORD = 8  # bytes, of 16 counters
ERA = 2**36  # of clocks: further apart than any bound, and more updates than a row gets


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """An update that makes a key's count `admit` creates its row; `age` without one ends it.

    REQUIRES: probability is 1, or admit is. A sketch has 64 words or more, and admit is below 16.
    """

    admit: int = 1
    age: int | None = None
    rare: int = 0  # with fewer updates than this a row goes at half the age
    small: float = 0  # as does one whose norm is below this
    probability: float = 1  # that an update creates a row
    sketch: int = 0  # words of each stripe's sketch that counts, or an exact count

    @property
    def admits_all(self) -> bool:
        return self.admit == self.probability == 1

    def spec(self) -> str:
        """As the ops take it."""
        counted, drawn = f"count={self.admit}", f"probability={self.probability}"
        if self.sketch:
            counted += f" sketch={STRIPES * WORD * self.sketch}"
        clauses = ["given", f"admit {counted if self.probability == 1 else drawn}"]
        if self.age is not None:
            clauses += [f"expire age={self.age}"]
            clauses += [f"expire age={self.age // 2} updates_below={self.rare}"] * (self.rare > 0)
            clauses += [f"expire age={self.age // 2} norm_below={self.small}"] * (self.small > 0)
        return ";".join(clauses)

    def ends(self, age: int, updates: int, norm: float) -> bool:
        if self.age is None:
            return False
        early = updates < self.rare or norm < self.small
        return age >= self.age or (age >= self.age // 2 and early)


class MortalShard(Shard):
    """REQUIRES: the clock is "count"."""

    lifetimes = Lifetimes()

    def __init__(self, config: Config):
        self.now = 0
        self.gone = 0  # the clock of rows that are not there
        self.draws = [0] * STRIPES
        super().__init__(config)

    def save(self) -> Any:
        names = ("seen", "updated", "sketches", "now")
        return super().save(), copy.deepcopy({name: getattr(self, name) for name in names})

    def restore(self, saved: Any) -> None:
        rows, others = saved
        super().restore(rows)
        vars(self).update(copy.deepcopy(others))
        for key, (row, clock) in rows.items():
            self.rows[key] = row, self.gone + ERA + clock % ERA

    def clear(self) -> None:
        super().clear()
        self.seen: dict[int, tuple[int, int]] = {}  # without a row: count, last update
        self.updated: dict[int, int] = {}
        self.sketches = [Sketch(self.lifetimes.sketch) for _ in range(STRIPES)]

    def expire(self, now: int) -> int:
        """Returns how many rows went."""
        self.now = now
        for key, (_, updated) in list(self.seen.items()):
            if self.lifetimes.ends(self.now - updated, 0, 0):
                del self.seen[key]
        ended = [
            key
            for key, (row, clock) in self.rows.items()
            if self.lifetimes.ends(
                self.now - self.updated[key], clock % ERA, np.linalg.norm(row.value)
            )
        ]
        self.log += ended
        for key in ended:
            _, clock = self.rows.pop(key)
            if clock >= self.gone:
                self.gone = (clock // ERA + 2) * ERA
        return len(ended)

    def beyond(self, key: int, base: int) -> tuple[Row, int] | None:
        if key not in self.rows and base not in (0, self.gone):
            return self.present(key, base)
        return super().beyond(key, base)

    def present(self, key: int, base: int) -> tuple[Row, int]:
        return self.rows.get(key) or (self.config.new_row(key), max(self.gone, base))

    def with_watched(self, request: Request, reply: Reply, behind: bool) -> Reply:
        # A base that lacks later pushes could say that the cache knows of no row, though of what it
        # has pushed since something was refused.
        return super().with_watched(request, reply, behind or reply.acknowledged > request.cut)

    def merge(self, key: int, sent: Sent) -> None:
        for part in _parts(sent):
            if key not in self.rows:
                if not self.admits(key, part.units):
                    self.log.append(key)  # whoever pushed it has a row that is not here
                    continue
                self.rows[key] = self.config.new_row(key), self.gone + ERA
            self.updated[key] = self.now
            super().merge(key, part)

    def admits(self, key: int, units: int) -> bool:
        if self.lifetimes.probability < 1:
            # The table's numbers are drawn from its seed: any that are as random would do.
            stripe = (_hash(key) >> 8) % STRIPES
            self.draws[stripe] += 1
            drawn = _hash(_hash(key) + _hash(SEED * STRIPES + stripe) + self.draws[stripe])
            return (drawn >> 11) * 2.0**-53 >= (1 - self.lifetimes.probability) ** units
        if self.lifetimes.sketch:
            sketch = self.sketches[(_hash(key) >> 8) % STRIPES]
            return sketch.count(_hash(key), units) >= self.lifetimes.admit
        count = self.seen.get(key, (0, 0))[0] + units
        self.seen[key] = count, self.now
        if count < self.lifetimes.admit:
            return False
        del self.seen[key]
        return True


class Sketch:
    """Four counters a key among those of others; the least of them is its count, at most 15.

    With each key that is counted some are halved in turn: all, in so many keys as there are words
    of 16, times four.
    """

    ODD = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3)

    def __init__(self, words: int):
        self.words = np.zeros((words, 16), int)
        self.halved = Fraction(0)  # words

    def count(self, hashed: int, times: int) -> int:
        before = int(self.halved)
        self.halved += Fraction(1, 4)
        for word in range(before, int(self.halved)):
            self.words[word % len(self.words)] //= 2
        mixed = [hashed * odd % 2**64 for odd in self.ODD]
        places = [(m * len(self.words) >> 64, m % 16) for m in mixed]
        count = min(15, min(self.words[place] for place in places) + times)
        for place in places:
            self.words[place] = max(self.words[place], count)
        return count


def _hash(key: int) -> int:
    """As of ops/core/memory/hash.h: the finalizer of MurmurHash3."""
    h = key % 2**64
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD % 2**64
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53 % 2**64
    return h ^ (h >> 33)


def _parts(sent: Sent) -> Iterator[Sent]:
    """What is admitted together: a contribution is one thing."""
    if sent.contribution:
        yield sent
        return
    for gradient in sent.gradients:
        yield dataclasses.replace(sent, gradients=(gradient,), units=1)
