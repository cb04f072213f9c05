"""The optimizers in plain Python: what an update does to a row, and how contributions merge.

docs/protocol.md, 2 (merging). Formulas and defaults are those of ops/core/row/optimizer.cc. Every
optimizer merges by one rule, and says only what is its own: how its slots decay, and how far
a velocity in its slots carries the value.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Row:
    value: Array  # [d]
    slots: Array | None  # [s]; None where only the value is known


@dataclasses.dataclass(frozen=True)
class Contribution:
    """What `count` updates add to whatever the row was."""

    count: int
    rate: float  # the last update's
    value: Array  # [d] the sum of their changes of the value
    slots: Array  # [s] run from zero
    # [d] The velocity that each of them found in the slots and was not theirs, summed: N workers
    # that each add what one old velocity does to the value would add it N times.
    found: Array
    norm: float = 0.0  # of the value on which they began


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """`max_gradients`: up to so many updates are shorter as gradients than as a contribution."""

    max_gradients: ClassVar[int] = 1

    weight_decay: float = 0.0
    l2: float = 0.0
    clipnorm: float = 0.0
    cowclip: float = 0.0
    cowclip_floor: float = 1e-5
    min_norm: float = 0.0
    max_norm: float = 0.0
    nonnegative: bool = False

    @property
    def penalty(self) -> float:
        """Of the value's square."""
        return self.l2

    def initial_slots(self, dim: int) -> Array:
        return np.zeros(0)

    def decay(self, dim: int) -> Array | float:
        """What is left of each slot after an update, but for what the update itself puts in."""
        return 1.0

    def velocity(self, slots: Array, dim: int) -> Array:
        """The slots of which each update moves the value by a multiple, `carry`."""
        return np.zeros(dim)

    def carry(self, slots: Array, dim: int, rate: float) -> Array | float:
        return 0.0

    def step(self, value: Array, slots: Array, gradient: Array, rate: float):
        raise NotImplementedError

    def cowclipped(self, value: Array, gradient: Array, occurrences: int) -> Array:
        """What the worker takes for its gradient, on the row as it has it."""
        if not self.cowclip:
            return gradient
        limit = max(self.cowclip * np.linalg.norm(value), self.cowclip_floor)
        return _limited(gradient, occurrences * limit)

    def adjusted(self, value: Array, gradient: Array) -> Array:
        """The gradient that is stepped by."""
        return _limited(gradient + 2 * self.penalty * value, self.clipnorm)

    def update(self, row: Row, gradient: Array, rate: float) -> Row:
        value = row.value * (1 - self.weight_decay * rate)
        value, slots = self.step(value, row.slots, self.adjusted(value, gradient), rate)
        return Row(self.bounded(value), slots)

    def bounded(self, value: Array) -> Array:
        value = np.maximum(value, 0) if self.nonnegative else value
        value = _limited(value, self.max_norm)
        length = np.linalg.norm(value)
        return value * (self.min_norm / length) if 0 < length < self.min_norm else value

    def nothing(self, row: Row) -> Contribution:
        zero = np.zeros_like(row.value)
        return Contribution(0, 0.0, zero, np.zeros_like(row.slots), zero)

    def contribute(self, made: Contribution, before: Row, after: Row, rate: float) -> Contribution:
        """Takes in the update that led from one row to the other."""
        dim = len(before.value)
        decay = self.decay(dim)
        slots = decay * made.slots + (after.slots - decay * before.slots)
        return Contribution(
            made.count + 1,
            rate,
            made.value + (after.value - before.value),
            slots,
            made.found + self.velocity(after.slots - slots, dim),
            made.norm if made.count else np.linalg.norm(before.value),
        )

    def based_on(self, made: Contribution, row: Row) -> Contribution:
        """The same, as what was added to this row."""
        return made

    def settle(self, made: Contribution, row: Row) -> Contribution:
        """As it is sent or merged: without what the velocity it found on `row` did to the value."""
        dim = len(row.value)
        value = made.value - made.found * self.carry(row.slots, dim, made.rate)
        return dataclasses.replace(made, value=value, found=np.zeros(dim))

    def merge(self, row: Row, settled: Contribution) -> Row:
        """The row after the contribution's updates, all of them at once."""
        dim = len(row.value)
        slots = self.decay(dim) ** settled.count * row.slots + settled.slots
        value = self.merged_value(row, slots, settled)
        return Row(self.bounded(value), slots)

    def merged_value(self, row: Row, slots: Array, settled: Contribution) -> Array:
        dim = len(row.value)
        decay = self.velocity(self.decay(dim) * np.ones_like(slots), dim)
        # What the updates, one after another, would have found of it: a + ... + a^k of it.
        times = np.arange(1, settled.count + 1)[:, None]
        found = self.velocity(row.slots, dim) * np.sum(decay**times, axis=0)
        return row.value + settled.value + found * self.carry(slots, dim, settled.rate)


