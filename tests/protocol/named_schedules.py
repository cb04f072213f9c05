"""Schedules that take too much luck to be drawn, named for what happens in them.

All on one shard, with caches of five rows that take every key they are asked for, or of none.
"""

from schedules import Deliver, Drop, Event, Fault, Flush, Install, Lookup, Schedule, Setup, Update

KEY, OTHER = 1, 2


def step(worker: int, *keys: int) -> tuple[Event, ...]:
    return Lookup(worker, keys or (KEY,)), Update(worker)


def others_push(worker: int = 1) -> tuple[Event, ...]:
    return *step(worker), Flush(worker)


def schedule(*events: Event | tuple[Event, ...], **setup) -> Schedule:
    setup = {"capacity": 5, "read_bound": 0, "write_bound": 1} | setup
    flat = [one for each in events for one in (each if isinstance(each, tuple) else (each,))]
    return Setup(num_workers=2, num_shards=1, **setup), tuple(flat)


LATEST = Deliver(worker=0, nth=0, shard=0, keep=True)
RESTART = Fault("restart", shard=0)

EXAMPLES: dict[str, Schedule] = {
    "first_contact_overlaps_a_clear": schedule(
        others_push(),
        Lookup(0, (KEY,)),
        LATEST,
        RESTART,
        others_push(),
        Lookup(0, (KEY,)),
        Install(0, 1),
        Install(0, 0),  # an incarnation it never heard of, and an old one
        Update(0, 0),
        Update(0, 0),
        *step(0) * 9,
    ),
    "two_clears_with_steps_under_way": schedule(
        step(0),
        Lookup(0, (KEY,)),
        RESTART,
        Lookup(0, (KEY,)),
        LATEST,
        RESTART,
        Lookup(0, (KEY,)),
        Install(0, 2),
        Install(0, 1),
        Install(0, 0),
        Update(0, 0),
        Update(0, 0),
        Update(0, 0),
        *step(0) * 9,
    ),
    "clear_between_cut_and_arrival": schedule(
        step(0),
        others_push(),
        Lookup(0, (KEY,)),
        RESTART,
        Lookup(0, (KEY, OTHER)),
        Install(0, 1),
        step(0),
        others_push(),
        Update(0, 0),  # a request of the epoch before, a reply of the present one
        Update(0, 0),
        *step(0) * 3,
    ),
    "flush_overtakes_a_reply": schedule(
        step(0),
        others_push(),
        Lookup(0, (KEY,)),
        LATEST,  # the row as it was before the push
        Flush(0),
        Update(0, 0),
        write_bound=5,
    ),
    "push_is_acknowledged_before_an_older_reply_comes": schedule(
        step(0),
        Lookup(0, (OTHER,)),  # carries the push
        Lookup(0, (KEY,)),  # does not, but counts on it
        others_push(),
        LATEST,
        Install(0, 0),
        Update(0, 1),
    ),
    "push_of_a_new_epoch_and_a_reply_that_lacks_it": schedule(
        step(0),
        Flush(0),
        Lookup(0, (KEY,)),
        RESTART,
        Lookup(0, (KEY,)),
        Install(0, 1),  # learns of the restart; the row is not there yet
        others_push(),
        others_push(),
        Deliver(0, 1, 0, keep=True),  # answered under the new epoch, before the push
        Update(0, 1),
        Flush(0),
        Update(0, 0),
    ),
    "reply_is_older_than_the_row": schedule(
        others_push(),
        Lookup(0, (KEY,)),
        LATEST,
        others_push(),
        Lookup(0, (KEY,)),
        Install(0, 1),
        Install(0, 0),
        Update(0, 1),
    ),
    "step_never_ends_and_has_the_push": schedule(
        step(0),
        Lookup(0, (OTHER,)),
        *step(0) * 9,
    ),
    "message_fails_and_arrives_late": schedule(
        step(0),
        Lookup(0, (KEY,)),
        Drop(0, 0),
        Lookup(0, (KEY,)),
        Deliver(0, 1, 0, keep=False),
        Update(0, 0),
        Deliver(0, 1, 0, keep=False),
        Deliver(0, 0, 0, keep=False),
        step(0),
    ),
    "steps_overlap_without_a_cache": schedule(
        step(0, OTHER),  # the first answer ever is in full, and so are
        Flush(0),  # answers while a push is under way
        others_push(),
        Lookup(0, (KEY,)),
        Lookup(0, (KEY,)),
        Install(0, 1),
        Update(0, 0),
        Update(0, 0),
        *step(0) * 2,
        capacity=0,
        slots=True,
    ),
    "value_is_answered_before_a_push": schedule(
        others_push(),
        step(0),
        Lookup(0, (OTHER,)),
        Lookup(0, (KEY,)),
        LATEST,
        Update(0, 1),
        Update(0, 0),
        capacity=0,
        write_bound=5,
        slots=True,
    ),
    "others_push_after_own": schedule(*step(0) * 2, others_push(), *step(0) * 2),
    "session_is_forgotten_with_a_push_under_way": schedule(
        step(0),
        Lookup(0, (KEY,)),
        Fault("forget", worker=0, shard=0),
        Update(0, 0),
        Deliver(0, 0, 0, keep=False),
        *step(0) * 3,
        Deliver(0, 3, 0, keep=False),
    ),
    # The row is watched after two steps; then hits are not checked until it is beyond the bound.
    "row_comes_unasked_to_the_step_before": schedule(
        *step(0) * 3,
        *others_push() * 3,
        Lookup(0, (KEY,)),
        Lookup(0, (KEY,)),
        Deliver(0, 1, 0, keep=True),  # has the row
        Install(0, 1),
        Update(0, 1),
        Update(0, 0),
        read_bound=1,
    ),
    "check_counts_on_a_push_under_way": schedule(
        step(0),
        Lookup(0, (OTHER,)),  # carries the push
        Lookup(0, (KEY,)),
        LATEST,  # the row is not there yet
        Install(0, 1),
        Drop(0, 1),
        Install(0, 0),
        Drop(0, 0),
        *others_push() * 2,
        step(0),
        read_bound=1,
    ),
    "row_overtakes_the_answer_to_a_check": schedule(
        step(0),
        Flush(0),
        Lookup(0, (KEY,)),
        LATEST,  # watched from here
        *others_push() * 2,
        Lookup(0, (KEY,)),
        LATEST,  # to here
        Install(0, 1),
        Install(0, 0),
        Drop(0, 0),
        Drop(0, 0),
        *others_push() * 2,
        *step(0) * 2,
        read_bound=1,
    ),
    "watch_begins_anew_beside_a_step_that_counts_on_it": schedule(
        *step(0) * 3,
        *others_push() * 2,
        Lookup(0, (KEY,)),
        Lookup(0, (OTHER,)),
        Drop(0, 1),
        Lookup(0, (OTHER,)),
        LATEST,
        Install(0, 0),
        Update(0, 0),
        read_bound=1,
    ),
    "shard_that_watched_restarts": schedule(
        *step(0) * 3,
        *others_push(),
        RESTART,
        step(0),
        read_bound=1,
    ),
    # A step asks again, but not for the row that another one has brought.
    "shard_restarts_while_it_is_asked_again": schedule(
        *step(0) * 3,
        *step(0, OTHER) * 3,
        RESTART,
        *others_push() * 3,
        Lookup(0, (KEY,)),
        Lookup(0, (KEY, OTHER)),
        Install(0, 0),
        Install(0, 0),
        Install(0, 1),
        RESTART,
        Update(0, 1),
        Update(0, 0),
        read_bound=1,
    ),
    # What was read then is of rows that are no more, and so is its clock.
    "shard_restarts_while_a_step_is_open": schedule(
        *step(0, KEY, OTHER),
        Lookup(0, (KEY, 3, OTHER, 4)),
        Install(0, 0),
        RESTART,
        *step(0, 3),
        Update(0, 0),
        capacity=1,
        write_bound=2,
        slots=True,
    ),
}
