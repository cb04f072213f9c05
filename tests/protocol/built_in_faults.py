"""Caches and shards with a fault built in: the properties of ledger.py must find each of them.

Several were in published code, several in earlier commits of this repository.
"""

import dataclasses

import numpy as np
from protocol_model import Cache, Epoch, Link, Reply, Request, Sent, Shard
from watch_model import Watching


class MergesRepeats(Shard):
    def sync(self, request: Request) -> Reply:
        if request.pushes and request.cache in self.sessions:
            before_them = request.pushes[0].sequence - 1
            self.sessions[request.cache][1] = min(self.sessions[request.cache][1], before_them)
        return super().sync(request)


class TakesSequencesThatSkip(Shard):
    def sync(self, request: Request) -> Reply:
        session = self.sessions.get(request.cache)
        if session and request.pushes and request.pushes[0].sequence > session[1]:
            session[1] = request.pushes[0].sequence - 1
        return super().sync(request)


class MergesIntoANewEpoch(Shard):
    def sync(self, request: Request) -> Reply:
        if request.cache in self.sessions:
            epoch = self.incarnation, self.sessions[request.cache][0]
            request = dataclasses.replace(request, epoch=epoch)
        return super().sync(request)


class SendsOneUpdateLate(Shard):
    def is_stale(self, key, base):
        return super().is_stale(key, base + 1)


class TrustsBasesThatCountPushesUnderWay(Shard):
    def sync(self, request: Request) -> Reply:
        return super().sync(dataclasses.replace(request, cut=0))


class AnswersWithValuesOnlyThoughPushesAreMissing(Shard):
    def sync(self, request: Request) -> Reply:
        reply = super().sync(request)
        bare = {
            key: (dataclasses.replace(row, slots=None), clock)
            for key, (row, clock) in reply.rows.items()
            if key in request.bare
        }
        return dataclasses.replace(reply, rows=reply.rows | bare)


class CountsUpdatesUnderDrift(Shard):
    def merge(self, key: int, sent: Sent) -> None:
        before = self.rows[key][1] if key in self.rows else 0
        super().merge(key, sent)
        self.rows[key] = self.rows[key][0], before + len(sent.gradients)


class DropsDirtyRowsOnEviction(Cache):
    def evict(self, key: int) -> None:
        self.unsent.pop(key, None)
        super().evict(key)


class DropsRowsOfAShardWithoutKeys(Cache):
    def lookup(self, keys):
        shards = {self.config.shard_of(key) for key in keys}
        for key in [key for key in self.due if self.config.shard_of(key) not in shards]:
            self.due.discard(key)
            del self.unsent[key]
        return super().lookup(keys)


class ForgetsUnsentUpdatesWhenARowComes(Cache):
    def put(self, step, key, row, base, acknowledged):
        unsent = self.unsent.pop(key, None)
        super().put(step, key, row, base, acknowledged)
        if unsent:
            self.unsent[key] = unsent


class ForgetsPushesWhenARowComes(Cache):
    """What was pushed while the request was under way is not in the row that comes."""

    def with_pushes(self, line, key, acknowledged):
        row = line.row
        base = super().with_pushes(line, key, acknowledged)
        line.row = row
        return base


class ForgettingLink(Link):
    def close(self, step: int) -> None:
        super().close(step)
        self.pushes = [push for push in self.pushes if push.sequence > self.acknowledged]


class ForgetsPushesOnceAcknowledged(Cache):
    """A slow reply, answered before the push was merged, then replaces the row without it."""

    def lookup(self, keys):
        for link in self.links:
            link.__class__ = ForgettingLink
        return super().lookup(keys)


class TakesOlderRows(Cache):
    def put(self, step, key, row, base, acknowledged):
        if key in self.lines and row.slots is not None:
            self.lines[key].base = -(2**62)
        super().put(step, key, row, base, acknowledged)


class SendsAgainUnderANewSequence(Cache):
    def request(self, step, shard, checks, bare):
        link = self.links[shard]
        again = [push for push in link.pushes if push.sequence > link.acknowledged]
        if not step.keys and again and not again[-1].carriers:
            link.cut += 1
            link.pushes.append(dataclasses.replace(again[-1], sequence=link.cut, carriers=set()))
        super().request(step, shard, checks, bare)


class AppliesOccurrencesOneByOne(Cache):
    def update(self, step, gradients, rate=1.0):
        keys = step.keys
        for at, key in enumerate(keys[:-1]):
            one = dataclasses.replace(step, keys=(key,))
            self.pins[key] += 1
            super().update(one, gradients[at : at + 1], rate)
        super().update(dataclasses.replace(step, keys=keys[-1:]), gradients[-1:], rate)


