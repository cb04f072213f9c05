"""Synchronous steps in plain Python (docs/protocol.md, 9): what every read must see."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from optimizer_model import Array, Optimizer, Row


class StepShard:
    """The rows of a shard. A step of all members is one update of every row that is pushed."""

    def __init__(self, optimizer: Optimizer, dim: int, rate: float):
        self.optimizer, self.dim, self.rate = optimizer, dim, rate
        self.rows: dict[int, tuple[Row, int]] = {}
        self.pushed: dict[int, dict[int, Array]] = {}  # of the step, by member

    def read(self, key: int) -> Array:
        """What a lookup sees between two steps."""
        return self.row(key).value

    def row(self, key: int) -> Row:
        if key in self.rows:
            return self.rows[key][0]
        return Row(np.zeros(self.dim), self.optimizer.initial_slots(self.dim))

    def push(self, member: int, gradients: Mapping[int, Array]) -> None:
        """A member's message arrives. Twice is once."""
        self.pushed[member] = dict(gradients)

    def merge(self) -> None:
        """All members have sent their messages, or have left."""
        sums: dict[int, tuple[Array, int]] = {}
        for gradients in self.pushed.values():
            for key, gradient in gradients.items():
                total, count = sums.get(key, (np.zeros(self.dim), 0))
                sums[key] = total + gradient, count + 1
        for key, (total, count) in sums.items():
            clock = self.rows[key][1] if key in self.rows else 0
            row = self.optimizer.update(self.row(key), total, self.rate)
            self.rows[key] = row, clock + count
        self.pushed = {}
