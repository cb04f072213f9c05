"""The protocol model keeps the rules of docs/protocol.md, and the tests notice when it does not."""

import dataclasses

import built_in_faults as faults
import numpy as np
import pytest
from ledger import Ledger, run
from model_system import ModelSystem
from named_schedules import EXAMPLES
from protocol_model import Cache, Shard
from random_schedules import BOUNDS, SAVES, check, drawn
from schedules import Setup


def run_on_model(schedule):
    run(schedule, ModelSystem(schedule[0]))


# Whatever the schedule, the bounds, the shards, the policy and the faults. Of the built-in faults
# that random schedules find, one schedule in thirty finds the one that hides best.


@pytest.mark.parametrize("clock", BOUNDS)
def test_loses_doubles_and_misses_nothing(clock):
    for schedule in drawn(100, clock=clock):
        check(run_on_model, schedule)


@pytest.mark.parametrize("clock", BOUNDS)
def test_hot_phases_lose_and_double_nothing(clock):
    for schedule in drawn(40, clock=clock, keeps=True):
        check(run_on_model, schedule)


@pytest.mark.parametrize("clock", BOUNDS)
def test_a_table_that_is_restored_is_what_was_saved(clock):
    for schedule in drawn(30, clock=clock, kinds=SAVES):
        check(run_on_model, schedule)


@pytest.mark.exhaustive
@pytest.mark.parametrize("clock", BOUNDS)
def test_many_longer_schedules(clock):
    for schedule in drawn(160, seed=2, clock=clock, max_events=100):
        check(run_on_model, schedule)
    for schedule in drawn(80, seed=2, clock=clock, max_events=100, kinds=SAVES):
        check(run_on_model, schedule)


@pytest.mark.parametrize("clock", BOUNDS)
def test_24_workers(clock):
    for schedule in drawn(1, clock=clock, workers=(24,)):
        check(run_on_model, schedule)


@pytest.mark.parametrize("clock", BOUNDS)
def test_examples(clock):
    for setup, events in EXAMPLES.values():
        setup = dataclasses.replace(setup, clock=clock)
        run((setup, events), ModelSystem(setup, admitted=1.0))


def test_staleness_0_shows_every_update_to_the_next_lookup():
    """Where no message is lost and no step overlaps with another one's write-through."""

    class Current(Ledger):
        def was_read(self, step, rows):
            super().was_read(step, rows)
            if len(self.open[step.worker]) > 1 or any(self.restarts):
                return  # it may have been looked up before another one updated
            for key, row in zip(step.keys, rows, strict=True):
                for life in self.life.values():
                    assert row[life.column] == len(life.made[key])

    def play(schedule):
        setup, events = schedule
        ledger = Current(setup, ModelSystem(setup))
        ledger.play(events)
        ledger.finish()

    for schedule in drawn(30, bounds=(0,), loss=False, kinds=("evict", "restart")):
        check(play, schedule)


@pytest.mark.parametrize("clock", BOUNDS)
def test_updating_a_key_200_times_in_a_batch_is_one_update(clock):
    setup = Setup(1, 3, capacity=1, read_bound=5, write_bound=5, clock=clock)
    system = ModelSystem(setup)
    ledger = Ledger(setup, system)
    ledger.step(0, (7,) * 200, gradient=0)
    ledger.install(ledger.flush(0))
    assert system.table()[7][2] * (system.unit if clock == "drift" else 1) == 1


# The bounds are reached, so nothing tighter holds.


def test_a_read_can_miss_read_bound_and_write_bound_of_every_other_worker():
    setup = Setup(3, 1, capacity=9, read_bound=2, write_bound=3)
    system = ModelSystem(setup, admitted=1.0)
    ledger = Ledger(setup, system)
    ledger.step(0, (0,))
    for worker, times in ((1, 2), (1, -1), (1, 3), (2, 3)):
        if times < 0:
            ledger.install(ledger.flush(worker))
        for _ in range(times):
            ledger.step(worker, (0,))
    assert read_of(ledger, 0)[1:3].sum() == 0
    assert sum(len(ledger.life[worker].made[0]) for worker in (1, 2)) == 2 + (3 - 1) * 3


def test_updates_beyond_one_per_lookup_add_to_the_write_bound():
    """A layer called twice in a step: what is due is not sent between its two updates."""
    setup = Setup(2, 1, capacity=9, read_bound=0, write_bound=1)
    ledger = Ledger(setup, ModelSystem(setup, admitted=1.0))
    calls = [ledger.lookup(0, (0,)) for _ in range(2)]
    for call in calls:
        ledger.update(call)
    assert read_of(ledger, 1)[0] == 0  # two missed, not one


def read_of(ledger: Ledger, worker: int, key: int = 0) -> np.ndarray:
    lookup = ledger.lookup(worker, (key,))
    ledger.install(lookup)
    return ledger.system.gather(lookup.handle)[0]


def test_lamport_clocks_reach_twice_the_staleness():
    setup = Setup(2, 1, capacity=9, read_bound=2, write_bound=2, clock="lamport")
    ledger = Ledger(setup, ModelSystem(setup, admitted=1.0))
    read_of(ledger, 0)
    for _ in range(4):
        ledger.step(1, (0,))
    read_of(ledger, 0)
    assert ledger.system.clock(1, 0) - ledger.system.clock(0, 0) == 2 * 2


