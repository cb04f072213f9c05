"""The properties of the protocol: what must hold on every schedule.

What a row holds is taken from its values alone. Steps are SGD with rate 1 from zero rows, and each
update of a worker adds one to the worker's own column, so the columns say whose updates are in the
row, and how many. (A worker that comes back after a crash gets a new column.) The last column
carries integer gradients, so that an update applied to the wrong row cannot hide.
"""

import collections
import dataclasses
import math

import numpy as np
from schedules import Begun, Player, Schedule, Setup, System

Epoch = tuple[int, int] | None  # (restarts of the shard, times it forgot this life)
OLD = (-1, -1)  # of a reply that changed nothing


def run(schedule: Schedule, system: System) -> None:
    """Carries the schedule out and asserts the properties on the way and at the end."""
    setup, events = schedule
    ledger = Ledger(setup, system)
    ledger.play(events)
    ledger.finish()


@dataclasses.dataclass(eq=False)
class Life:
    """A worker between two crashes."""

    worker: int
    column: int
    links: list[Epoch]  # by shard: what its cache must take for the present one
    forgotten: list[int]
    # By key, the gradients of its updates, but for those that it knows to be lost. The shard has
    # merged the first `merged` of them.
    made: dict[int, list[int]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    merged: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    # By shard: how many exchanges, one after another, have been completed.
    done: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass
class Cut:
    """What was so when a step's requests were cut."""

    life: Life
    links: list[Epoch]
    alone: dict[int, bool]  # by shard: no other request of the life was open
    made: dict[int, int]
    table: dict[int, tuple[dict[Life, int], int, int]]  # key -> merged by life, clock, restarts
    age: dict[int, int]  # by shard: `Life.done`
    keeps: bool  # in a hot phase
    replies: dict[int, Epoch] = dataclasses.field(default_factory=dict)


class Ledger(Player):
    def __init__(self, setup: Setup, system: System):
        super().__init__(setup, system)
        self.columns = iter(range(setup.dim - 1))
        self.lives: list[Life] = []  # the dead as well: what they sent may still arrive
        self.life = {worker: self._new_life(worker) for worker in range(setup.num_workers)}
        self.restarts = [0] * setup.num_shards
        self.cuts: dict[Begun, Cut] = {}
        self.ages: dict[tuple[Life, int], list[int]] = collections.defaultdict(list)
        self.table = {}
        self.saved: dict[Life, dict[int, list[int]]] = {}  # of `Life.made`, what was merged

    # What happens.

    def gradients(self, step: Begun, gradient: int) -> np.ndarray:
        # The first occurrence carries the worker's column and the last one the integer, but
        # together they are one update: a system that counts or applies occurrences shows.
        life, keys = self.life[step.worker], step.keys
        gradients = np.zeros((len(keys), self.setup.dim))
        for key in dict.fromkeys(keys):
            life.made[key].append(gradient)
            gradients[keys.index(key), life.column] = -1
            gradients[len(keys) - 1 - keys[::-1].index(key), -1] = -gradient
        return gradients

    def has_begun(self, step: Begun) -> None:
        life = self.life[step.worker]
        others = [each for each in self.open[step.worker] if each is not step]
        waiting = {s for each in others if not each.installed for s in each.shards}
        table = {}
        for key in dict.fromkeys(step.keys):
            merged = {each: each.merged[key] for each in self.lives}
            clock = self.table[key][2] if key in self.table else 0
            table[key] = merged, clock, self.restarts[self.shard_of[key]]
        self.cuts[step] = Cut(
            life,
            list(life.links),
            {shard: shard not in waiting for shard in step.shards},
            {key: len(made) for key, made in life.made.items()},
            table,
            {shard: life.done[shard] for shard in step.shards},
            self.keeps[step.worker],
        )
        for shard in step.shards:
            self._check_size(step, shard)

    def was_delivered(self, step: Begun, shard: int, keep: bool) -> None:
        cut = self.cuts[step]
        if keep:
            cut.replies[shard] = self._present(cut.life, shard)
        self._merge(step, shard)
        if cut.links[shard] == self._present(cut.life, shard):
            self._check_unsent(step, shard)

    def was_installed(self, step: Begun) -> None:
        cut = self.cuts[step]
        for shard in step.shards:
            reply = cut.replies[shard]
            if reply != cut.life.links[shard] and cut.links[shard] == cut.life.links[shard]:
                cut.life.links[shard] = reply  # the cache learns: what it held of the shard is lost
                for key in self._keys(cut.life, shard):
                    del cut.life.made[key][cut.life.merged[key] :]
            if reply != cut.life.links[shard]:
                cut.replies[shard] = OLD  # even where the cache will come to know that epoch later
            elif reply == self._present(cut.life, shard):
                cut.life.done[shard] = max(cut.life.done[shard], cut.age[shard] + 1)

    def has_asked_again(self, step: Begun) -> None:
        cut, life = self.cuts[step], self.cuts[step].life
        others = [each for each in self.open[step.worker] if each is not step]
        for shard in step.shards:
            cut.replies.pop(shard, None)
            cut.links[shard] = life.links[shard]
            cut.alone[shard] = not any(
                shard in each.shards and not each.installed for each in others
            )
            cut.made |= {key: len(life.made[key]) for key in self._keys(life, shard)}
            cut.age[shard] = life.done[shard]
            self._check_size(step, shard)

    def was_flushed(self, step: Begun) -> None:
        cut, life = self.cuts[step], self.cuts[step].life
        for shard in range(self.setup.num_shards):
            if cut.links[shard] == life.links[shard] == self._present(life, shard):
                for key in self._keys(life, shard):
                    made = min(cut.made.get(key, 0), len(life.made[key]))
                    assert life.merged[key] >= made, "flushed, yet not on the shard"

    def has_crashed(self, worker: int) -> None:
        self.life[worker] = self._new_life(worker)

    def has_restarted(self, shard: int) -> None:
        self.restarts[shard] += 1
        for life in self.lives:
            for key in self._keys(life, shard):
                life.merged[key] = 0
        self.table = self.system.table()

    def has_forgotten(self, worker: int, shard: int) -> None:
        self.life[worker].forgotten[shard] += 1

    def was_saved(self) -> None:
        self.saved = {
            life: {key: made[: life.merged[key]] for key, made in life.made.items()}
            for life in self.lives
        }

    def was_restored(self) -> None:
        self.restarts = [number + 1 for number in self.restarts]
        for life in self.lives:
            saved = self.saved.get(life, {})
            for key in life.made.keys() | saved.keys():
                life.made[key] = list(saved.get(key, ()))
                life.merged[key] = len(life.made[key])
        self.table = self.system.table()

    def finish(self) -> None:
        """Whatever has happened: who goes on stepping gets his updates into the table.

        Steps that are still open stay open meanwhile.
        """
        keys = tuple(self.shard_of)
        for worker in range(self.setup.num_workers):
            for _ in range(3):  # the first may be lost: it tells the cache what it missed
                self.step(worker, keys)
                self.install(self.flush(worker))
                for _ in range(2):
                    self.step(worker, keys)
            self.install(self.flush(worker))
            life = self.life[worker]
            for key in keys:
                assert life.links[self.shard_of[key]] == self._present(life, self.shard_of[key])
                assert len(life.made[key]) >= 6, "cut off from its shard"
        for steps in self.open:
            for step in list(steps):
                self.drop(step)
        for key in keys:
            self._check_row(key)

    # What must hold.

    def was_read(self, step: Begun, rows: np.ndarray) -> None:
        """Own updates are there, all of them; others' as the bounds say.

        Not so for steps that overlap with the loss of what they read: those were cut, and
        answered, before their cache knew.
        """
        cut = self.cuts[step]
        for key, value in zip(step.keys, rows, strict=True):
            shard = self.shard_of[key]
            present = self._present(cut.life, shard)
            seen = cut.links[shard]
            if shard in cut.replies and self.setup.read_bound is not None and not cut.keeps:
                seen = cut.replies[shard]
            if cut.life.links[shard] == present == seen:
                self._check_read(cut, key, value)

    def _check_read(self, cut: Cut, key: int, value: np.ndarray) -> None:
        own = cut.life
        read = {life: value[life.column] for life in self.lives}
        assert read[own] == len(own.made[key]), "own updates are always there, once"
        for life in self.lives:
            limit = len(own.made[key]) if life is own else life.merged[key]
            assert 0 <= read[life] <= limit, "an update read that nobody sent"
        self._check_integers(key, value)
        merged, clock, restarts = cut.table[key]
        is_bounded = self.setup.read_bound is not None and not cut.keeps
        if restarts != self.restarts[self.shard_of[key]] or not is_bounded:
            return
        if self.setup.clock == "lamport":
            self._check_clocks(own, key, clock)
            return
        lacks = {life: range(int(read[life]), merged.get(life, 0)) for life in self.lives}
        del lacks[own]
        if self.setup.clock == "count":
            missed = sum(map(len, lacks.values()))
        else:
            counts = [len(each) for each in lacks.values()]
            integers = sum(life.made[key][i] for life, each in lacks.items() for i in each)
            missed = math.hypot(*counts, integers)
        assert missed <= self.setup.read_bound, "more missed than the read bound allows"

    def _check_clocks(self, own: Life, key: int, clock: int) -> None:
        """Lemma 1 at a read: nobody's clock is further ahead than the read bound and what he has
        not got to the shard, which in steps one after another is at most the write bound."""
        mine = self.system.clock(own.worker, key)
        assert mine is None or mine >= clock - self.setup.read_bound
        table_clock = self.table[key][2] if key in self.table else 0
        for life in self.life.values():
            shard = self.shard_of[key]
            other = self.system.clock(life.worker, key)
            if other is not None and life.links[shard] == self._present(life, shard):
                assert other <= table_clock + len(life.made[key]) - life.merged[key]

    def _check_unsent(self, step: Begun, shard: int) -> None:
        """What is due goes up: with the next message, unless others before it are under way."""
        cut, bound = self.cuts[step], self.setup.write_bound
        if not (step.everything or cut.alone[shard]):
            return
        for key in self._keys(cut.life, shard):
            unsent = cut.life.made[key][cut.life.merged[key] : cut.made.get(key, 0)]
            if step.everything:
                assert not unsent, "flushed, yet not on the shard"
            elif bound is None or cut.keeps or not unsent:
                continue
            elif self.setup.clock == "drift":  # before the last one it was not due
                assert math.hypot(len(unsent), sum(unsent)) < bound, "more unsent than allowed"
            else:
                assert len(unsent) < bound, "more unsent than the write bound allows"

    def _check_size(self, step: Begun, shard: int) -> None:
        """Messages do not grow: a push is through after three exchanges in a row, and two more for
        each request that is still out: it may hold what the others wait for."""
        cut = self.cuts[step]
        ages = self.ages[cut.life, shard]
        ages.append(cut.age[shard])
        others = [each for each in self.open[step.worker] if each is not step]
        out = [each for each in others if shard in each.shards and not each.installed]
        number = self.system.num_pushes(step.handle, shard)
        recent = sum(age >= cut.age[shard] - 3 - 2 * len(out) for age in ages)
        assert number is None or number <= recent, "pushes are sent again and again"

    def _merge(self, step: Begun, shard: int) -> None:
        """Looks what the message did to the shard."""
        cut, life = self.cuts[step], self.cuts[step].life
        self.table = self.system.table()
        for key in self._keys(life, shard):
            merged = int(self.table[key][0][life.column]) if key in self.table else 0
            if cut.links[shard] != self._present(life, shard):
                assert merged == life.merged[key], "merged what was cut for another epoch"
            assert life.merged[key] <= merged <= len(life.made[key]), "lost or doubled"
            life.merged[key] = merged
        for key, home in self.shard_of.items():
            if home == shard:
                self._check_row(key)

    def _check_row(self, key: int) -> None:
        """The row on the shard is, to the last bit, the sum of the updates it has merged."""
        merged = {life: life.merged[key] for life in self.lives if life.merged[key]}
        assert (key in self.table) == bool(merged), "rows come into being by update, and only so"
        if key not in self.table:
            return
        value, _, clock = self.table[key]
        for column in range(self.setup.dim - 1):
            made = sum(number for life, number in merged.items() if life.column == column)
            assert value[column] == made, "lost or doubled"
        self._check_integers(key, value)
        if self.setup.clock == "count":
            assert clock == sum(merged.values())
        elif self.setup.clock == "lamport":
            # A session that was forgotten ends with steps open whose rows have no clock.
            home = self.shard_of[key]
            whole = [number for life, number in merged.items() if not life.forgotten[home]]
            assert max(whole, default=0) <= clock <= sum(merged.values())
        else:
            assert clock * self.system.unit >= np.linalg.norm(value) * (1 - 1e-6)

    def _check_integers(self, key: int, value: np.ndarray) -> None:
        made = [sum(life.made[key][: int(value[life.column])]) for life in self.lives]
        assert value[-1] == sum(made), "not the first updates of each worker, or not of this row"

    def _present(self, life: Life, shard: int) -> Epoch:
        return self.restarts[shard], life.forgotten[shard]

    def _keys(self, life: Life, shard: int) -> list[int]:
        return [key for key in life.made if self.shard_of[key] == shard]

    def _new_life(self, worker: int) -> Life:
        shards = self.setup.num_shards
        life = Life(worker, next(self.columns), [None] * shards, [0] * shards)
        self.lives.append(life)
        return life
