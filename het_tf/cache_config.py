"""Configuration of the workers' caches of a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from het_tf.runtime.validation import INT32_MAX, check_clock, check_integer, check_number

UNBOUNDED = -1  # Value of a bound in the ops for "no bound".
_UNSET: Any = "unset"

# Unit of the drift clock, which is an integer: a length in the units of a row's value.
DRIFT_UNIT = 2.0**-14
_MAX_DRIFT = 2.0**10

# Largest number of lines in a store. The other numbers are for rows without a line.
_MAX_DEVICE_ROWS = 2**30

# Largest number of steps whose rows and batches a worker holds at once, given and chosen.
_MAX_LOOKAHEAD = 1024
_MAX_CHOSEN_LOOKAHEAD = 8

# Default of `total_staleness` (docs/staleness_auc.md). For "count": the bound with the fewest bytes
# among those with an AUC within one standard deviation of the AUC without a cache, on two data
# sets, with 2 and 4 workers. For "drift": the tightest bound that was measured.
_DEFAULT_TOTAL = {"count": 4, "drift": 0.1}

# Of a read or write bound that is not given beside the other one, and of "lamport": the paper's.
_DEFAULT_STALENESS = 100


_BOUNDS = ("staleness", "read_bound", "write_bound")


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Configuration of the workers' caches of rows (HET, VLDB 2022, sections 3 and 4).

    The bounds limit how many updates of the other workers a read may miss. A read misses none of
    its own worker's updates. `total_staleness` bounds the missed updates for any number of workers.
    `staleness` is the parameter of the paper. A read then misses at most `workers * staleness`
    updates, so the same value allows more staleness with more workers.

    Looser bounds need fewer messages, but a worker sees the updates of the others later. Above some
    bound, this delay makes training diverge, as it would without a cache. The limit is near
    `workers * staleness * learning rate * curvature = 2`, with the largest curvature of the loss
    along a row. (For momentum and Adam, divide the learning rate by `1 - momentum`.) Stay well
    below the limit: with a higher learning rate, choose a smaller bound.

    Attributes:
      capacity: number of rows in the memory of a worker's host, from 1 to `2**31 - 1`. None: as
        many as fit into a quarter of the host's free memory, divided by the workers on the host.
        All caches without a capacity share this memory: each may use what the others leave, and
        always an equal part. The memory is taken as the caches fill. Workers log its size, and the
        rows that it holds. With `device_capacity`, the host keeps rows that the GPU has evicted, so
        that they need a check and not a fetch when they are used again, and None keeps none. A
        worker without a GPU keeps all of its cached rows on the host.
      policy: eviction policy of a full cache. "lfu": least frequently used. A use counts half as
        much as a use that is `4 * capacity` key lookups younger. "lru": least recently used.
      staleness: default of `read_bound` and `write_bound`. None: unbounded. Default beside one of
        them, and with "lamport": 100.
      read_bound: number of other workers' merged updates that a cached row may miss before it is
        fetched again.
      write_bound: number of a worker's own updates of a row that the server may lack. 0: a step
        pushes its updates before it ends.
      clock: unit of the bounds. "count": number of updates, an integer below 2**31. "drift":
        distance that updates have moved the row's value (L2 norms, in the units of the value), from
        0 to 1024. "lamport": the rule of the paper, which bounds the difference of two workers'
        clocks of a row by `2 * staleness`, in updates.
      total_staleness: bound on all updates that a read misses, for any number of workers. The read
        bound is half of it, and the write bounds of the other workers share the other half. It
        excludes the other bounds and "lamport". Default without any bound: 4 with "count", 0.1 with
        "drift".
      lookahead: under `het_tf.keras.Model.fit`, the number of steps by which lookups run ahead,
        while earlier steps compute. 0: a step looks up its rows when it begins. None: each worker
        begins with 1, and adds 1, up to 8, as long as more than one step in 100 waits for its rows
        (`het_tf.keras.Model.lookahead_stats`). With `device_capacity` it stays at 1. With
        `dense_staleness=0` it is 0, since every step waits for a message about the dense variables,
        which also carries the rows. The bounds hold at the time of the lookup. With a number, up to
        (lookahead + 1) / 2 steps share a message, but at most half of `write_bound`. No step waits
        for rows if the steps of a message take longer than the message and its reply. A step waits
        while the servers lack `write_bound` updates of one of its rows. The rows of all steps in
        the window are kept, even beyond `capacity`.
      device_capacity: number of rows in the memory of a worker's GPU, from 1 to `2**30`. A step
        with hits only then transfers only ids (MixCache: Guo et al., SIGIR 2021). "auto": as many
        rows as fit into three quarters of the memory that TensorFlow has not allocated when the
        cache is created. A worker without a GPU keeps `capacity` rows on its host, and raises an
        error without `capacity`. None: rows are on the host.
      device: "GPU". Or "CPU", in builds of the ops without CUDA: the host replaces the GPU, slowly,
        for tests of programs on machines without a GPU.

    Raises:
      ValueError: an attribute is out of range. The message names the attribute and its value.
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
                staleness = None if self.clock == "drift" else _DEFAULT_STALENESS
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

    def check_synchronous(self, layer: str) -> None:
        """Raises a ValueError if the workers of synchronous steps cannot have this cache."""
        given = [(name, getattr(self, name)) for name in _BOUNDS[1:]]
        if self.total_staleness != _DEFAULT_TOTAL.get(self.clock):
            given.append(("total_staleness", self.total_staleness))
        wrong = [(n, v) for n, v in given if v is not _UNSET and v]
        if self.clock != "count":
            wrong.append(("clock", self.clock))
        if self.device_capacity is not None:
            wrong.append(("device_capacity", self.device_capacity))
        for name, value in wrong:
            raise ValueError(
                f"layer {layer} has a cache with {name} = {value!r}, which synchronous=True of the"
                " strategy excludes: rows are then on the host, and miss no update"
            )

    @property
    def is_unbounded(self) -> bool:
        """Whether a cached row is never fetched again."""
        return self.total_staleness is None and self.read_bound is None

    def steps_ahead(self, waits: bool = False) -> int:
        """Returns the largest number of steps by which lookups run ahead.

        Args:
          waits: whether every step waits for another message, which can also carry rows.
        """
        if self.lookahead is not None:
            return self.lookahead
        if waits:
            return 0
        return _MAX_CHOSEN_LOOKAHEAD if self.device_capacity is None else 1

    def steps_per_message(self, write_bound: int) -> int:
        """Returns the number of steps whose lookups share a message.

        The updates of a step wait for the next message. With a small write bound, fewer steps
        therefore share a message.

        Args:
          write_bound: value of `bound_attributes`.
        """
        most = 1 if self.lookahead is None else max(1, (self.lookahead + 1) // 2)
        if write_bound == UNBOUNDED or self.clock == "drift":
            return most
        return min(most, max(1, write_bound // 2))

    def due_bound(self, write_bound: int, on_device: bool) -> int:
        """Returns the number of pending updates from which on a row is due.

        On a host a step waits if a row would exceed `write_bound`. The number leaves room for the
        steps that run meanwhile, but at most a tenth of the bound: at a bound of 2, earlier pushes
        cost 47 % more bytes and save no time (benchmarks/netns_cluster.py). On a device steps do
        not wait. The number is then so low that a row does not exceed `write_bound`.

        Args:
          write_bound: value of `bound_attributes`.
          on_device: whether rows are on a device.
        """
        # Number of steps that may update the row before a due update is merged.
        steps = self.steps_ahead() + self.steps_per_message(write_bound) - 1
        if not on_device:
            # The next step itself can push the row and wait. A drift has no number of steps.
            room = write_bound // 10
            return write_bound - max(0, room if self.clock == "drift" else min(steps - 1, room))
        if write_bound <= 0 or steps <= 0:
            return write_bound
        return write_bound // 2 if self.clock == "drift" else max(1, write_bound - steps)

    def bound_attributes(self, num_workers: int) -> dict[str, int]:
        """Returns the bounds as attributes of the ops, in the clock's unit.

        Args:
          num_workers: number of workers that share `total_staleness`.

        Returns:
          "read_bound" and "write_bound". -1: unbounded.
        """
        unit = DRIFT_UNIT if self.clock == "drift" else 1
        if self.total_staleness is None:
            bounds = {"read_bound": self.read_bound, "write_bound": self.write_bound}
            return {n: UNBOUNDED if b is None else round(b / unit) for n, b in bounds.items()}
        total = round(self.total_staleness / unit)
        others = num_workers - 1
        # A single worker misses no updates, so its write bound is the whole total.
        write_bound = total // (2 * others) if others else total
        return {"read_bound": total - others * write_bound, "write_bound": write_bound}

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for Keras serialization."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not _UNSET}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CacheConfig:
        """Creates a config from the result of `get_config`."""
        return cls(**config)
