"""docs/protocol.md, 1 to 3, in plain Python, one cache per worker over several shards.

The C++ is tested against this, so it is written to be read beside the design: no TensorFlow, no
concurrency, every rule once. A step is four calls, `lookup`, `install`, `gather` and `update`; what
happens between them, to this cache or to others, is up to the caller. `clock="lamport"` is the
rule of HET (VLDB 2022, arXiv 2112.07221).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from optimizer_model import Array, Contribution, Optimizer, Row
from watch_model import Watch, Watching

ABSENT = -1  # the base of a key that a cache holds no row of
Epoch = tuple[int, int] | None  # (incarnation of a shard, session of a cache there); None: unknown

_unique = itertools.count(1)  # ids; the real ones are random 64-bit numbers


@dataclasses.dataclass(frozen=True)
class Config:
    """What a table and all its caches agree on. A bound of None is unbounded."""

    optimizer: Optimizer
    init: Callable[[int], Array]  # key -> value [d]: pure, so anybody may compute it
    read_bound: int | None = 0
    write_bound: int | None = 0
    clock: str = "count"  # or "lamport" or "drift"
    unit: float = 2.0**-20  # of "drift", and of its bounds: a length
    capacity: int = 1 << 30  # of a cache, in rows
    num_shards: int = 1

    def new_row(self, key: int) -> Row:
        value = self.init(key)
        return Row(value, self.optimizer.initial_slots(len(value)))

    @property
    def watches(self) -> bool:
        """Whether hits may go without a check."""
        return (self.read_bound or 0) >= 1 and self.clock != "lamport" and self.capacity > 0

    def shard_of(self, key: int) -> int:
        return key % self.num_shards

    def units(self, before: Row, after: Row) -> int:
        """How far the clock goes for an update, or at least for what a merge did."""
        if self.clock != "drift":
            return 1
        return max(1, math.ceil(np.linalg.norm(after.value - before.value) / self.unit))


@dataclasses.dataclass(frozen=True)
class Sent:
    """Updates of a row on their way: their gradients and rates, or what they add together."""

    gradients: tuple[tuple[Array, float], ...]
    contribution: Contribution | None  # None: as gradients
    units: int  # count, lamport: how many updates
    clock: int  # of the cache's row with these updates; only lamport uses it

    def onto(self, row: Row, optimizer: Optimizer) -> Row:
        if self.contribution:
            return optimizer.merge(row, self.contribution)
        for gradient, rate in self.gradients:
            row = optimizer.update(row, gradient, rate)
        return row


@dataclasses.dataclass(frozen=True)
class Closure:
    """Steps that count once, however often they are run: what they push goes at their end."""

    number: int
    done: int  # nothing up to this number will be run again


@dataclasses.dataclass(frozen=True)
class Push:
    sequence: int
    rows: dict[int, Sent]
    closure: Closure | None = None
    carriers: set[int] = dataclasses.field(default_factory=set)  # open steps; empty: not under way


@dataclasses.dataclass(frozen=True)
class Request:
    cache: int
    epoch: Epoch  # that it was cut under
    cut: int  # the last sequence cut before it; `checks` count on these pushes
    pushes: tuple[Push, ...]
    checks: dict[int, int]  # key -> base or ABSENT
    bare: frozenset[int]  # absent keys whose value is enough
    watch: int = 0  # the epoch whose rows are not checked; 0: none
    seen: int = 0  # replies of it that were taken, all up to this number


@dataclasses.dataclass(frozen=True)
class Reply:
    epoch: Epoch
    acknowledged: int  # the last sequence merged; the rows contain these pushes and no later ones
    rows: dict[int, tuple[Row, int]]  # key -> row, clock
    counted: bool = False  # what was pushed was not merged: its closure was, from another run
    number: int | None = None  # of the watch
    watched: frozenset[int] = frozenset()  # checks that need not be made again
    unasked: dict[int, tuple[Row, int]] = dataclasses.field(default_factory=dict)


class Shard:
    """One part of the table: `sync` is all a cache can ask of it."""

    def __init__(self, config: Config):
        self.config = config
        self.clear()

    def clear(self) -> None:
        """Forgets every row, as creating the shard anew would."""
        self.rows: dict[int, tuple[Row, int]] = {}
        self.incarnation = next(_unique)
        # cache -> [session, last sequence merged, the last that another run had counted]
        self.sessions: dict[int, list[int]] = {}
        self.watches: dict[int, Watch] = {}
        self.closures: set[int] = set()  # merged, after self.done
        self.done = 0
        self.log: list[int] = []  # keys of rows that were changed

    def save(self) -> Any:
        """For `restore`."""
        return dict(self.rows)

    def restore(self, saved: Any) -> None:
        """Begins anew with what was saved."""
        self.clear()
        self.rows |= saved

    def forget(self, cache: int) -> None:
        """What happens to a session that was silent for long."""
        self.sessions.pop(cache, None)
        self.watches.pop(cache, None)

    def sync(self, request: Request) -> Reply:
        session = self.sessions.setdefault(request.cache, [next(_unique), 0, 0])
        epoch = self.incarnation, session[0]
        known = request.epoch == epoch
        counted = False
        if known:
            for push in request.pushes:
                if push.sequence == session[1] + 1:  # neither a repeat nor one that skips
                    session[1] += 1
                    if push.closure and not self.is_first(push.closure):
                        session[2] = push.sequence
                        continue
                    for key, sent in push.rows.items():
                        self.merge(key, sent)
                        self.watch_of(request).push(key, sent.units)
            counted = any(push.sequence == session[2] for push in request.pushes)
        # A base that counts pushes which are not there says nothing, nor does one of another epoch.
        behind = not known or session[1] < request.cut
        rows = {}
        for key, base in request.checks.items():
            found = self.beyond(key, base) if known and base != ABSENT else None
            if behind or base == ABSENT:
                found = self.rows.get(key, found)
            if found:
                bare = key in request.bare and not behind
                rows[key] = (Row(found[0].value, None) if bare else found[0]), found[1]
        if self.config.clock == "lamport":  # the paper evicts what it pushes, and fetches it again
            pushed = [key for push in request.pushes for key in push.rows]
            rows |= {key: self.rows[key] for key in pushed if key in self.rows and key not in rows}
        reply = Reply(epoch, session[1], rows, counted)
        return self.with_watched(request, reply, behind) if known and request.watch else reply

    def with_watched(self, request: Request, reply: Reply, behind: bool) -> Reply:
        """Adds rows that are watched and beyond the bound; begins to watch what is not."""
        watch = self.watch_of(request)
        number = watch.begin_reply(request.watch, request.seen)
        if number is None:
            return reply
        for key in reply.rows:
            watch.send(key)
        # Where rows go, the clock of those that are not there does, too; that changes no row.
        for key in self.log[watch.place :]:
            if key in watch.rows and self.beyond(key, watch.rows[key].base):
                watch.send(key)
        watch.place = len(self.log)
        unasked = watch.sent.keys() - reply.rows.keys()
        unasked = {key: self.present(key, watch.sent[key].base) for key in unasked}
        fresh = set() if behind else request.checks.keys() - reply.rows.keys() - request.bare
        fresh = frozenset(key for key in fresh if request.checks[key] != ABSENT)
        for key in fresh:
            watch.begin(key, request.checks[key])
            unasked.pop(key, None)
        return dataclasses.replace(reply, number=number, watched=fresh, unasked=unasked)

    def watch_of(self, request: Request) -> Watch:
        return self.watches.setdefault(request.cache, Watch())

    def is_first(self, closure: Closure) -> bool:
        """Whether no run of the closure was merged here; one is from now on."""
        self.done = max(self.done, closure.done)
        self.closures = {number for number in self.closures if number > self.done}
        if closure.number <= self.done or closure.number in self.closures:
            return False
        self.closures.add(closure.number)
        return True

    def beyond(self, key: int, base: int) -> tuple[Row, int] | None:
        """What must go to a cache for a row that has this clock there."""
        return self.rows[key] if key in self.rows and self.is_stale(key, base) else None

    def present(self, key: int, base: int) -> tuple[Row, int]:
        return self.rows[key]

    def is_stale(self, key: int, base: int) -> bool:
        return self.rows[key][1] - base > _or_infinite(self.config.read_bound)

    def merge(self, key: int, sent: Sent) -> None:
        self.log.append(key)
        before, clock = self.rows.get(key) or (self.config.new_row(key), 0)
        after = sent.onto(before, self.config.optimizer)
        if self.config.clock == "lamport":
            clock = max(clock, sent.clock)
        else:
            clock += max(sent.units, self.config.units(before, after))
        self.rows[key] = after, clock


@dataclasses.dataclass
class Line:
    """What a cache keeps of a key. `row` includes every own update.

    A visitor has a value only: it serves the steps that hold it, and their updates leave as
    gradients. What is not admitted is dropped when no step holds it any more.
    """

    row: Row
    base: int  # the row's clock when last refreshed, moved by own pushes since
    admitted: bool


@dataclasses.dataclass
class Unsent:
    """Updates that are in no push yet."""

    gradients: list[tuple[Array, float]] = dataclasses.field(default_factory=list)
    contribution: Contribution | None = None  # None: a visitor's
    units: int = 0
    clock: int = 0  # of an evicted line's row


class Link:
    """What a cache keeps of what it and one shard owe each other."""

    def __init__(self, epoch: Epoch = None):
        self.epoch = epoch
        self.cut = 0  # sequence of the last push
        self.acknowledged = 0  # sequence of the last one known to be merged
        self.pushes: list[Push] = []
        # Requests without a reply: step -> what was acknowledged when it was cut. A reply can
        # acknowledge no less, so these pushes are in its rows.
        self.open: dict[int, int] = {}
        self.watching = Watching()

    def close(self, step: int) -> None:
        self.open.pop(step, None)
        self.watching.close(step)
        for push in self.pushes:
            push.carriers.discard(step)
        contained = min([self.acknowledged, *self.open.values()])
        self.pushes = [push for push in self.pushes if push.sequence > contained]


@dataclasses.dataclass(frozen=True)
class Step:
    """A lookup under way, or a flush: then without keys."""

    id: int
    keys: tuple[int, ...]  # may repeat
    requests: dict[int, Request]  # by shard; no message where there is nothing to say
    admitted: set[int]


class Cache:
    """One worker's cache. `admit` decides whether a key gets a line, `victim` which line leaves."""

    def __init__(
        self,
        config: Config,
        admit: Callable[[int], bool] = lambda key: True,
        victim: Callable[[Sequence[int]], int] = lambda keys: keys[0],
    ):
        self.config, self.admit, self.victim = config, admit, victim
        self.id = next(_unique)
        self.links = [Link() for _ in range(config.num_shards)]
        self.lines: dict[int, Line] = {}
        self.unsent: dict[int, Unsent] = {}
        self.due: set[int] = set()  # of the unsent: the outbox
        self.keeps = False  # updates stay here, and rows that are here are read unchecked
        self.pins: collections.Counter[int] = collections.Counter()  # keys of open steps
        self.closure: Closure | None = None  # in which steps are made: nothing is pushed
        self.ends = False  # the closure's pushes are cut
        self.lost = False  # a shard has lost what the closure has done

    # The verbs of a closure: begin, steps, commit, install, end.

    def begin(self, number: int) -> None:
        """Steps from now on belong to a closure. Those of one that did not end are undone."""
        if self.closure:
            self.start_anew()
        self.closure, self.lost = Closure(number, 0), False

    def commit(self, done: int) -> Step:
        """Cuts requests that push everything, with the closure's number; to be installed."""
        self.closure = Closure(self.closure.number, done)
        self.ends = True
        return self.push(everything=True)

    def end(self) -> bool:
        """Whether all of the closure's pushes are merged. If not, it has to be run again."""
        merged = self.ends and not self.unsent and not self.lost
        if merged := merged and all(link.acknowledged == link.cut for link in self.links):
            self.closure, self.ends = None, False
        return merged

    def start_anew(self) -> None:
        """As a cache that was just made; nobody will hear of what was not merged."""
        self.id = next(_unique)
        for shard in range(self.config.num_shards):
            self.begin_epoch(shard, None)
            self.links[shard].open.clear()
        self.closure, self.ends, self.lost = None, False, False

    def keep(self, keeps: bool) -> None:
        """Begins or ends a phase without messages for the rows that are here."""
        if self.keeps and not keeps:
            self.due |= self.unsent.keys()
        self.keeps = keeps

    # The verbs of a step.

    def lookup(self, keys: Sequence[int]) -> Step:
        """Cuts a request for every shard that has something to hear."""
        step = Step(next(_unique), tuple(keys), {}, set())
        unique = dict.fromkeys(keys)
        held = {key for key in unique if self.pins[key]}
        self.pins.update(unique.keys())
        for shard in range(self.config.num_shards):
            self.cut(shard)
            checks, bare = {}, set()
            watching = self.links[shard].watching
            watches, spared = self.config.watches and watching.counts() and not self.keeps, 0
            for key in unique:
                if self.config.shard_of(key) != shard:
                    continue
                line = self.lines.get(key)
                if self.admit(key):
                    step.admitted.add(key)
                if line and line.row.slots is not None:
                    line.admitted |= key in step.admitted
                    if watches and key in watching.rows:
                        spared += 1
                    elif self.config.read_bound is not None and not self.keeps:
                        checks[key] = self.held_clock(key)
                else:
                    checks[key] = ABSENT
                    # A value cannot take in what a step that holds the key may still update, nor
                    # what stays here until the closure ends.
                    stays = self.closure is not None and key in self.unsent
                    if key not in step.admitted and key not in held and not stays:
                        bare.add(key)
            self.request(step, shard, checks, bare, watches, spared)
        return step

    def flush(self, everything: bool = True) -> Step:
        """Cuts requests that push what is due, or everything; to be installed like a lookup's."""
        if self.closure:
            if not everything:
                return Step(next(_unique), (), {}, set())
            self.start_anew()  # nobody flushes while a closure runs: it was given up
        return self.push(everything)

    def push(self, everything: bool) -> Step:
        step = Step(next(_unique), (), {}, set())
        if everything:
            self.keeps = False
            self.due |= self.unsent.keys()
        for shard in range(self.config.num_shards):
            self.cut(shard)
            self.request(step, shard, {}, set())
        return step

    def install(self, step: Step, replies: dict[int, Reply]) -> set[int]:
        """Takes the replies to all requests of the step. ValueError: one is impossible.

        Returns the keys to ask again about: a shard that has restarted does not watch them.
        """
        for shard, reply in replies.items():
            link = self.links[shard]
            if reply.epoch == link.epoch and reply.acknowledged > link.cut:
                raise ValueError("acknowledges what was never sent")
        lacking = set()
        for shard, request in step.requests.items():
            self.take(step, shard, request, replies[shard])
            link = self.links[shard]
            link.close(step.id)
            if self.config.watches and request.epoch != replies[shard].epoch == link.epoch:
                mine = {key for key in step.keys if self.config.shard_of(key) == shard}
                lacking |= mine - request.checks.keys()
        return lacking

    def ask_again(self, step: Step, keys: set[int]) -> None:
        """Cuts requests for these rows of an installed step; to be installed like the first."""
        step.requests.clear()
        for shard in range(self.config.num_shards):
            mine = {key for key in keys if self.config.shard_of(key) == shard}
            absent = {key for key in mine if self.lines[key].row.slots is None}
            self.cut(shard)
            self.request(step, shard, dict.fromkeys(absent, ABSENT), set())

    def gather(self, step: Step) -> Array:
        """Rows [len(keys), d], with all own updates made so far."""
        return np.stack([self.lines[key].row.value for key in step.keys])

    def update(self, step: Step, gradients: Array, rate: float = 1.0) -> None:
        """One update for each key of the step, and the step's end."""
        summed: dict[int, Array] = {}
        for key, gradient in zip(step.keys, gradients, strict=True):
            summed[key] = summed[key] + gradient if key in summed else gradient
        occurrences = collections.Counter(step.keys)
        for key, gradient in summed.items():
            unsent = self.unsent.setdefault(key, Unsent())
            gradient = self.config.optimizer.cowclipped(
                self.lines[key].row.value, gradient, occurrences[key]
            )
            self.make(self.lines[key], unsent, gradient, rate)
            visitor = self.lines[key].row.slots is None
            bound = math.inf if self.keeps else _or_infinite(self.config.write_bound)
            if visitor or unsent.units >= max(1, bound):
                self.due.add(key)
        self.drop(step)

    def drop(self, step: Step) -> None:
        """The step ends, whether it got its replies or not."""
        for link in self.links:
            link.close(step.id)
        for key in dict.fromkeys(step.keys):
            self.pins[key] -= 1
            if not self.pins[key] and key in self.lines and not self.lines[key].admitted:
                self.evict(key)
        while len(self.lines) > self.config.capacity and (free := self.unpinned()):
            self.evict(self.victim(free))

    def evict(self, key: int) -> None:
        line = self.lines.pop(key)
        self.watching(key).rows.discard(key)
        if unsent := self.unsent.get(key):
            if unsent.contribution:
                optimizer = self.config.optimizer
                unsent.contribution = optimizer.settle(unsent.contribution, line.row)
            unsent.clock = line.base + unsent.units
            self.due.add(key)

    # What they are made of.

    def watching(self, key: int) -> Watching:
        return self.links[self.config.shard_of(key)].watching

    def unpinned(self) -> list[int]:
        return [key for key in self.lines if not self.pins[key]]

    def clock(self, key: int) -> int | None:
        """The paper's clock, base + pending, of a row held here."""
        line = self.lines.get(key)
        return line and line.base + (self.unsent[key].units if key in self.unsent else 0)

    def held_clock(self, key: int) -> int:
        return self.clock(key) if self.config.clock == "lamport" else self.lines[key].base

    def make(self, line: Line, unsent: Unsent, gradient: Array, rate: float) -> None:
        """One update, on the row and among the unsent."""
        unsent.gradients.append((gradient, rate))
        before, optimizer = line.row, self.config.optimizer
        if before.slots is None:
            unsent.units += 1
            return
        line.row = optimizer.update(before, gradient, rate)
        made = unsent.contribution or optimizer.nothing(before)
        unsent.contribution = optimizer.contribute(made, before, line.row, rate)
        unsent.units += self.config.units(before, line.row)

    def sent(self, key: int) -> Sent:
        """The unsent updates of a key as they travel."""
        unsent, line = self.unsent[key], self.lines.get(key)
        made = unsent.contribution
        if made and made.count <= self.config.optimizer.max_gradients:
            made = None
        if made and line:
            made = self.config.optimizer.settle(made, line.row)
        clock = line.base + unsent.units if line else unsent.clock
        return Sent(tuple(unsent.gradients), made, unsent.units, clock)

    def cut(self, shard: int) -> None:
        """Everything due becomes a push; within a closure, at its end."""
        if self.closure and not self.ends:
            return
        due = [key for key in sorted(self.due) if self.config.shard_of(key) == shard]
        if not due:
            return
        link, rows = self.links[shard], {key: self.sent(key) for key in due}
        link.cut += 1
        link.pushes.append(Push(link.cut, rows, self.closure))
        for key, sent in rows.items():
            if line := self.lines.get(key):
                line.base = self.advanced(line.base, sent)
            del self.unsent[key]
        self.due -= rows.keys()

    def advanced(self, base: int, sent: Sent) -> int:
        return max(base, sent.clock) if self.config.clock == "lamport" else base + sent.units

    def request(
        self,
        step: Step,
        shard: int,
        checks: dict[int, int],
        bare: set[int],
        watches: bool = False,
        spared: int = 0,
    ) -> None:
        """A lookup carries what is not under way, a flush all that is not acknowledged. spared:
        rows that are not checked since the shard watches them, so that it has to be heard."""
        link, flush = self.links[shard], not step.keys
        pushes = [push for push in link.pushes if push.sequence > link.acknowledged]
        pushes = tuple(push for push in pushes if flush or not push.carriers)
        if not pushes and not checks and not spared:
            return
        for push in pushes:
            push.carriers.add(step.id)
        link.open[step.id] = link.acknowledged
        watch, seen = (link.watching.epoch, link.watching.seen) if watches else (0, 0)
        if watches:
            link.watching.open.add(step.id)
        step.requests[shard] = Request(
            self.id, link.epoch, link.cut, pushes, checks, frozenset(bare), watch, seen
        )

    def take(self, step: Step, shard: int, request: Request, reply: Reply) -> None:
        link = self.links[shard]
        if reply.epoch != link.epoch:
            if request.epoch != link.epoch:  # old: serves its own step and changes nothing
                for key in request.checks.keys() - self.lines.keys():
                    row, _ = reply.rows.get(key) or (self.config.new_row(key), 0)
                    self.lines[key] = Line(Row(row.value, None), 0, admitted=False)
                return
            self.begin_epoch(shard, reply.epoch)
            link = self.links[shard]
        link.acknowledged = max(link.acknowledged, reply.acknowledged)
        if reply.counted:  # the shard has what another run did: what is here is not what is there
            for key in [key for push in request.pushes for key in push.rows]:
                self.forget(key)
        if request.pushes and request.epoch == reply.epoch:
            for push in link.pushes:  # was skipped, so what went before it did not arrive
                if reply.acknowledged < push.sequence <= request.pushes[-1].sequence:
                    push.carriers.clear()
        latest = False
        if reply.number is not None and request.watch == link.watching.epoch:
            latest = link.watching.take(step.id, reply.number)
        for key, (row, clock) in reply.rows.items():
            link.watching.rows.discard(key)
            if self.pins[key] or key in self.lines:
                self.put(step, key, row, clock, reply.acknowledged)
        for key, (row, clock) in reply.unasked.items():
            link.watching.rows.discard(key)
            if key in self.lines and self.lines[key].row.slots is not None:
                self.put(step, key, row, clock, reply.acknowledged)
        if latest:
            full = {
                key
                for key in reply.watched & self.lines.keys()
                if self.lines[key].row.slots is not None
            }
            link.watching.rows |= full
        for key in request.checks.keys() - reply.rows.keys():
            # Nobody has updated it, so what it is is known here.
            if request.checks[key] == ABSENT or request.epoch != reply.epoch:
                self.put(step, key, self.config.new_row(key), 0, reply.acknowledged)

    def put(self, step: Step, key: int, row: Row, base: int, acknowledged: int) -> None:
        """A row of the shard, and on top of it what it lacks of the own updates."""
        optimizer, line = self.config.optimizer, self.lines.get(key)
        fresh = Line(row, base, key in step.admitted or bool(line and line.admitted))
        if line and line.row.slots is not None:
            if row.slots is None:
                return  # asked for before the line's
            fresh.base = self.with_pushes(fresh, key, acknowledged)
            if fresh.base < line.base:
                return  # older than the line's
        else:
            fresh.base = self.with_pushes(fresh, key, acknowledged)
        if unsent := self.unsent.get(key):
            if unsent.contribution:
                moved = optimizer.based_on(unsent.contribution, fresh.row)
                fresh.row = self.sent(key).onto(fresh.row, optimizer)
                unsent.contribution = moved
            else:  # a visitor's
                again = self.unsent[key] = Unsent()
                for gradient, rate in unsent.gradients:
                    self.make(fresh, again, gradient, rate)
        self.lines[key] = fresh

    def with_pushes(self, line: Line, key: int, acknowledged: int) -> int:
        base = line.base
        for push in self.links[self.config.shard_of(key)].pushes:
            if push.sequence > acknowledged and key in push.rows:
                line.row = push.rows[key].onto(line.row, self.config.optimizer)
                base = self.advanced(base, push.rows[key])
        return base

    def begin_epoch(self, shard: int, epoch: Epoch) -> None:
        """The shard knows nothing of this cache: what is held of it is dropped, but for values
        that open steps have still to gather."""
        mine = {
            key for key in self.lines.keys() | self.unsent if self.config.shard_of(key) == shard
        }
        link = self.links[shard]
        self.lost |= link.cut > link.acknowledged or not mine.isdisjoint(self.unsent)
        for key in mine:
            self.unsent.pop(key, None)
            self.forget(key)
        self.due -= mine
        steps = self.links[shard].open
        self.links[shard] = Link(epoch)
        self.links[shard].open = dict.fromkeys(steps, 0)

    def forget(self, key: int) -> None:
        """Drops a line, but for a value that open steps have still to gather."""
        line = self.lines.pop(key, None)
        self.watching(key).rows.discard(key)
        if line and self.pins[key]:
            self.lines[key] = Line(Row(line.row.value, None), 0, admitted=False)


def _or_infinite(bound: int | None) -> float:
    return math.inf if bound is None else bound


def zeros(dim: int) -> Callable[[int], Array]:
    return lambda key: np.zeros(dim)


def uniform(seed: int, dim: int) -> Callable[[int], Array]:
    """Values in [-0.05, 0.05) of a counter-based generator: a function of seed, key and column."""

    def init(key: int) -> Array:
        counter = np.array([0, 0, 0, key % 2**64], np.uint64)
        philox = np.random.Philox(key=seed, counter=counter)
        return np.random.Generator(philox).uniform(-0.05, 0.05, dim)

    return init
