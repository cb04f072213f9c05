"""What several workers' updates add up to, for every optimizer (docs/protocol.md, 2, merging)."""

import collections
import dataclasses
import math

import numpy as np
import pytest
from model_system import ModelSystem
from optimizer_model import (
    Adagrad,
    Adam,
    Ftrl,
    Lamb,
    Lion,
    Momentum,
    Optimizer,
    Rmsprop,
    Row,
    Sgd,
)
from protocol_model import Shard, uniform
from random_schedules import check, drawn
from schedules import Begun, Player, Setup

DIM = 4
OPTIMIZERS = {
    "sgd": Sgd(),
    "sgd with all": Sgd(weight_decay=0.1, clipnorm=1.0, max_norm=0.5),
    "momentum": Momentum(),
    "nesterov": Momentum(nesterov=True),
    "momentum with all": Momentum(weight_decay=0.1, clipnorm=1.0, max_norm=0.5),
    "adagrad": Adagrad(max_norm=0.5),
    "row-wise adagrad": Adagrad(row_wise=True, weight_decay=0.1),
    "adam": Adam(),
    "row-wise adam": Adam(row_wise=True),
    "adam with all": Adam(weight_decay=0.1, clipnorm=1.0, max_norm=0.5),
    "l2 and bounds": Momentum(l2=0.1, clipnorm=1.0, min_norm=0.1, max_norm=0.5),
    "sgd with cowclip": Sgd(cowclip=20.0),
    "adam with cowclip": Adam(cowclip=20.0, cowclip_floor=0.5, weight_decay=0.1),
    "nonnegative": Adam(nonnegative=True),
    "rmsprop": Rmsprop(),
    "rmsprop with all": Rmsprop(momentum=0.8, centered=True, epsilon=1e-3, weight_decay=0.1),
    "lion": Lion(weight_decay=0.1),
    "lamb": Lamb(),
    "lamb with all": Lamb(weight_decay=0.1, clipnorm=1.0, max_norm=0.5),
    "ftrl": Ftrl(),
    "ftrl with all": Ftrl(l1=0.01, l2=0.1, l2_shrinkage=0.01, beta=0.1),
}
# So that no row is beyond what its merged gradients say.
UNLIMITED = {
    name: each for name, each in OPTIMIZERS.items() if "ftrl" not in name and "l2" not in name
}


class RandomGradients(Player):
    """Carries a schedule out with gradients of all sizes and signs."""

    def __init__(self, setup: Setup, system: ModelSystem):
        super().__init__(setup, system)
        self.random = np.random.default_rng(setup.seed)

    def gradients(self, step: Begun, gradient: int) -> np.ndarray:
        return (gradient or 1) * self.random.standard_normal((len(step.keys), DIM))

    def finish(self) -> None:
        for worker, steps in enumerate(self.open):
            for step in list(steps):
                self.drop(step)
            self.install(self.flush(worker))


# One worker, whatever the staleness and the faults: as without a cache.


class AsWithoutCache(RandomGradients):
    def __init__(self, setup, system, integers=False):
        super().__init__(setup, system)
        self.config, self.integers = system.config, integers
        self.tolerance = {"rtol": 0, "atol": 0} if integers else {"rtol": 1e-9, "atol": 1e-9}
        self.rate = system.rate
        self.rows: dict[int, Row] = {}

    def was_read(self, step, rows):
        expected = [self.row(key).value for key in step.keys]
        np.testing.assert_allclose(rows, expected, **self.tolerance)

    def gradients(self, step, gradient):
        gradients = super().gradients(step, gradient)
        if self.integers:
            gradients = np.round(2 * gradients)
        for key in dict.fromkeys(step.keys):
            at = [i for i, each in enumerate(step.keys) if each == key]
            summed = sum(gradients[i] for i in at)
            optimizer, row = self.config.optimizer, self.row(key)
            clipped = optimizer.cowclipped(row.value, summed, len(at))
            self.rows[key] = optimizer.update(row, clipped, self.rate)
        return gradients

    def row(self, key: int) -> Row:
        return self.rows.get(key) or self.config.new_row(key)

    def finish(self):
        super().finish()
        table = self.system.table()
        assert table.keys() == self.rows.keys()
        for key, row in self.rows.items():
            np.testing.assert_allclose(table[key][0], row.value, **self.tolerance)
            np.testing.assert_allclose(table[key][1], row.slots, **self.tolerance)


