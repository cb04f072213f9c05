"""Hits without a check, in plain Python: what shard and cache remember (ops/core/link/watch.h).

A check that is answered with nothing begins a watch. The shard sends the row, unasked, once it is
beyond the read bound, and again with every reply until it hears that the first one was taken.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Watched:
    base: int  # as a check would say it
    sent: int | None = None  # the first reply with the row


class Watch:
    """What a shard watches for a cache."""

    def __init__(self):
        self.epoch = self.replies = 0
        self.rows: dict[int, Watched] = {}
        self.place = 0  # in the shard's log, up to which rows were looked at

    def begin_reply(self, epoch: int, seen: int) -> int | None:
        """The reply's number; None: the epoch is over."""
        if epoch < self.epoch:
            return None
        if epoch > self.epoch:
            self.epoch, self.replies, self.rows = epoch, 0, {}
        self.rows = {
            key: row for key, row in self.rows.items() if row.sent is None or row.sent > seen
        }
        self.replies += 1
        return self.replies

    def begin(self, key: int, base: int) -> None:
        self.rows[key] = Watched(base)

    def push(self, key: int, units: int) -> None:
        """What the cache did itself it does not miss."""
        if key in self.rows:
            self.rows[key].base += units

    def send(self, key: int) -> None:
        if key in self.rows and self.rows[key].sent is None:
            self.rows[key].sent = self.replies

    @property
    def sent(self) -> dict[int, Watched]:
        return {key: row for key, row in self.rows.items() if row.sent is not None}


class Watching:
    """What a cache knows of a shard's watch."""

    def __init__(self):
        self.epoch = 0
        self.begin()

    def begin(self) -> None:
        self.epoch += 1
        self.over = False  # hits are checked until nothing that is open counts on the watch
        self.rows: set[int] = set()  # keys of lines that need no check
        self.open: set[int] = set()  # steps that count on them
        self.taken: set[int] = set()  # numbers of replies

    @property
    def seen(self) -> int:
        """All replies up to this number were taken."""
        return next(n for n in range(len(self.taken) + 1) if n + 1 not in self.taken)

    def counts(self) -> bool:
        if self.over and not self.open:
            self.begin()
        return not self.over

    def take(self, step: int, number: int) -> bool:
        """Takes a reply. Whether it is the latest: another may know less than what was taken."""
        self.open.discard(step)
        latest = number > max(self.taken, default=0)
        self.taken.add(number)
        return latest

    def close(self, step: int) -> None:
        """The step ends. If its reply was not taken, no other can be known to be the next."""
        self.over |= step in self.open
        self.open.discard(step)
