"""One worker on the real ops, whatever the staleness and the faults, is as one without a cache.

Exactly so where every step is an integer, else up to fp32 rounding. The other properties of the
protocol are held against the ops in test_ops_protocol.py.
"""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf
from ops_system import OpsSystem
from random_schedules import check, drawn
from schedules import Begun, Player, Setup

from het_tf import ops, optimizers

_unique = itertools.count()


def one_worker(number: int):
    return drawn(number, workers=(1,), bounds=(0, 1, 5, 100, None), kinds=())


class WideSetup(Setup):
    dim = 11  # more than a vector register, and not a multiple of one


EXACT = [optimizers.SGD(), optimizers.Momentum(momentum=1.0)]
ROUNDED = [
    optimizers.SGD(weight_decay=0.1, clipnorm=1.0, max_norm=0.5),
    optimizers.Momentum(weight_decay=0.1),
    optimizers.Momentum(nesterov=True, clipnorm=1.0),
    optimizers.Adagrad(),
    optimizers.Adagrad(max_norm=0.5),
    optimizers.RowWiseAdagrad(weight_decay=0.1),
    optimizers.Adam(),
    optimizers.RowWiseAdam(),
    optimizers.Ftrl(),
    optimizers.Ftrl(l1=0.01, l2=0.1, l2_shrinkage=0.01, beta=0.1),
    optimizers.Momentum(l2=0.1, min_norm=0.1, max_norm=0.5),
    optimizers.Adam(l2=0.1, clipnorm=1.0, weight_decay=0.1),
    optimizers.SGD(cowclip=5.0),
    optimizers.Adam(cowclip=5.0, cowclip_floor=0.5, weight_decay=0.1),
    optimizers.Adam(nonnegative=True),
    optimizers.RMSprop(),
    optimizers.RMSprop(momentum=0.8, centered=True, epsilon=1e-3),
    optimizers.Lion(weight_decay=0.1),
    optimizers.LAMB(weight_decay=0.1),
]


def label(optimizer: optimizers.Optimizer) -> str:
    changed = [f"{k}={v}" for k, v in vars(optimizer).items() if v != getattr(type(optimizer), k)]
    return ",".join([optimizer.name, *changed])


class BesideATable(Player):
    """Makes every update on a table of this process as well, which has no cache at all."""

    def __init__(
        self,
        setup: Setup,
        system: OpsSystem,
        exact: bool,
        optimizer: optimizers.Optimizer | None = None,  # of the table, if not the system's
    ):
        super().__init__(setup, system)
        row = system.row if optimizer is None else system.row | {"optimizer": optimizer.spec()}
        self.plain = ops.table_handle(shared_name=f"test_protocol_ops/plain/{next(_unique)}", **row)
        self.exact = exact
        self.random = np.random.default_rng(5)
        self.steps = 0

    def gradients(self, step: Begun, gradient: int) -> np.ndarray:
        shape = len(step.keys), self.setup.dim
        if self.exact:
            gradients = gradient * self.random.integers(-3, 4, shape).astype(np.float32)
        else:
            gradients = self.random.normal(size=shape).astype(np.float32)
            self.system.learning_rate = 0.1 / (1 + self.steps)  # a rate that falls
        self.steps += 1
        rate = self.system.learning_rate
        ops.table_apply(self.plain, _unique_ids(step.keys), gradients, rate)
        return gradients

    def was_read(self, step: Begun, rows: np.ndarray) -> None:
        expected = ops.table_lookup(self.plain, tf.constant(step.keys, tf.int64)).rows
        self.assert_same(rows, expected.numpy(), "read")

    def finish(self) -> None:
        for step in list(self.open[0]):
            self.drop(step)
        self.install(self.flush(0))
        keys, *columns = (each.numpy() for each in ops.table_export(self.plain, 0, 1))
        table = self.system.table()
        assert table.keys() == set(keys.tolist())
        for key, *row in zip(keys.tolist(), *columns, strict=True):
            for what, got, wanted in zip(("value", "slots"), table[key], row, strict=False):
                self.assert_same(got, wanted, what)
            assert table[key][2] == row[2]

    def assert_same(self, got: np.ndarray, wanted: np.ndarray, what: str) -> None:
        if self.exact:
            np.testing.assert_array_equal(got, wanted, what)
        else:
            atol = 1e-5 * np.max(np.abs(wanted), initial=1e-3)
            np.testing.assert_allclose(got, wanted, 1e-4, atol, err_msg=what)