def check_one_worker(optimizer: Optimizer, init, rate: float, integers: bool = False) -> None:
    def play(schedule):
        setup, events = schedule
        system = ModelSystem(setup, optimizer, init, rate)
        player = AsWithoutCache(setup, system, integers)
        player.play(events)
        player.finish()

    for schedule in drawn(8, workers=(1,), bounds=(0, 1, 5, 100, None), kinds=("evict",)):
        check(play, schedule)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_as_without_a_cache(name):
    check_one_worker(OPTIMIZERS[name], uniform(3, DIM), rate=0.1)


@pytest.mark.parametrize("optimizer", [Sgd(), Momentum(momentum=1.0)], ids=["sgd", "momentum"])
def test_one_worker_is_exactly_as_without_a_cache_in_integer_steps(optimizer):
    check_one_worker(optimizer, lambda key: np.full(DIM, key % 7.0), rate=1.0, integers=True)


# Any number of workers: as a serial run over the same gradients, in merging order.


class Recording(Shard):
    """Remembers the gradients that were merged into each row, one by one.

    Those that CowClip has shortened: its limit is of the worker's row and batch, and the gradients
    that count once each (docs/protocol.md, 2) are what it leaves.
    """

    def clear(self):
        super().clear()
        self.merged = collections.defaultdict(list)

    def merge(self, key, sent):
        self.merged[key] += sent.gradients
        super().merge(key, sent)


def merged(schedule, optimizer: Optimizer, update=None, **options):
    """(key, the row on the shard, the row of the serial run) for each row.

    update: of a row of the serial run, if it is another one than the optimizer's.
    """
    setup, events = schedule
    system = ModelSystem(setup, optimizer, uniform(3, DIM), 0.1, Recording, **options)
    player = RandomGradients(setup, system)
    player.play(events)
    player.finish()
    for shard in system.shards:
        for key, (row, _) in shard.rows.items():
            serial = system.config.new_row(key)
            for gradient, rate in shard.merged[key]:
                serial = (update or optimizer.update)(serial, gradient, rate)
            yield key, row, serial


SEVERAL = {"workers": (2, 4, 24), "bounds": (0, 1, 3, 20, None), "max_events": 25}


@pytest.mark.parametrize("name", UNLIMITED)
def test_merged_slots_are_those_of_a_serial_run(name):
    def play(schedule):
        for _, row, serial in merged(schedule, UNLIMITED[name]):
            # The steps in rmsprop's velocity are divided by the v that was read.
            exact = slice(2 * DIM) if name == "rmsprop with all" else slice(None)
            np.testing.assert_allclose(row.slots[exact], serial.slots[exact], 1e-9, 1e-12)
            if name in ("sgd", "sgd with cowclip", "momentum", "nesterov"):  # linear: the value too
                np.testing.assert_allclose(row.value, serial.value, 1e-9, 1e-12)
            limit = UNLIMITED[name].max_norm or math.inf
            assert np.linalg.norm(row.value) <= limit * (1 + 1e-12)

    for schedule in drawn(8, **SEVERAL):
        check(play, schedule)


L2 = {
    "sgd": Sgd(l2=0.1),
    "momentum": Momentum(l2=0.1),
    "nesterov": Momentum(nesterov=True, l2=0.1),
    "adagrad": Adagrad(l2=0.1),
    "row-wise adagrad": Adagrad(row_wise=True, l2=0.1),
    "adam": Adam(l2=0.1),
    "row-wise adam": Adam(row_wise=True, l2=0.1),
    "rmsprop": Rmsprop(l2=0.1),
    "lion": Lion(l2=0.1),
    "lamb": Lamb(l2=0.1),
    "with all": Adam(l2=0.1, cowclip=20.0, clipnorm=1.0, weight_decay=0.1, max_norm=0.5),
}
# An update whose gradient depends on the row that was read. Contributions only, from lines only, so
# that each update is made once; the shard makes again what is sent as a gradient, on its row.
MADE_ONCE = {**SEVERAL, "kinds": ("evict",), "capacities": (1, 6)}


