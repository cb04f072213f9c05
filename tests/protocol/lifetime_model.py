"""Rows that come and go, in plain Python: what protocol_model.Shard has not.

Caches know nothing of it: they are those of protocol_model. All that a shard says to them is an
answer to a check of a row that is not there: its initial value, under a clock that fits no other
life of the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from optimizer_model import Row
from protocol_model import Config, Reply, Request, Sent, Shard

STRIPES = 32  # of a shard: each draws for itself
SEED = 3  # of the table
ERA = 2**36  # of clocks: further apart than any bound, and more updates than a row gets


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """An update that makes a key's count `admit` creates its row; `age` without one ends it.

    REQUIRES: probability is 1, or admit is.
    """

    admit: int = 1
    age: int | None = None
    rare: int = 0  # with fewer updates than this a row goes at half the age
    small: float = 0  # as does one whose norm is below this
    probability: float = 1  # that an update creates a row

    @property
    def admits_all(self) -> bool:
        return self.admit == self.probability == 1

    def spec(self) -> str:
        """As the ops take it."""
        counted, drawn = f"count={self.admit}", f"probability={self.probability}"
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

    def clear(self) -> None:
        super().clear()
        self.seen: dict[int, tuple[int, int]] = {}  # without a row: count, last update
        self.updated: dict[int, int] = {}

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
        count = self.seen.get(key, (0, 0))[0] + units
        self.seen[key] = count, self.now
        if count < self.lifetimes.admit:
            return False
        del self.seen[key]
        return True


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