def _unique_ids(keys) -> tf.Tensor:
    return ops.unique_ids(tf.constant(keys, tf.int64))


def run_beside_a_table(schedule, optimizer: optimizers.Optimizer, device: str = "") -> None:
    setup, events = schedule
    setup, exact = WideSetup(**vars(setup)), optimizer in EXACT
    initializer = "zeros" if exact else "uniform"
    with contextlib.closing(
        OpsSystem(setup, optimizer=optimizer, initializer=initializer, device=device)
    ) as system:
        player = BesideATable(setup, system, exact)
        player.play(events)
        player.finish()
        tf.raw_ops.DestroyResourceOp(resource=player.plain)


@pytest.mark.parametrize("optimizer", EXACT + ROUNDED, ids=label)
def test_one_worker_is_as_without_a_cache(optimizer):
    for schedule in one_worker(8):
        check(lambda s: run_beside_a_table(s, optimizer), schedule)


# What N workers' contributions add up to is in test_merging.py, on the model.
# Here: the ops merge as the model does.


def on_row(optimizer, row: np.ndarray, gradient: np.ndarray, rate: float) -> np.ndarray:
    """What CowClip and l2 make of a gradient [1, dim] on the row that was read."""
    if optimizer.cowclip:
        least = optimizer.cowclip_floor
        gradient = limited(gradient, max(optimizer.cowclip * np.linalg.norm(row), least))
    if optimizer.l2:
        row = row * (1 - optimizer.weight_decay * rate)
        gradient = limited(gradient + 2 * optimizer.l2 * row, optimizer.clipnorm or np.inf)
    return gradient.astype(np.float32)


def limited(gradient: np.ndarray, norm: float) -> np.ndarray:
    return gradient * min(1, norm / np.linalg.norm(gradient))


@pytest.mark.parametrize("optimizer", ROUNDED, ids=label)
def test_merged_slots_are_those_of_a_serial_run(optimizer):
    """4 workers, each of which pushes 7 updates of one row at once, in turn."""
    if optimizer.name == "ftrl" or getattr(optimizer, "centered", False):
        pytest.skip("a slot depends on the weights or the slots that were read")
    # What depends on the row that was read is done here, to the gradients.
    without = dataclasses.replace(optimizer, cowclip=0.0)
    if optimizer.l2:
        without = dataclasses.replace(without, l2=0.0, clipnorm=0.0)
    setup = WideSetup(4, 1, capacity=9, read_bound=100, write_bound=100)
    with contextlib.closing(
        OpsSystem(setup, optimizer, learning_rate=0.01, initializer="uniform")
    ) as system:
        player = BesideATable(setup, system, exact=False, optimizer=without)
        made: dict[int, list[np.ndarray]] = {worker: [] for worker in range(4)}
        read: list[np.ndarray] = []

        def gradients(step: Begun, gradient: int) -> np.ndarray:
            new = player.random.normal(size=(1, setup.dim)).astype(np.float32)
            made[step.worker].append(on_row(optimizer, read[-1], new, 0.01))
            return new

        player.gradients, player.was_read = gradients, lambda step, rows: read.append(rows)
        for _ in range(3):
            for _ in range(7):
                for worker in range(4):
                    player.step(worker, (3,))
            for worker in range(4):
                player.install(player.flush(worker))
                for each in made[worker]:
                    ops.table_apply(player.plain, _unique_ids((3,)), each, 0.01)
                made[worker].clear()
        _, values, slots, clocks = ops.table_export(player.plain, 0, 1)
        value, merged, clock = system.table()[3]
        atol = 1e-6 * np.max(np.abs(slots[0]), initial=0)
        np.testing.assert_allclose(merged, slots[0], 1e-5, atol)
        assert clock == clocks[0] == 3 * 7 * 4
        if optimizer.name == "sgd" and not (optimizer.weight_decay or optimizer.max_norm):  # linear
            np.testing.assert_allclose(value, values[0], 1e-5, 1e-6)
        if optimizer.max_norm:
            assert np.linalg.norm(value) <= optimizer.max_norm * (1 + 1e-6)
        tf.raw_ops.DestroyResourceOp(resource=player.plain)
