"""Closures that count once: random runs of them, in which workers die and messages are lost.

Steps are SGD with rate 1 from zero rows, and a closure adds the same integers whoever runs it. So
at the end every row is the sum over all closures, whatever was run how often.
"""

import collections
import dataclasses
import random
from typing import Any

import numpy as np
from schedules import KEYS, Setup

FAILS = 0.3  # the chance that something does, at each message
TWICE = 0.1  # the chance that a message arrives so
ARRIVES = 0.02  # the chance that a late message does, at each turn: mostly after its closure's end


@dataclasses.dataclass(frozen=True)
class Work:
    """A closure: the keys of each of its steps."""

    number: int
    steps: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(eq=False)
class Run:
    """Of a closure on a worker."""

    work: Work
    made: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    at: int = 0  # the step that is next


class Closures:
    """Carries closures out on a system that also has `begin`, `commit`, `end` and `give_up`.

    `give_up`: the run is over, whether it has ended or not.
    """

    def __init__(self, system: Any, setup: Setup, seed: int, num_closures: int = 8):
        self.system, self.setup = system, setup
        self.random = random.Random(seed)
        keys = KEYS[: self.random.randint(2, 8)]
        self.waiting = [
            Work(
                number,
                tuple(
                    tuple(self.random.choices(keys, k=self.random.randint(1, 4)))
                    for _ in range(self.random.randint(1, 4))
                ),
            )
            for number in range(1, num_closures + 1)
        ]
        self.expected = collections.Counter(
            key for work in self.waiting for step in work.steps for key in set(step)
        )
        self.finished: set[int] = set()
        self.given_out = 0
        self.runs: list[Run | None] = [None] * setup.num_workers
        self.late: list[tuple[Any, int]] = []  # messages that arrive some time

    def play(self) -> None:
        """Until all closures have ended; then asserts that each of them counts once."""
        while len(self.finished) < self.given_out + len(self.waiting) or any(self.runs):
            worker = self.random.randrange(self.setup.num_workers)
            if self.late and self.random.random() < ARRIVES:
                self.arrive(*self.late.pop(self.random.randrange(len(self.late))))
            if self.runs[worker] is None:
                self.begin(worker)
            else:
                self.go_on(worker)
        for message in self.late:
            self.arrive(*message)
        for worker in range(self.setup.num_workers):  # nothing is left to send
            flush = self.system.flush(worker)
            for shard in self.system.shards_with_requests(flush):
                self.system.deliver(flush, shard)
            self.system.install(flush)
            self.system.drop(flush)
        table = self.system.table()
        assert {key: -int(row[0][0]) for key, row in table.items()} == dict(self.expected)
        if self.setup.clock == "count":
            assert {key: row[2] for key, row in table.items()} == dict(self.expected)

    def begin(self, worker: int) -> None:
        if not self.waiting:
            return
        work = self.waiting.pop(0)
        self.given_out = max(self.given_out, work.number)
        self.system.begin(worker, work.number)
        self.runs[worker] = Run(work)

    def go_on(self, worker: int) -> None:
        run = self.runs[worker]
        if run.at == len(run.work.steps):
            self.end(worker)
            return
        keys = run.work.steps[run.at]
        run.at += 1
        step = self.system.lookup(worker, keys)
        if not self.exchange(worker, step):
            return
        rows = self.system.gather(step)
        for key, row in zip(keys, rows, strict=True):
            # Those of another run of this closure may be there as well, until its end.
            most = self.expected[key] + run.made[key]
            assert run.made[key] <= -row[0] <= most, "own updates are always there"
        gradients = np.zeros((len(keys), self.setup.dim))
        for i, key in enumerate(keys):
            gradients[i, 0] = key not in keys[:i]
        self.system.update(step, gradients)
        run.made.update(set(keys))
        if self.setup.write_bound == 0:
            flush = self.system.flush(worker, everything=False)
            assert not self.system.shards_with_requests(flush), "pushed before the closure's end"
            self.system.install(flush)
            self.system.drop(flush)

    def end(self, worker: int) -> None:
        run = self.runs[worker]
        done = next(n for n in range(1, self.given_out + 2) if n not in self.finished) - 1
        step = self.system.commit(worker, done)
        if not self.exchange(worker, step):
            return
        self.system.drop(step)
        if not self.system.end(worker):
            self.fail(worker, dies=False)
        elif self.random.random() < FAILS:
            self.fail(worker, dies=True)  # before anybody heard that it has ended
        else:
            self.system.give_up(worker)
            self.runs[worker] = None
            self.finished.add(run.work.number)

    def exchange(self, worker: int, step: Any) -> bool:
        """Sends what a step says; False: that failed, and its closure with it."""
        fails = self.random.random() < FAILS
        shards = sorted(self.system.shards_with_requests(step))
        self.random.shuffle(shards)
        lost = self.random.choice(shards) if fails and shards else None
        for shard in shards:
            if shard == lost:
                what = self.random.choice(["request", "reply", "late"])
                if what == "reply":
                    self.system.deliver(step, shard, keep=False)
                elif what == "late":
                    self.late.append((step, shard))
                break
            if self.random.random() < TWICE:
                self.system.deliver(step, shard, keep=False)
            self.system.deliver(step, shard)
        if not fails:
            return self.exchange(worker, step) if self.system.install(step) else True
        self.system.drop(step)
        self.fail(worker, dies=self.random.random() < 0.7)
        return False

    def fail(self, worker: int, dies: bool) -> None:
        """The worker is killed, or its closure fails; some worker will run the closure again."""
        self.system.give_up(worker)
        self.waiting.insert(0, self.runs[worker].work)
        self.runs[worker] = None
        if dies:
            self.system.crash(worker)
        elif self.random.random() < 0.3:  # as before a checkpoint
            flush = self.system.flush(worker)
            assert not self.system.shards_with_requests(flush), "sent what was given up"
            self.system.install(flush)
            self.system.drop(flush)

    def arrive(self, step: Any, shard: int) -> None:
        self.system.deliver(step, shard, keep=False)