class WaitsOneUpdateTooLong(Cache):
    def cut(self, shard):
        bound = self.config.write_bound
        wait = {
            key
            for key in self.due
            if key in self.lines and self.unsent[key].units == bound and self.unsent[key].units > 0
        }
        self.due -= wait
        super().cut(shard)


class FoldsKeysLikeFloat32(Cache):
    def lookup(self, keys):
        return super().lookup([_as_float32(key) for key in keys])


def _as_float32(key: int) -> int:
    return max(-(2**63), min(2**63 - 1, int(np.float32(key))))


class TakesEveryReplyForNews(Cache):
    """A late reply of an epoch it never heard of, after one of a newer epoch."""

    def take(self, step, shard, request, reply):
        request = dataclasses.replace(request, epoch=self.links[shard].epoch)
        super().take(step, shard, request, reply)


class TakesNoReplyForNews(Cache):
    def take(self, step, shard, request, reply):
        if self.links[shard].epoch is not None and reply.epoch != self.links[shard].epoch:
            request = dataclasses.replace(request, epoch=(0, 0))
        super().take(step, shard, request, reply)


class KeepsLinesOfThePreviousEpoch(Cache):
    def begin_epoch(self, shard: int, epoch: Epoch) -> None:
        lines, unsent, due = dict(self.lines), dict(self.unsent), set(self.due)
        super().begin_epoch(shard, epoch)
        self.lines, self.unsent, self.due = lines, unsent, due


class MovesBasesTwice(Cache):
    """When a push is cut, and when it is acknowledged."""

    def take(self, step, shard, request, reply):
        before = self.links[shard].acknowledged
        super().take(step, shard, request, reply)
        for push in self.links[shard].pushes:
            if before < push.sequence <= self.links[shard].acknowledged:
                for key in push.rows.keys() & self.lines.keys():
                    self.lines[key].base = self.advanced(self.lines[key].base, push.rows[key])


class AsksForValuesOnlyOfWhatAStepHolds(Cache):
    def lookup(self, keys):
        pins, self.pins = self.pins, self.pins.__class__()
        step = super().lookup(keys)
        self.pins += pins
        return step


class WaitsForWhatDoesNotCome(Cache):
    """A message was skipped since one before it is missing: only that one's end sets it free."""

    def take(self, step, shard, request, reply):
        super().take(step, shard, dataclasses.replace(request, pushes=()), reply)


class DropsVisitorsWithTheirUpdates(Cache):
    def drop(self, step):
        for key in dict.fromkeys(step.keys):
            line = self.lines.get(key)
            if self.pins[key] == 1 and line and not line.admitted and line.row.slots is not None:
                self.unsent.pop(key, None)
                self.due.discard(key)
        super().drop(step)


class DoesNotSendWhatItWatches(Shard):
    def with_watched(self, request, reply, behind):
        return dataclasses.replace(super().with_watched(request, reply, behind), unasked={})


class SendsWhatItWatchesOnce(Shard):
    """A step that was cut before the reply with the row came does not get it."""

    def with_watched(self, request, reply, behind):
        reply = super().with_watched(request, reply, behind)
        watch = self.watch_of(request)
        for key in watch.sent:
            del watch.rows[key]
        return reply


class WatchesFromBasesThatCountPushesUnderWay(Shard):
    def with_watched(self, request, reply, behind):
        return super().with_watched(request, reply, False)


class BelievingWatching(Watching):
    def take(self, step, number):
        super().take(step, number)
        return True


class BelievesAnswersThatWereOvertaken(Cache):
    """A check was answered with nothing, then another reply brought the row, and was quicker."""

    def lookup(self, keys):
        for link in self.links:
            link.watching.__class__ = BelievingWatching
        return super().lookup(keys)


class HastyWatching(Watching):
    def counts(self):
        self.open.clear()
        return super().counts()


class ForgetsAWatchThatOpenStepsCountOn(Cache):
    def lookup(self, keys):
        for link in self.links:
            link.watching.__class__ = HastyWatching
        return super().lookup(keys)


class ReadsWhatAShardThatRestartedDoesNotWatch(Cache):
    def install(self, step, replies):
        super().install(step, replies)
        return set()


class AsksAgainOnce(Cache):
    """Though the shard has restarted again meanwhile."""

    asked: frozenset[int] = frozenset()

    def ask_again(self, step, keys):
        super().ask_again(step, keys)
        self.asked |= {step.id}

    def install(self, step, replies):
        lacking = super().install(step, replies)
        return set() if step.id in self.asked else lacking


class KeepsUpdatesAfterAHotPhase(Cache):
    def keep(self, keeps):
        self.keeps = keeps


class ReadsUncheckedAfterAHotPhase(Cache):
    def lookup(self, keys):
        self.keeps, keeps = self.keeps or bool(self.unsent), self.keeps
        step = super().lookup(keys)
        self.keeps = keeps
        return step
