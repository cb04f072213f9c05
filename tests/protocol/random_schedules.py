"""Schedules drawn at random, and what is left of one that fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from schedules import (
    KEYS,
    MAX_OPEN,
    Deliver,
    Drop,
    Event,
    Fault,
    Flush,
    Install,
    Keep,
    Lookup,
    Schedule,
    Setup,
    Update,
)

BOUNDS = {"count": (0, 1, 2, 3, 5, None), "drift": (0, 0.5, 1.0, 2.5, 5.0, None)}
BOUNDS["lamport"] = BOUNDS["count"]
# Faults of tables that are saved and restored, among those that go with them.
SAVES = ("save", "restore", "save", "restore", "restart", "crash", "forget")


def draw(
    chance: random.Random,
    *,
    workers: Sequence[int] = (1, 2, 3, 4),
    clock: str = "count",
    bounds: Sequence[float | None] | None = None,  # default: those of the clock in BOUNDS
    kinds: Sequence[str] = ("evict", "forget", "crash", "restart"),
    loss: bool = True,
    max_events: int = 40,
    capacities: tuple[int, int] = (0, 6),
    most_keys: int = 4,
    keeps: bool = False,
) -> Schedule:
    """A schedule over few keys, so that workers meet, and tiny caches, so that rows are evicted."""
    bounds = bounds or BOUNDS[clock]
    setup = Setup(
        num_workers=chance.choice(workers),
        num_shards=chance.randint(1, 3),
        capacity=chance.randint(*capacities),
        read_bound=chance.choice(bounds),
        write_bound=chance.choice(bounds),
        clock=clock,
        slots=chance.random() < 0.5,
        seed=chance.randrange(10),
    )
    keys = chance.sample(KEYS, chance.randint(1, most_keys))

    def lookup(worker: int) -> Event:
        return Lookup(worker, tuple(chance.choices(keys, k=chance.randint(1, 6))))

    def step(worker: int) -> tuple[Event, ...]:
        return lookup(worker), Update(worker, -1, chance.randint(-3, 3))

    def deliver(worker: int, most: int) -> Event:
        shard = chance.randrange(setup.num_shards)
        return Deliver(worker, chance.randint(0, most), shard, chance.random() < 0.5)

    def update(worker: int) -> Event:
        through = not loss or chance.random() < 0.5
        return Update(worker, chance.randrange(MAX_OPEN), chance.randint(-3, 3), through)

    def fault(worker: int) -> Event:
        shard = chance.randrange(setup.num_shards)
        return Fault(chance.choice(kinds), worker, shard, chance.randrange(10))

    some: list[Callable[[int], Event | tuple[Event, ...]]] = [
        *(step, step, step, lookup, lookup, update),
        lambda worker: Install(worker, chance.randrange(MAX_OPEN)),
        lambda worker: Flush(worker, chance.random() < 0.5, chance.random() < 0.5),
    ]
    if loss:
        some += [
            lambda worker: deliver(worker, 9),
            lambda worker: deliver(worker, 2),
            lambda worker: Drop(worker, chance.randrange(MAX_OPEN)),
        ]
    if keeps:
        some.append(lambda worker: Keep(worker, chance.random() < 0.6))
    if kinds:
        some.append(fault)
    events: list[Event] = []
    for _ in range(chance.randint(0, max_events)):
        made = chance.choice(some)(chance.randrange(setup.num_workers))
        events += made if isinstance(made, tuple) else (made,)
    return setup, tuple(events)


def drawn(number: int, seed: int = 1, **options) -> Iterator[Schedule]:
    """So many schedules, the same for the same seed and options of `draw`."""
    chance = random.Random(seed)
    return (draw(chance, **options) for _ in range(number))


def check(play: Callable[[Schedule], object], schedule: Schedule) -> None:
    """Plays a schedule. Of one that fails, prints a part that does, and plays that."""
    try:
        play(schedule)
    except Exception:
        part = shortest(play, schedule)
        print(f"fails: {part!r}")
        play(part)
        raise


def shortest(play: Callable[[Schedule], object], schedule: Schedule) -> Schedule:
    """A part of a schedule that fails, which fails as well."""
    setup, events = schedule
    size = len(events) // 2
    while size:
        at = 0
        while at < len(events):
            without = events[:at] + events[at + size :]
            if _fails(play, (setup, without)):
                events = without
            else:
                at += size
        size //= 2
    return setup, events


def _fails(play: Callable[[Schedule], object], schedule: Schedule) -> bool:
    try:
        play(schedule)
    except Exception:
        return True
    return False