def recording(optimizer: Optimizer) -> Optimizer:
    """The optimizer, with `made`: the loss's gradient -> that of the loss and the penalty."""

    class RecordingL2(type(optimizer)):
        max_gradients = 0

        def adjusted(self, value, gradient):
            self.made[gradient.tobytes()] = adjusted = super().adjusted(value, gradient)
            return adjusted

    made = RecordingL2(**vars(optimizer))
    object.__setattr__(made, "made", {})
    return made


@pytest.mark.parametrize("name", L2)
def test_l2_merges_as_a_part_of_the_gradient(name):
    def play(schedule):
        optimizer = recording(L2[name])
        without = dataclasses.replace(L2[name], l2=0.0, clipnorm=0.0)

        def update(row, gradient, rate):
            return without.update(row, optimizer.made[gradient.tobytes()], rate)

        for _, row, serial in merged(schedule, optimizer, update, admitted=1.0):
            np.testing.assert_allclose(row.slots, serial.slots, 1e-9, 1e-12)
            if name in ("sgd", "momentum", "nesterov"):
                np.testing.assert_allclose(row.value, serial.value, 1e-9, 1e-12)
            assert np.linalg.norm(row.value) <= (optimizer.max_norm or math.inf) * (1 + 1e-12)

    for schedule in drawn(8, **MADE_ONCE):
        check(play, schedule)


class RecordingFtrl(Ftrl):
    """What each update put into z: it depends on the weight that was read."""

    max_gradients = 0

    def step(self, value, slots, gradient, rate):
        value, after = super().step(value, slots, gradient, rate)
        self.made.append((gradient, after - slots))
        return value, after


@pytest.mark.parametrize("name", ["ftrl", "ftrl with all"])
def test_ftrl_merges_what_each_update_put_in(name):
    def play(schedule):
        setup, events = schedule
        optimizer = RecordingFtrl(**vars(OPTIMIZERS[name]))
        object.__setattr__(optimizer, "made", [])
        system = ModelSystem(setup, optimizer, uniform(3, DIM), 0.1, Recording, admitted=1.0)
        player = RandomGradients(setup, system)
        player.play(events)
        player.finish()
        put_in = {gradient.tobytes(): change for gradient, change in optimizer.made}
        for shard in system.shards:
            for key, (row, _) in shard.rows.items():
                gradients = [gradient for gradient, _ in shard.merged[key]]
                slots = system.config.new_row(key).slots
                slots = slots + sum(put_in[gradient.tobytes()] for gradient in gradients)
                np.testing.assert_allclose(row.slots, slots, 1e-9, 1e-9)
                n = optimizer.initial + sum(gradient**2 for gradient in gradients)
                np.testing.assert_allclose(row.slots[:DIM], n, 1e-9, 1e-9)
                np.testing.assert_allclose(row.value, optimizer.weight(row.slots, 0.1), 1e-9, 1e-9)

    for schedule in drawn(8, **MADE_ONCE):
        check(play, schedule)


# A hot row. That what is stable without slots is stable with them is tested on the C++ itself
# (ops/core/cache/convergence_test.cc); here, that simpler ways of merging are not enough.