@dataclasses.dataclass(frozen=True)
class Sgd(Optimizer):
    max_gradients = 0  # a contribution is no longer than a gradient

    def step(self, value, slots, gradient, rate):
        return value - rate * gradient, slots


@dataclasses.dataclass(frozen=True)
class Momentum(Optimizer):
    momentum: float = 0.9
    nesterov: bool = False

    def initial_slots(self, dim):
        return np.zeros(dim)

    def decay(self, dim):
        return self.momentum

    def velocity(self, slots, dim):
        return slots

    def carry(self, slots, dim, rate):
        return self.momentum if self.nesterov else 1.0

    def step(self, value, slots, gradient, rate):
        velocity = self.momentum * slots - rate * gradient
        ahead = self.momentum * velocity - rate * gradient if self.nesterov else velocity
        return value + ahead, velocity


@dataclasses.dataclass(frozen=True)
class Adagrad(Optimizer):
    row_wise: bool = False
    initial: float = 0.1
    epsilon: float = 1e-7

    def initial_slots(self, dim):
        return np.full(1 if self.row_wise else dim, self.initial)

    def step(self, value, slots, gradient, rate):
        slots = slots + _squares(gradient, self.row_wise)
        return value - rate * gradient / np.sqrt(slots + self.epsilon), slots


@dataclasses.dataclass(frozen=True)
class Adam(Optimizer):
    """Slots: m [d], v [d] or one for the row, the number of updates."""

    row_wise: bool = False
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    @property
    def max_gradients(self) -> int:
        return 1 if self.row_wise else 2

    def initial_slots(self, dim):
        return np.zeros(dim + (1 if self.row_wise else dim) + 1)

    def decay(self, dim):
        v_dim = 1 if self.row_wise else dim
        return np.repeat([self.beta_1, self.beta_2, 1.0], [dim, v_dim, 1])

    def velocity(self, slots, dim):
        return slots[:dim]

    def carry(self, slots, dim, rate):
        v, t = slots[dim:-1], max(slots[-1], 1)
        corrected = rate * np.sqrt(1 - self.beta_2**t) / (1 - self.beta_1**t)
        return -corrected / (np.sqrt(v) + self.epsilon)

    def step(self, value, slots, gradient, rate):
        decay = self.decay(len(value))
        put_in = [gradient, _squares(gradient, self.row_wise)]
        slots = decay * slots + np.concatenate(
            [(1 - self.beta_1) * put_in[0], (1 - self.beta_2) * put_in[1], [1.0]]
        )
        dim = len(value)
        return value + slots[:dim] * self.carry(slots, dim, rate), slots


