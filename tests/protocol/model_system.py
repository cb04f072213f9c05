"""The protocol model as a `schedules.System`."""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
from optimizer_model import Momentum, Optimizer, Sgd
from protocol_model import Cache, Config, Reply, Shard, Step, zeros
from schedules import Setup


@dataclasses.dataclass
class Sending:
    """A step and what it has been answered."""

    cache: Cache
    step: Step
    replies: dict[int, Reply] = dataclasses.field(default_factory=dict)


class ModelSystem:
    """`shard` and `cache` may be subclasses with a fault built in, to see that a test finds it."""

    supports = frozenset({"evict", "forget", "crash", "restart", "save", "restore"})

    def __init__(
        self,
        setup: Setup,
        optimizer: Optimizer | None = None,
        init=None,
        rate: float = 1.0,
        shard: type[Shard] = Shard,
        cache: type[Cache] = Cache,
        admitted: float | None = None,  # of the keys, by chance
    ):
        self.setup, self.rate = setup, rate
        plain = Momentum(momentum=0.0) if setup.slots else Sgd()
        self.unit = Config.unit
        self.config = Config(
            optimizer or plain,
            init or zeros(setup.dim),
            self._in_units(setup.read_bound),
            self._in_units(setup.write_bound),
            setup.clock,
            self.unit,
            setup.capacity,
            setup.num_shards,
        )
        self.shards = [shard(self.config) for _ in range(setup.num_shards)]
        self.make_cache = cache
        self.random = random.Random(setup.seed)
        if admitted is None:
            admitted = self.random.choice([0.0, 0.5, 0.9, 1.0])
        self.admitted = admitted if setup.capacity else 0.0
        self.caches = [self._new_cache() for _ in range(setup.num_workers)]

    def lookup(self, worker: int, keys: Sequence[int]) -> Sending:
        return Sending(self.caches[worker], self.caches[worker].lookup(keys))

    def flush(self, worker: int, everything: bool = True) -> Sending:
        return Sending(self.caches[worker], self.caches[worker].flush(everything))

    def keep(self, worker: int, keeps: bool) -> None:
        self.caches[worker].keep(keeps)

    def begin(self, worker: int, number: int) -> None:
        self.caches[worker].begin(number)

    def commit(self, worker: int, done: int) -> Sending:
        return Sending(self.caches[worker], self.caches[worker].commit(done))

    def end(self, worker: int) -> bool:
        return self.caches[worker].end()

    def give_up(self, worker: int) -> None:
        pass

    def shards_with_requests(self, sending: Sending) -> list[int]:
        return list(sending.step.requests)

    def num_pushes(self, sending: Sending, shard: int) -> int:
        return len(sending.step.requests[shard].pushes)

    def deliver(self, sending: Sending, shard: int, keep: bool = True) -> None:
        reply = self.shards[shard].sync(sending.step.requests[shard])
        if keep:
            sending.replies[shard] = reply

    def install(self, sending: Sending) -> bool:
        lacking = sending.cache.install(sending.step, sending.replies)
        if lacking:
            sending.replies.clear()
            sending.cache.ask_again(sending.step, lacking)
        return bool(lacking)

    def gather(self, sending: Sending) -> np.ndarray:
        return sending.cache.gather(sending.step)

    def update(self, sending: Sending, gradients: np.ndarray) -> None:
        sending.cache.update(sending.step, gradients, self.rate)

    def drop(self, sending: Sending) -> None:
        sending.cache.drop(sending.step)

    def table(self) -> dict[int, tuple[np.ndarray, np.ndarray, int]]:
        rows = {key: row for shard in self.shards for key, row in shard.rows.items()}
        return {key: (row.value, row.slots, clock) for key, (row, clock) in rows.items()}

    def shard_of(self, key: int) -> int:
        return self.config.shard_of(key)

    def clock(self, worker: int, key: int) -> int | None:
        return self.caches[worker].clock(key)

    def evict(self, worker: int, nth: int) -> None:
        if free := self.caches[worker].unpinned():
            self.caches[worker].evict(free[nth % len(free)])

    def crash(self, worker: int) -> None:
        self.caches[worker] = self._new_cache()

    def restart(self, shard: int) -> None:
        self.shards[shard].clear()

    def forget(self, worker: int, shard: int) -> None:
        self.shards[shard].forget(self.caches[worker].id)

    def save(self) -> None:
        self.saved = [shard.save() for shard in self.shards]

    def restore(self) -> None:
        for shard, saved in zip(self.shards, self.saved, strict=True):
            shard.restore(saved)

    def _new_cache(self) -> Cache:
        def admit(key: int) -> bool:
            return self.random.random() < self.admitted

        return self.make_cache(self.config, admit, self.random.choice)

    def _in_units(self, bound: float | None) -> float | None:
        return bound / self.unit if self.setup.clock == "drift" and bound else bound
