"""How workers cache the rows of a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from het_tf.runtime.validation import INT32_MAX, check_clock, check_integer, check_number

UNBOUNDED = -1  # a bound, as the ops take it
_UNSET: Any = "unset"

# The drift clock counts in integers, too: of this length, in the units of a row's value.
DRIFT_UNIT = 2.0**-14
_MAX_DRIFT = 2.0**10

# Lines of a store; as many numbers are left for rows without a line.
_MAX_DEVICE_ROWS = 2**30

# Steps whose rows and batches a worker holds at once.
_MAX_LOOKAHEAD = 1024

# Total staleness where no bound is given: of count, what costs the fewest bytes with an AUC within
# one standard deviation of no cache's on two data sets, with 2 and with 4 workers; of drift the
# tightest that was tried (docs/staleness_auc.md).
_DEFAULT_TOTAL = {"count": 4, "drift": 0.1}


_BOUNDS = ("staleness", "read_bound", "write_bound")


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """How workers cache rows (HET, VLDB 2022, sections 3 and 4).

    What a read of a row misses of the other workers' updates is bounded, and it misses none of its
    own. `total_staleness` is the bound; `staleness` is the paper's knob, under which a read misses
    at most `workers * staleness`, so that the same number means more with more workers.

    The looser the bounds, the fewer the messages, and the later a worker learns where the others
    have moved a row. From some bound on that delay alone makes training diverge, as it would
    without a cache: near `workers * staleness * learning rate * curvature = 2`, with the largest
    curvature of the loss along a row (for momentum and Adam with the rate over `1 - momentum`).
    Stay well below: with a higher rate, choose a smaller bound.

    Attributes:
      capacity: rows that a worker keeps in its host's memory, from 1 to `2**31 - 1`; None: only
        with device_capacity. Beside that those that gave way to others in the GPU's, so that one
        which comes again is checked and not fetched; and, where a worker has no such device, all of
        its rows.
      policy: which rows leave a full cache: "lfu" (least frequently used; a use counts half as much
        as one that is `4 * capacity` key lookups younger) or "lru" (least recently used).
      staleness: read_bound and write_bound, where they are not given; None: unbounded.
      read_bound: what a cached row may miss of the other workers' updates that its shard has merged
        before it is fetched again.
      write_bound: what its server may lack of a row's own updates; 0: they are sent within the
        step.
      clock: in what bounds are. "count": numbers of updates. "drift": how far the updates have
        moved the row's value, as lengths (L2, in the units of the value), from 0 to 1024.
        "lamport": the rule of the paper, which bounds the difference of two workers' clocks of a
        row by `2 * staleness`. Numbers of updates are integers below 2**31.
      total_staleness: bound on all that a read misses, for any number of workers: half of it is the
        read bound, and the other workers' write bounds share the other half. Not together with
        another bound, nor with "lamport". Default, where no bound is given: 4 under "count", 0.1
        under "drift".
      lookahead: under `het_tf.keras.Model.fit`, how many steps before it needs its rows a step
        begins to look them up, while those before it compute; 0: not before it begins. None: 1, or
        0 with `dense_staleness=0`, where each step waits for a message about the dense variables,
        and rows come along. What a read misses is bounded as of then. Up to (lookahead + 1) / 2
        steps share a message: no step waits once that many take longer than a message and its
        answer. With a small write_bound fewer do, at most half of it, and a step waits where the
        servers lack write_bound updates of one of its rows. The window's rows are kept whatever the
        capacity.
      device_capacity: rows that a worker keeps in the memory of its GPU, from 1 to `2**30`, so that
        a step of hits leaves it for their ids alone (MixCache: Guo et al., SIGIR 2021); "auto": as
        many as three quarters of the memory hold that TensorFlow has not handed out when the cache
        is made. A worker without a GPU keeps `capacity` rows on its host; without `capacity` that
        is an error. None: rows are on the host.
      device: "GPU"; "CPU": the host takes a GPU's place, slowly, for tests of programs where there
        is none, in builds of the ops without CUDA.

    Raises:
      ValueError: an attribute is out of its range; the message names it and its value.
    """

    capacity: int | None = None
    policy: str = "lfu"
    staleness: float | None = _UNSET
    read_bound: float | None = _UNSET
    write_bound: float | None = _UNSET
    clock: str = "count"
    total_staleness: float | None = None
    lookahead: int | None = None
    device_capacity: int | str | None = None
    device: str = "GPU"

    def __post_init__(self) -> None:
        if self.policy not in ("lfu", "lru"):
            raise ValueError(f'policy must be "lfu" or "lru", not {self.policy!r}')
        if self.device_capacity is None and self.capacity is None:
            raise ValueError(
                "CacheConfig needs capacity, the rows that each worker keeps, such as"
                " CacheConfig(capacity=100_000), or device_capacity"
            )
        if self.capacity is not None:
            capacity = check_integer("capacity", self.capacity, 1, INT32_MAX)
            object.__setattr__(self, "capacity", capacity)
        if self.device_capacity not in (None, "auto"):
            device_capacity = check_integer(
                "device_capacity", self.device_capacity, 1, _MAX_DEVICE_ROWS, ' or "auto"'
            )
            object.__setattr__(self, "device_capacity", device_capacity)
        if self.device not in ("GPU", "CPU"):
            raise ValueError(f'device must be "GPU" or "CPU", not {self.device!r}')
        check_clock(self.clock)
        if self.lookahead is not None:
            lookahead = check_integer("lookahead", self.lookahead, 0, _MAX_LOOKAHEAD)
            object.__setattr__(self, "lookahead", lookahead)
        self._set_bounds()

    def _set_bounds(self) -> None:
        given = [name for name in _BOUNDS if getattr(self, name) is not _UNSET]
        if self.total_staleness is not None:
            if given:
                raise ValueError(
                    f"{given[0]} = {getattr(self, given[0])!r} and total_staleness ="
                    f" {self.total_staleness!r} exclude each other"
                )
            if self.clock == "lamport":
                raise ValueError('total_staleness has no meaning with clock = "lamport"')
            total = self._checked_bound("total_staleness", self.total_staleness)
            object.__setattr__(self, "total_staleness", total)
        elif not given and self.clock in _DEFAULT_TOTAL:
            object.__setattr__(self, "total_staleness", _DEFAULT_TOTAL[self.clock])
        else:
            staleness = self.staleness
            if staleness is _UNSET:
                if self.clock == "drift" and len(given) < 2:
                    raise ValueError(f'clock = "drift" needs staleness beside {given[0]}')
                staleness = None if self.clock == "drift" else 100
            for name in _BOUNDS:
                value = getattr(self, name)
                value = self._checked_bound(name, staleness if value is _UNSET else value)
                object.__setattr__(self, name, value)

    def _checked_bound(self, name: str, value: Any) -> float | None:
        if value is None:
            return None
        unbounded = "" if name == "total_staleness" else " or None (unbounded)"
        if self.clock == "drift":
            return check_number(name, value, 0.0, _MAX_DRIFT, unbounded)
        return check_integer(name, value, 0, INT32_MAX, unbounded)

    @property
    def is_unbounded(self) -> bool:
        """Whether a row that is cached is never fetched again."""
        return self.total_staleness is None and self.read_bound is None

    def steps_ahead(self, waits: bool = False) -> int:
        """By how many steps rows are looked up ahead.

        Args:
          waits: whether each step waits for a message that rows can come along with.
        """
        if self.lookahead is None:
            return 0 if waits else 1
        return self.lookahead

    def steps_per_message(self, write_bound: int) -> int:
        """How many steps whose rows are looked up ahead share a message.

        Args:
          write_bound: of `bound_attributes`. What a step has to send waits for the next message, so
            few share one where few updates of a row may wait.
        """
        most = max(1, (self.steps_ahead() + 1) // 2)
        if write_bound == UNBOUNDED or self.clock == "drift":
            return most
        return min(most, max(1, write_bound // 2))

    def due_bound(self, write_bound: int, on_device: bool) -> int:
        """With what of a row's updates it is due, so that it seldom has `write_bound` of them.

        Args:
          write_bound: of `bound_attributes`.
          on_device: whether rows are kept on one, where no step waits for the shards to have them.
        """
        # The steps that may come to their updates before one is merged that is due.
        steps = self.steps_ahead() + self.steps_per_message(write_bound) - 1
        steps = max(0, steps if on_device else steps - 1)
        if write_bound <= 0 or steps == 0:
            return write_bound
        return write_bound // 2 if self.clock == "drift" else max(1, write_bound - steps)

    def bound_attributes(self, num_workers: int) -> dict[str, int]:
        """The bounds as the ops take them, in the clock's unit, for that many workers."""
        unit = DRIFT_UNIT if self.clock == "drift" else 1
        if self.total_staleness is None:
            bounds = {"read_bound": self.read_bound, "write_bound": self.write_bound}
            return {n: UNBOUNDED if b is None else round(b / unit) for n, b in bounds.items()}
        total = round(self.total_staleness / unit)
        others = num_workers - 1
        # A worker alone misses nothing, and may keep all of it back.
        write_bound = total // (2 * others) if others else total
        return {"read_bound": total - others * write_bound, "write_bound": write_bound}

    def get_config(self) -> dict[str, Any]:
        """The arguments, for Keras serialization."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not _UNSET}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CacheConfig:
        """The inverse of `get_config`."""
        return cls(**config)
