"""Fresh random schedules and mutated messages on the real ops, for as long as one likes.

    make fuzz ARGS=--minutes=30

Prints its seed; `--seed` repeats a run. Ends with 1 at the first violation, which it prints as a
schedule that can be pasted into named_schedules.py, as the seed of synchronous steps, or as the
bytes of a message.
`make fuzz-sanitized` runs it with ops/core under ASAN and UBSAN.
"""

from __future__ import annotations

import collections
import contextlib
import random
import time

import numpy as np
import tensorflow as tf
from absl import app, flags
from ledger import Ledger
from ops_system import OpsSystem, Sending
from random_schedules import BOUNDS, draw
from schedules import Schedule, Setup
from step_schedules import steps_of

from het_tf import ops

_MINUTES = flags.DEFINE_float("minutes", 1.0, "How long.")
_SEED = flags.DEFINE_integer("seed", None, "Of a run that is to be repeated; default: a new one.")

REFUSED = (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError)


class Mutating(OpsSystem):
    """Hands shards and caches broken copies of every message, too.

    What is refused must have changed nothing, which the ledger sees. What is accepted may have
    changed anything, so it goes to shards and caches that nobody else uses.
    """

    def __init__(self, setup: Setup, chance: random.Random, counts: collections.Counter, **options):
        super().__init__(setup, **options)
        self.chance, self.counts = chance, counts
        self.spare = OpsSystem(setup, **options)

    def deliver(self, sending: Sending, shard: int, keep: bool = True) -> None:
        for _ in range(2):
            broken = self._broken(sending.requests[shard])
            if self._refuses(lambda broken=broken: self._sync_spare(shard, broken)):
                self._must_refuse(lambda b=broken: ops.table_sync(self.tables[shard], b), broken)
        super().deliver(sending, shard, keep)

    def install(self, sending: Sending) -> bool:
        answered = [shard for shard, reply in enumerate(sending.replies) if reply.shape[0]]
        for shard in answered:
            replies = list(sending.replies)
            # One byte too few is never a reply, so it is refused whatever else is wrong with it,
            # and neither it nor the good replies beside it may have been taken.
            replies[shard] = self._broken(replies[shard])[:-1]
            self._must_refuse(
                lambda replies=replies: ops.cache_install(sending.cache, sending.ticket, replies),
                replies[shard],
            )
        return super().install(sending)

    def close(self) -> None:
        super().close()
        self.spare.close()

    def _sync_spare(self, shard: int, request: tf.Tensor) -> None:
        """A broken request to a shard, and the shard's reply, broken, to a cache."""
        reply = ops.table_sync(self.spare.tables[shard], request)
        probe = self.spare.lookup(0, tuple(range(5)))
        for each in self.spare.shards_with_requests(probe):
            self.spare.deliver(probe, each)
            replies = list(probe.replies)
            for broken in (reply, self._broken(probe.replies[each])):
                replies[each] = broken
                if not self._refuses(
                    lambda replies=replies: ops.cache_install(probe.cache, probe.ticket, replies)
                ):
                    break
        self.spare.drop(probe)

    def _broken(self, message: tf.Tensor) -> tf.Tensor:
        copy = message.numpy().copy()
        for _ in range(self.chance.randint(1, 4)):
            at = self.chance.randrange(8, len(copy)) if len(copy) > 8 else 0
            copy[at] = self.chance.choice([0, 1, 127, 128, 255, self.chance.randrange(256)])
        return tf.constant(copy[: self.chance.choice([len(copy)] * 4 + [len(copy) // 2])])

    def _refuses(self, call) -> bool:
        try:
            call()
        except REFUSED:
            self.counts["refused"] += 1
            return True
        self.counts["accepted"] += 1
        return False

    def _must_refuse(self, call, message: tf.Tensor) -> None:
        """What another shard refused for its bytes, or a cache must for its length."""
        before = self.table()
        try:
            call()
        except REFUSED:
            self.counts["refused"] += 1
        else:
            raise AssertionError(f"accepted: {message.numpy().tolist()}")
        after = self.table()
        assert before.keys() == after.keys(), f"half applied: {message.numpy().tolist()}"
        for key, row in before.items():
            for was, now in zip(row, after[key], strict=True):
                assert np.array_equal(was, now), f"half applied: {message.numpy().tolist()}"


def play(schedule: Schedule, system: OpsSystem) -> None:
    setup, events = schedule
    with contextlib.closing(system):
        ledger = Ledger(setup, system)
        ledger.play(events)
        ledger.finish()


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags, not {argv[1:]}")
    seed = random.SystemRandom().randrange(2**32) if _SEED.value is None else _SEED.value
    print(f"seed {seed}", flush=True)
    start, counts = time.monotonic(), collections.Counter()
    for round_ in range(2**32 - seed):
        drawing = random.Random(seed + round_)
        policy = drawing.choice(["lru", "lfu"])
        for number in range(10):
            with steps_of(10 * (seed + round_) + number, spares=True) as steps:
                steps.play()
            counts.update(steps.counts)
        for _ in range(50):
            keeps = drawing.random() < 0.3
            clock = drawing.choice(list(BOUNDS))
            schedule = draw(drawing, clock=clock, max_events=60, keeps=keeps)
            for mutate in (False, True):
                chance = random.Random(repr(schedule))
                options = {"policy": policy}
                if mutate:
                    system = Mutating(schedule[0], chance, counts, **options)
                else:
                    system = OpsSystem(schedule[0], **options)
                try:
                    play(schedule, system)
                except BaseException:
                    print(f"seed {seed}, round {round_}, {policy=}, {mutate=}\n{schedule!r}")
                    raise
            counts["schedules"] += 1
            counts["events"] += len(schedule[1])
            if time.monotonic() - start > 60 * _MINUTES.value:
                print(f"0 violations: {dict(counts)}", flush=True)
                return


if __name__ == "__main__":
    app.run(main)
