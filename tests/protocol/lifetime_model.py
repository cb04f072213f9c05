"""Rows that come and go, in plain Python: what protocol_model.Shard has not.

Caches know nothing of it: they are those of protocol_model. All that a shard says to them is an
answer to a check of a row that is not there: its initial value, under a clock that fits no other
life of the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from optimizer_model import Row
from protocol_model import Config, Sent, Shard

ERA = 2**36  # of clocks: further apart than any bound, and more updates than a row gets


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """An update that makes a key's count `admit` creates its row; `age` without one ends it."""

    admit: int = 1
    age: int | None = None
    rare: int = 0  # with fewer updates than this a row goes at half the age

    def spec(self) -> str:
        """As the ops take it."""
        clauses = ["given", f"admit count={self.admit}"]
        if self.age is not None:
            clauses += [f"expire age={self.age}"]
            clauses += [f"expire age={self.age // 2} updates_below={self.rare}"] * (self.rare > 0)
        return ";".join(clauses)

    def ends(self, age: int, updates: int) -> bool:
        if self.age is None:
            return False
        return age >= self.age or (age >= self.age // 2 and updates < self.rare)


class MortalShard(Shard):
    """REQUIRES: the clock is "count"."""

    lifetimes = Lifetimes()

    def __init__(self, config: Config):
        self.now = 0
        self.gone = 0  # the clock of rows that are not there
        super().__init__(config)

    def clear(self) -> None:
        super().clear()
        self.seen: dict[int, tuple[int, int]] = {}  # without a row: count, last update
        self.updated: dict[int, int] = {}

    def expire(self, now: int) -> int:
        """Returns how many rows went."""
        self.now = now
        for key, (_, updated) in list(self.seen.items()):
            if self.lifetimes.ends(self.now - updated, 0):
                del self.seen[key]
        ended = [
            key
            for key, (_, clock) in self.rows.items()
            if self.lifetimes.ends(self.now - self.updated[key], clock % ERA)
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

    def merge(self, key: int, sent: Sent) -> None:
        for part in _parts(sent):
            if key not in self.rows:
                count = self.seen.get(key, (0, 0))[0] + part.units
                self.seen[key] = count, self.now
                if count < self.lifetimes.admit:
                    continue
                del self.seen[key]
                self.rows[key] = self.config.new_row(key), self.gone + ERA
            self.updated[key] = self.now
            super().merge(key, part)


def _parts(sent: Sent) -> Iterator[Sent]:
    """What is admitted together: a contribution is one thing."""
    if sent.contribution:
        yield sent
        return
    for gradient in sent.gradients:
        yield dataclasses.replace(sent, gradients=(gradient,), units=1)
