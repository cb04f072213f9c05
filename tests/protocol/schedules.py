"""Schedules of workers, shards and faults, and what carries them out.

A schedule is a `Setup` and a list of events. A `Player` carries it out on anything that has the
methods of `System`: the model here, the real ops elsewhere. Steps of one worker overlap, and the
schedule says when each of their messages arrives, how often, and whether its reply does. Schedules
are drawn in random_schedules.py; what must hold is in ledger.py.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

# Keys that float32, int32, float64 or a sign bit would fold together.
KEYS = (0, 1, 2, 3, -1, 2**24, 2**24 + 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63))
SPARE_LIVES = 3  # so many crashes in a schedule: each life of a worker has a column of its own
MAX_OPEN = 5  # steps of a worker at once


class System(Protocol):
    """A table on several shards and one cache per worker, all in one address space or not.

    A step is whatever `lookup` or `flush` returned. Nothing is sent but by `deliver`.
    """

    supports: Collection[str]  # of "evict", "forget", "crash", "restart", "save", "restore"

    def lookup(self, worker: int, keys: Sequence[int]) -> Any: ...
    def flush(self, worker: int, everything: bool = True) -> Any: ...

    def shards_with_requests(self, step: Any) -> Collection[int]:
        """Those that the step has a request for."""

    def num_pushes(self, step: Any, shard: int) -> int | None:
        """How many pushes the request carries; None where the system cannot tell."""

    def deliver(self, step: Any, shard: int, keep: bool = True) -> None:
        """A copy of the request arrives, now. The reply is lost, or kept until it is installed."""

    def install(self, step: Any) -> bool:
        """Takes the last replies that were kept, one for each request. True: the step lacks rows of
        a shard that has restarted, and has requests for them, to be delivered and installed."""

    def gather(self, step: Any) -> np.ndarray: ...  # [len(keys), dim]
    def update(self, step: Any, gradients: np.ndarray) -> None: ...  # the step's end

    def drop(self, step: Any) -> None:
        """The step fails or has no update. A flush ends so as well."""

    def table(self) -> Mapping[int, tuple[np.ndarray, np.ndarray, int]]:
        """Every row on the shards, (value, slots, clock) by key; caches are not asked."""

    def shard_of(self, key: int) -> int: ...

    def clock(self, worker: int, key: int) -> int | None:
        """The paper's clock of a row the worker holds, None where it holds none or cannot tell."""

    def keep(self, worker: int, keeps: bool) -> None:
        """From now on, or no longer, the worker trains what it has without messages."""

    def evict(self, worker: int, nth: int) -> None:
        """One of the worker's lines that no step holds leaves."""

    def crash(self, worker: int) -> None:
        """The worker is killed and a new one, with an empty cache, takes its place."""

    def restart(self, shard: int) -> None:
        """The shard comes back empty (create, clear and restore look alike to a cache)."""

    def forget(self, worker: int, shard: int) -> None:
        """The shard forgets the worker's session, as after a day of silence."""

    def save(self) -> None:
        """The table as it is now is saved, though it be written later."""

    def restore(self) -> None:
        """All shards start again, with what was saved last."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the system is made of. A bound of None is unbounded; those of "drift" are lengths."""

    num_workers: int
    num_shards: int
    capacity: int  # 0: no cache
    read_bound: float | None
    write_bound: float | None
    clock: str = "count"
    slots: bool = False  # an optimizer with slots, though it does what SGD does
    seed: int = 0  # of what the caches' policy decides in the model

    @property
    def dim(self) -> int:
        return self.num_workers + SPARE_LIVES + 1


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A step begins: its requests are cut."""

    worker: int
    keys: tuple[int, ...]  # may repeat


@dataclasses.dataclass(frozen=True)
class Flush:
    """A flush begins; `wait`: and ends."""

    worker: int
    everything: bool = True
    wait: bool = True


@dataclasses.dataclass(frozen=True)
class Deliver:
    """A request arrives that the worker sent at some time: for the first time or again, in its
    turn or not, of a step that is open or over or of a worker that is no more."""

    worker: int
    nth: int  # from the last step's
    shard: int
    keep: bool


@dataclasses.dataclass(frozen=True)
class Install:
    """The nth open step gets its replies; what has not been delivered is. Then it may ask again."""

    worker: int
    nth: int


@dataclasses.dataclass(frozen=True)
class Update:
    """The nth open step gathers and updates, after what Install is still to come.

    `through`: with a write bound of 0, whether what it pushes arrives at once.
    """

    worker: int
    nth: int = -1
    gradient: int = 1
    through: bool = True


@dataclasses.dataclass(frozen=True)
class Drop:
    worker: int
    nth: int


@dataclasses.dataclass(frozen=True)
class Keep:
    """A hot phase begins or ends. It also ends at a flush of everything."""

    worker: int
    keeps: bool


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str  # a member of System.supports
    worker: int = 0
    shard: int = 0
    nth: int = 0


Event = Lookup | Flush | Deliver | Install | Update | Drop | Keep | Fault
Schedule = tuple[Setup, tuple[Event, ...]]


@dataclasses.dataclass(eq=False)
class Begun:
    """A step, as the player knows it."""

    worker: int
    keys: tuple[int, ...]  # none: a flush
    handle: Any
    shards: frozenset[int]
    everything: bool = False  # of a flush
    replied: set[int] = dataclasses.field(default_factory=set)
    installed: bool = False


class Player:
    """Carries schedules out. What happens is told to the methods that a subclass overrides."""

    def __init__(self, setup: Setup, system: System):
        self.setup, self.system = setup, system
        self.open: list[list[Begun]] = [[] for _ in range(setup.num_workers)]
        self.sent: list[list[Begun]] = [[] for _ in range(setup.num_workers)]  # open or over
        self.shard_of: dict[int, int] = {}
        self.keeps = [False] * setup.num_workers
        self.num_crashes = 0
        self.is_saved = False

    # To be overridden.

    def has_begun(self, step: Begun) -> None: ...
    def was_delivered(self, step: Begun, shard: int, keep: bool) -> None: ...
    def was_installed(self, step: Begun) -> None: ...
    def has_asked_again(self, step: Begun) -> None: ...
    def was_flushed(self, step: Begun) -> None: ...
    def was_read(self, step: Begun, rows: np.ndarray) -> None: ...
    def has_crashed(self, worker: int) -> None: ...
    def has_restarted(self, shard: int) -> None: ...
    def has_forgotten(self, worker: int, shard: int) -> None: ...
    def was_saved(self) -> None: ...
    def was_restored(self) -> None: ...

    def gradients(self, step: Begun, gradient: int) -> np.ndarray:
        """Those of the update that comes now, for each of the step's keys."""
        raise NotImplementedError

    # Events.

    def play(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Lookup(worker, keys) if len(self.open[worker]) < MAX_OPEN:
                    self.lookup(worker, keys)
                case Flush(worker, everything, wait) if len(self.open[worker]) < MAX_OPEN:
                    step = self.flush(worker, everything)
                    if wait:
                        self.install(step)
                case Deliver(worker, nth, shard, keep) if self.sent[worker]:
                    step = self.sent[worker][-1 - nth % len(self.sent[worker])]
                    if step.shards:
                        self.deliver(step, sorted(step.shards)[shard % len(step.shards)], keep)
                case Install(worker, nth) if step := self._nth(worker, nth):
                    self.install(step)
                case Update(worker, nth, gradient, through) if step := self._nth(worker, nth):
                    self.update(step, gradient, through)
                case Drop(worker, nth) if step := self._nth(worker, nth):
                    self.drop(step)
                case Keep(worker, keeps):
                    self.keeps[worker] = keeps
                    self.system.keep(worker, keeps)
                case Fault() if event.kind in self.system.supports:
                    self.fault(event)

    def lookup(self, worker: int, keys: tuple[int, ...]) -> Begun:
        for key in keys:
            if key not in self.shard_of:
                self.shard_of[key] = self.system.shard_of(key)
        return self._begin(worker, keys, self.system.lookup(worker, keys))

    def flush(self, worker: int, everything: bool = True) -> Begun:
        handle = self.system.flush(worker, everything)
        self.keeps[worker] &= not everything
        return self._begin(worker, (), handle, everything)

    def deliver(self, step: Begun, shard: int, keep: bool = True) -> None:
        keep = keep and step in self.open[step.worker] and not step.installed
        self.system.deliver(step.handle, shard, keep)
        if keep:
            step.replied.add(shard)
        self.was_delivered(step, shard, keep)

    def install(self, step: Begun) -> None:
        if step.installed:
            return
        for shard in sorted(step.shards - step.replied):
            self.deliver(step, shard)
        incomplete = self.system.install(step.handle)
        step.installed = not incomplete
        self.was_installed(step)
        if incomplete:
            step.shards = frozenset(self.system.shards_with_requests(step.handle))
            step.replied.clear()
            self.has_asked_again(step)
        elif not step.keys:
            self.drop(step)
            if step.everything:
                self.was_flushed(step)

    def update(self, step: Begun, gradient: int = 1, through: bool = True) -> None:
        while not step.installed:
            self.install(step)
        if not step.keys:
            return
        self.was_read(step, self.system.gather(step.handle))
        self.system.update(step.handle, self.gradients(step, gradient))
        self.open[step.worker].remove(step)
        if self.setup.write_bound == 0:
            push = self.flush(step.worker, everything=False)
            if through:
                self.install(push)

    def drop(self, step: Begun) -> None:
        self.open[step.worker].remove(step)
        self.system.drop(step.handle)

    def step(self, worker: int, keys: tuple[int, ...], gradient: int = 1) -> None:
        """A step with nothing in its way."""
        self.update(self.lookup(worker, keys), gradient)

    def fault(self, event: Fault) -> None:
        match event.kind:
            case "evict":
                self.system.evict(event.worker, event.nth)
            case "crash" if self.num_crashes < SPARE_LIVES:
                self.num_crashes += 1
                self.open[event.worker].clear()
                self.keeps[event.worker] = False
                self.system.crash(event.worker)
                self.has_crashed(event.worker)
            case "restart":
                self.system.restart(event.shard)
                self.has_restarted(event.shard)
            case "forget":
                self.system.forget(event.worker, event.shard)
                self.has_forgotten(event.worker, event.shard)
            case "save":
                self.system.save()
                self.is_saved = True
                self.was_saved()
            case "restore" if self.is_saved:
                self.system.restore()
                self.was_restored()

    def _begin(self, worker: int, keys: tuple[int, ...], handle: Any, everything=False) -> Begun:
        shards = frozenset(self.system.shards_with_requests(handle))
        step = Begun(worker, keys, handle, shards, everything)
        self.open[worker].append(step)
        if shards:
            self.sent[worker].append(step)
        self.has_begun(step)
        return step

    def _nth(self, worker: int, nth: int) -> Begun | None:
        steps = self.open[worker]
        return steps[nth % len(steps)] if steps else None