@dataclasses.dataclass(frozen=True)
class Rmsprop(Optimizer):
    """Slots: v [d], centered: average [d], with a momentum: velocity [d]."""

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    def initial_slots(self, dim):
        return np.zeros(len(self.decay(dim)))

    def decay(self, dim):
        decays = [self.rho] + [self.rho] * self.centered + [self.momentum] * (self.momentum > 0)
        return np.repeat(decays, dim)

    def velocity(self, slots, dim):
        return slots[-dim:] if self.momentum else np.zeros(dim)

    def carry(self, slots, dim, rate):
        return -1.0

    def step(self, value, slots, gradient, rate):
        dim, rest = len(value), 1 - self.rho
        put_in = [rest * gradient**2] + [rest * gradient] * self.centered
        slots = self.decay(dim) * slots
        slots[: dim * len(put_in)] += np.concatenate(put_in)
        variance = slots[:dim] - (slots[dim : 2 * dim] ** 2 if self.centered else 0)
        change = rate * gradient / np.sqrt(np.maximum(variance, 0) + self.epsilon)
        if self.momentum:
            slots[-dim:] += change
            change = slots[-dim:]
        return value - change, slots


@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    """Slots: m [d]."""

    beta_1: float = 0.9
    beta_2: float = 0.99

    def initial_slots(self, dim):
        return np.zeros(dim)

    def decay(self, dim):
        return self.beta_2

    def step(self, value, slots, gradient, rate):
        direction = self.beta_1 * slots + (1 - self.beta_1) * gradient
        slots = self.beta_2 * slots + (1 - self.beta_2) * gradient
        return value - rate * np.sign(direction), slots


@dataclasses.dataclass(frozen=True)
class Lamb(Optimizer):
    """Slots: m [d], v [d], the number of updates. Merged in proportion to the row's norm."""

    max_gradients: ClassVar[int] = 2

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def initial_slots(self, dim):
        return np.zeros(2 * dim + 1)

    def decay(self, dim):
        return np.repeat([self.beta_1, self.beta_2, 1.0], [dim, dim, 1])

    def step(self, value, slots, gradient, rate):
        dim = len(value)
        put_in = [(1 - self.beta_1) * gradient, (1 - self.beta_2) * gradient**2, [1.0]]
        slots = self.decay(dim) * slots + np.concatenate(put_in)
        m, v, t = slots[:dim], slots[dim:-1], slots[-1]
        second = np.sqrt(v / (1 - self.beta_2**t)) + self.epsilon
        direction = m / (1 - self.beta_1**t) / second
        return value - rate * _ratio(value, np.linalg.norm(direction)) * direction, slots

    def based_on(self, made, row):
        scale = _ratio(row.value, made.norm)
        norm = np.linalg.norm(row.value)
        return dataclasses.replace(made, value=made.value * scale, norm=norm)

    def merged_value(self, row, slots, settled):
        return row.value + self.based_on(settled, row).value


@dataclasses.dataclass(frozen=True)
class Ftrl(Optimizer):
    """Slots: n [d], z [d]. The weight follows from them, when it is merged as well."""

    penalty: ClassVar[float] = 0.0  # its l2 is its own

    initial: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    l2_shrinkage: float = 0.0
    beta: float = 0.0

    def initial_slots(self, dim):
        return np.repeat([self.initial, 0.0], dim)

    def step(self, value, slots, gradient, rate):
        n, z = np.split(slots, 2)
        grown = n + gradient**2
        z = z + gradient + 2 * self.l2_shrinkage * value
        z = z - (np.sqrt(grown) - np.sqrt(n)) / rate * value
        slots = np.concatenate([grown, z])
        return self.weight(slots, rate), slots

    def merged_value(self, row, slots, settled):
        return self.weight(slots, settled.rate)

    def weight(self, slots: Array, rate: float) -> Array:
        n, z = np.split(slots, 2)
        quadratic = np.sqrt(n) / rate + 2 * (self.l2 + self.beta / (2 * rate))
        safe = np.where(quadratic > 0, quadratic, 1.0)
        return np.where(quadratic > 0, (np.clip(z, -self.l1, self.l1) - z) / safe, 0.0)


def _squares(gradient: Array, row_wise: bool) -> Array:
    return np.mean(gradient**2, keepdims=True) if row_wise else gradient**2


def _ratio(value: Array, length: float) -> float:
    norm = np.linalg.norm(value)
    return norm / length if norm > 0 and length > 0 else 1.0


def _limited(x: Array, norm: float) -> Array:
    length = np.linalg.norm(x)
    return x * (norm / length) if 0 < norm < length else x
