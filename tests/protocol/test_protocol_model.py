"""The protocol model keeps the rules of docs/protocol.md, and the tests notice when it does not."""

import dataclasses

import built_in_faults as faults
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ledger import Ledger, run
from model_system import ModelSystem
from named_schedules import EXAMPLES
from protocol_model import Cache, Shard
from schedules import SAVES, Fault, Setup, schedules

repeatable = settings(derandomize=True, deadline=None, database=None, max_examples=120)

BOUNDS = {"count": (0, 1, 2, 3, 5, None), "drift": (0, 0.5, 1.0, 2.5, 5.0, None)}
BOUNDS["lamport"] = BOUNDS["count"]


# Whatever the schedule, the bounds, the shards, the policy and the faults.


@repeatable
@given(schedules())
def test_count_clock_loses_doubles_and_misses_nothing(schedule):
    run(schedule, ModelSystem(schedule[0]))


@repeatable
@given(schedules(clock="lamport"))
def test_lamport_clock_keeps_lemma_1(schedule):
    run(schedule, ModelSystem(schedule[0]))


@repeatable
@given(schedules(clock="drift", bounds=BOUNDS["drift"]))
def test_drift_clock_keeps_distances(schedule):
    run(schedule, ModelSystem(schedule[0]))


@pytest.mark.parametrize("clock", BOUNDS)
@repeatable
@given(data=st.data())
def test_a_table_that_is_restored_is_what_was_saved(clock, data):
    schedule = data.draw(schedules(bounds=BOUNDS[clock], clock=clock, kinds=SAVES))
    run(schedule, ModelSystem(schedule[0]))


@settings(repeatable, max_examples=5)
@pytest.mark.parametrize("clock", BOUNDS)
@pytest.mark.parametrize("workers", [8, 24])
@given(data=st.data())
def test_many_workers(workers, clock, data):
    schedule = data.draw(schedules((workers,), BOUNDS[clock], clock=clock, max_events=20))
    run(schedule, ModelSystem(schedule[0]))


@pytest.mark.parametrize("clock", BOUNDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name, clock):
    setup, events = EXAMPLES[name]
    schedule = dataclasses.replace(setup, clock=clock), events
    run(schedule, ModelSystem(schedule[0], admitted=1.0))


@settings(repeatable, max_examples=60)
@given(schedules(bounds=(0,), loss=False, kinds=("evict", "crash", "restart")))
def test_staleness_0_shows_every_update_to_the_next_lookup(schedule):
    """Where no message is lost and no step overlaps with another one's write-through."""
    setup, events = schedule

    class Current(Ledger):
        def was_read(self, step, rows):
            super().was_read(step, rows)
            if len(self.open[step.worker]) > 1 or any(self.restarts):
                return  # it may have been looked up before another one updated
            for key, row in zip(step.keys, rows, strict=True):
                for life in self.life.values():
                    assert row[life.column] == len(life.made[key])

    ledger = Current(setup, ModelSystem(setup))
    ledger.play([each for each in events if not isinstance(each, Fault) or each.kind != "crash"])
    ledger.finish()


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


@pytest.fixture(scope="module")
def drawn():
    made = []

    @settings(
        repeatable,
        max_examples=300,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(list(BOUNDS)).flatmap(
            lambda clock: schedules(workers=(1, 2), bounds=(0, 1, 2, 3), clock=clock)
        )
    )
    def draw(schedule):
        made.append(schedule)

    draw()
    return made


@pytest.mark.parametrize("fault", OFTEN)
def test_random_schedules_find(fault, drawn):
    assert any(breaks(schedule, fault) for schedule in drawn)


@pytest.mark.parametrize("fault", RARE)
def test_an_example_finds(fault):
    assert breaks(EXAMPLES[RARE[fault]], fault, admitted=1.0)