class HotRow:
    """Workers on one row, whose coordinates are so many independent trials.

    loss = (row - 1)^2 / 2 plus noise. Rows come and go as by the rules of clock "count".
    """

    trials, noise, rate = 32, 0.1, 0.001

    def __init__(self, optimizer: Optimizer, workers: int, staleness: int, rate: float):
        self.optimizer, self.staleness, self.rate = optimizer, staleness, rate
        self.random = np.random.default_rng(1)
        zero = np.zeros(self.trials)
        self.row, self.clock = Row(zero, optimizer.initial_slots(self.trials)), 0
        self.largest = 0.0
        self.lines = [self.row] * workers
        self.bases = [0] * workers
        self.made = [optimizer.nothing(self.row)] * workers
        self.kept = [[] for _ in range(workers)]  # gradients, as long as they are few

    def push(self, worker: int) -> None:
        count = self.made[worker].count
        self.row = self.with_unsent(worker, self.row)
        self.clock += count
        self.bases[worker] += count
        self.made[worker], self.kept[worker] = self.optimizer.nothing(self.row), []

    def with_unsent(self, worker: int, row: Row) -> Row:
        made = self.made[worker]
        if made.count > self.optimizer.max_gradients:
            return self.optimizer.merge(row, self.optimizer.settle(made, self.lines[worker]))
        for gradient in self.kept[worker]:
            row = self.optimizer.update(row, gradient, self.rate)
        return row

    def step(self, workers: range) -> None:
        """The workers look up, then all of them update."""
        for worker in workers:
            if self.made[worker].count >= max(1, self.staleness):
                self.push(worker)
        for worker in workers:
            if self.clock - self.bases[worker] > self.staleness:
                self.lines[worker] = self.with_unsent(worker, self.row)
                self.bases[worker] = self.clock
        for worker in workers:
            line = self.lines[worker]
            gradient = line.value - 1 + self.noise * self.random.standard_normal(self.trials)
            self.largest = max(self.largest, np.abs(gradient).max())
            after = self.optimizer.update(line, gradient, self.rate)
            self.made[worker] = self.optimizer.contribute(self.made[worker], line, after, self.rate)
            self.kept[worker].append(gradient)
            self.lines[worker] = after
        if self.staleness == 0:
            for worker in workers:
                self.push(worker)

    def distance(self, workers: int, steps: int, lockstep: bool) -> float:
        """How far the row is from 1 in the second half, at most 1e9."""
        seen = []
        for t in range(steps):
            self.step(range(workers) if lockstep else range(t % workers, t % workers + 1))
            if 2 * t >= steps:
                seen.append(min(1e9, np.sqrt(np.mean((self.row.value - 1) ** 2))))
            if seen and seen[-1] == 1e9:
                return 1e9
            self.check_slots()
        return float(np.mean(seen))

    def check_slots(self) -> None:
        """They stay what gradients can make them."""
        if isinstance(self.optimizer, Adam):
            for row in (self.row, self.lines[self.random.integers(len(self.lines))]):
                m, v = row.slots[: self.trials], row.slots[self.trials : -1]
                assert np.abs(m).max() <= self.largest * (1 + 1e-9)
                assert 0 <= v.min() <= v.max() <= self.largest**2 * (1 + 1e-9)


# The tests find what was wrong, and what is simpler.


@dataclasses.dataclass(frozen=True)
class SlotDifferences(Momentum):
    """A worker ships its slots as new minus old, and the shard adds that."""

    def decay(self, dim):
        return 1.0

    def velocity(self, slots, dim):
        return np.zeros(dim)


@dataclasses.dataclass(frozen=True)
class AdamDifferences(Adam):
    def decay(self, dim):
        return np.ones(2 * dim + 1)

    def velocity(self, slots, dim):
        return np.zeros(dim)

    def step(self, value, slots, gradient, rate):
        row = Adam().update(Row(value, slots), gradient, rate)
        return row.value, row.slots


@dataclasses.dataclass(frozen=True)
class ManyTails(Adam):
    """Slots right, but the value by the sum of what each worker did: N tails of one old m."""

    def velocity(self, slots, dim):
        return np.zeros(dim)

    def step(self, value, slots, gradient, rate):
        row = Adam().update(Row(value, slots), gradient, rate)
        return row.value, row.slots


def test_differences_of_slots_diverge():
    for optimizer in (SlotDifferences(), AdamDifferences()):
        with np.errstate(all="ignore"):
            hot = HotRow(optimizer, 4, 20, 0.001)
            hot.check_slots = lambda: None
            assert not hot.distance(4, 2000, lockstep=False) < 100


def test_adding_the_tails_of_all_workers_is_worse_than_delay():
    near = HotRow(Adam(), 24, 5, 0.001).distance(24, 200, lockstep=True)
    far = HotRow(ManyTails(), 24, 5, 0.001).distance(24, 200, lockstep=True)
    assert far > 2 * near
