"""Caches and shards with a fault built in, by which closures do not count once."""

import dataclasses

from protocol_model import Cache, Shard


class MergesEveryRun(Shard):
    def is_first(self, closure):
        super().is_first(closure)
        return True


class ForgetsNumbersTooEarly(Shard):
    def is_first(self, closure):
        return super().is_first(dataclasses.replace(closure, done=closure.number - 1))


class ForgetsWhatIsDone(Shard):
    def is_first(self, closure):
        first = super().is_first(closure)
        return first or (closure.number <= self.done and closure.number not in self.closures)


class PushesWithinAClosure(Cache):
    def cut(self, shard):
        closure, self.closure = self.closure, None
        super().cut(shard)
        self.closure = closure


class GoesOnWithAClosureThatFailed(Cache):
    def start_anew(self):
        self.closure, self.ends, self.lost = None, False, False


class KeepsRowsThatAnotherRunHasCounted(Cache):
    def take(self, step, shard, request, reply):
        super().take(step, shard, request, dataclasses.replace(reply, counted=False))


class SaysOnceThatAnotherRunHasCounted(Shard):
    def sync(self, request):
        before = self.sessions.get(request.cache, [0, 0, 0])[2]
        reply = super().sync(request)
        is_repeat = before and before == self.sessions[request.cache][2]
        return dataclasses.replace(reply, counted=reply.counted and not is_repeat)


FAULTS = [
    (MergesEveryRun, Cache, "merges every run"),
    (ForgetsNumbersTooEarly, Cache, "forgets numbers too early"),
    (ForgetsWhatIsDone, Cache, "forgets what is done"),
    (SaysOnceThatAnotherRunHasCounted, Cache, "says once that another run has counted"),
    (Shard, PushesWithinAClosure, "pushes within a closure"),
    (Shard, GoesOnWithAClosureThatFailed, "goes on with a closure that failed"),
    (Shard, KeepsRowsThatAnotherRunHasCounted, "keeps rows that another run has counted"),
]