def test_an_idle_workers_lamport_clock_falls_behind_without_limit():
    """Lemma 1 is about clocks as a lookup leaves them, not about lines nobody reads."""
    setup = Setup(2, 1, capacity=9, read_bound=1, write_bound=1, clock="lamport")
    ledger = Ledger(setup, ModelSystem(setup, admitted=1.0))
    read_of(ledger, 0)
    for _ in range(50):
        ledger.step(1, (0,))
    assert ledger.system.clock(1, 0) - ledger.system.clock(0, 0) == 50
    read_of(ledger, 0)
    assert ledger.system.clock(1, 0) - ledger.system.clock(0, 0) <= 2


# Cost: nothing is sent that the rules can spare.


class Counting(Shard):
    """Keeps every message."""

    def clear(self):
        super().clear()
        self.requests, self.replies = [], []

    def sync(self, request):
        self.requests.append(request)
        self.replies.append(super().sync(request))
        return self.replies[-1]


def counted(**setup) -> tuple[Ledger, list]:
    system = ModelSystem(Setup(**setup), shard=Counting, admitted=1.0)
    return Ledger(system.setup, system), system.shards


def test_own_pushes_bring_no_row_back_and_reading_creates_none():
    ledger, shards = counted(num_workers=1, num_shards=2, capacity=9, read_bound=0, write_bound=0)
    for _ in range(10):
        ledger.step(0, (0,))
    assert sum(len(reply.rows) for shard in shards for reply in shard.replies) == 0
    messages = [len(shard.requests) for shard in shards]
    assert messages == [20, 0]  # a check and a write-through each, none to the other shard
    ledger.install(ledger.lookup(0, tuple(range(1, 1000))))
    assert ledger.system.table().keys() == {0}


def test_a_push_goes_out_once_though_steps_overlap():
    ledger, (shard,) = counted(num_workers=1, num_shards=1, capacity=9, read_bound=0, write_bound=1)
    ahead = ledger.lookup(0, (0, 1))
    for _ in range(20):  # each step is looked up before the one before it updates
        ahead, now = ledger.lookup(0, (0, 1)), ahead
        ledger.update(now)
    sequences = [push.sequence for request in shard.requests for push in request.pushes]
    assert sequences == list(range(1, len(sequences) + 1))
    assert len(sequences) > 15


def test_a_key_that_is_not_admitted_moves_values_and_gradients_only():
    setup = Setup(1, 1, capacity=9, read_bound=5, write_bound=5, slots=True)
    system = ModelSystem(setup, shard=Counting, admitted=0.0)
    ledger = Ledger(setup, system)
    for _ in range(5):
        ledger.step(0, (0, 1))
    (shard,) = system.shards
    rows = [row for reply in shard.replies for row, _ in reply.rows.values()]
    assert len(rows) == 2 * 4
    assert all(row.slots is None for row in rows)
    sent = [each for request in shard.requests for p in request.pushes for each in p.rows.values()]
    assert [(len(each.gradients), each.contribution) for each in sent] == [(1, None)] * 2 * 4


# Each fault that is built in must be found.

RARE = {  # by which example, where it takes too much luck
    faults.ForgetsPushesOnceAcknowledged: "push_is_acknowledged_before_an_older_reply_comes",
    faults.TakesOlderRows: "reply_is_older_than_the_row",
    faults.WaitsForWhatDoesNotCome: "step_never_ends_and_has_the_push",
    faults.AsksForValuesOnlyOfWhatAStepHolds: "steps_overlap_without_a_cache",
    faults.AnswersWithValuesOnlyThoughPushesAreMissing: "value_is_answered_before_a_push",
    faults.TakesEveryReplyForNews: "first_contact_overlaps_a_clear",
    faults.ForgetsPushesWhenARowComes: "flush_overtakes_a_reply",
    faults.MovesBasesTwice: "others_push_after_own",
    faults.SendsWhatItWatchesOnce: "row_comes_unasked_to_the_step_before",
    faults.WatchesFromBasesThatCountPushesUnderWay: "check_counts_on_a_push_under_way",
    faults.BelievesAnswersThatWereOvertaken: "row_overtakes_the_answer_to_a_check",
    faults.ForgetsAWatchThatOpenStepsCountOn: "watch_begins_anew_beside_a_step_that_counts_on_it",
    faults.ReadsWhatAShardThatRestartedDoesNotWatch: "shard_that_watched_restarts",
    faults.AsksAgainOnce: "shard_restarts_while_it_is_asked_again",
}
HOT = faults.KeepsUpdatesAfterAHotPhase, faults.ReadsUncheckedAfterAHotPhase
OFTEN = [
    each
    for each in vars(faults).values()
    if isinstance(each, type)
    and each.__module__ == faults.__name__
    and issubclass(each, Cache | Shard)
    and each not in RARE
]


def breaks(schedule, fault: type, **options) -> bool:
    part = {"shard": fault} if issubclass(fault, Shard) else {"cache": fault}
    try:
        run(schedule, ModelSystem(schedule[0], **part, **options))
    except (AssertionError, KeyError, TypeError, ValueError):
        return True
    return False


@pytest.mark.parametrize("fault", OFTEN)
def test_random_schedules_find(fault):
    keeps = fault in HOT
    by_clock = zip(*(drawn(100, clock=clock, keeps=keeps) for clock in BOUNDS), strict=True)
    assert any(breaks(each, fault) for schedules in by_clock for each in schedules)


@pytest.mark.parametrize("fault", RARE)
def test_an_example_finds(fault):
    assert breaks(EXAMPLES[RARE[fault]], fault, admitted=1.0)
