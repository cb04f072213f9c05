"""The protocol model as a `schedules.System`, over a network that fails on order."""

import collections
import random
from collections.abc import Sequence

import numpy as np
from protocol_model import Answer, Cache, Config, Message, MessageLost, Shard, sgd, zeros
from schedules import Setup


class ModelSystem:
    """`shard` and `cache` may be subclasses with a fault built in, to see that a test finds it."""

    supports = frozenset({"lost", "answer_lost", "twice", "redeliver", "crash", "restart"})

    def __init__(
        self,
        setup: Setup,
        config: Config | None = None,
        shard: type[Shard] = Shard,
        cache: type[Cache] = Cache,
    ):
        self.setup = setup
        self.config = config or Config(
            step=sgd(1.0),
            init=zeros(setup.dim),
            read_bound=setup.read_bound,
            write_bound=setup.write_bound,
            clock=setup.clock,
            capacity=setup.capacity,
        )
        self.shards = [shard(self.config) for _ in range(setup.num_shards)]
        self.make_cache = cache
        self.random = random.Random(setup.evict_seed)
        self.armed: dict[tuple[int, int], list[str]] = collections.defaultdict(list)
        self.sent: dict[tuple[int, int], list[Message]] = collections.defaultdict(list)
        self.caches = [self._new_cache(worker) for worker in range(setup.num_workers)]

    def lookup(self, worker: int, keys: Sequence[int]) -> np.ndarray:
        return self.caches[worker].lookup(keys)

    def update(self, worker: int, keys: Sequence[int], grads: np.ndarray) -> None:
        self.caches[worker].update(keys, grads)

    def flush(self, worker: int) -> None:
        self.caches[worker].flush()

    def table(self) -> dict[int, tuple[np.ndarray, np.ndarray, int]]:
        rows = {key: row for shard in self.shards for key, row in shard.rows.items()}
        return {key: (row.value, row.state, row.clock) for key, row in rows.items()}

    def shard_of(self, key: int) -> int:
        return self.caches[0].shard_of(key)

    def clock(self, worker: int, key: int) -> int | None:
        cache, shard = self.caches[worker], self.shard_of(key)
        if cache.incarnation[shard] != self.shards[shard].incarnation:
            return None  # of a table that is no more
        return cache.clock(key)

    def arm(self, worker: int, shard: int, fault: str) -> None:
        self.armed[worker, shard].append(fault)

    def redeliver(self, worker: int, shard: int, nth: int) -> None:
        sent = self.sent[worker, shard]
        if sent:
            self.shards[shard].sync(sent[-1 - nth % len(sent)])

    def crash(self, worker: int) -> None:
        for shard in range(self.setup.num_shards):
            self.sent[worker, shard].clear()  # what the dead worker sent has arrived or never will
            self.armed[worker, shard].clear()
        self.caches[worker] = self._new_cache(worker)

    def restart(self, shard: int) -> None:
        self.shards[shard].clear()

    def _new_cache(self, worker: int) -> Cache:
        def send(shard: int, message: Message) -> Answer:
            return self._send(worker, shard, message)

        return self.make_cache(self.config, self.setup.num_shards, send, self.random.choice)

    def _send(self, worker: int, shard: int, message: Message) -> Answer:
        self.sent[worker, shard].append(message)
        fault = self.armed[worker, shard].pop(0) if self.armed[worker, shard] else None
        if fault == "lost":
            raise MessageLost(f"worker {worker} to shard {shard}")
        if fault == "twice":
            self.shards[shard].sync(message)
        answer = self.shards[shard].sync(message)
        if fault == "answer_lost":
            raise MessageLost(f"shard {shard} to worker {worker}")
        return answer
