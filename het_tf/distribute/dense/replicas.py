"""Replicas of the dense variables on the workers (docs/protocol.md, 8).

The variables stay on the parameter servers. While `fit` runs, every worker has a replica of them on
which it steps, and a flat copy on the servers is what the replicas have in common: they exchange
contributions with it under a bound. `begin` fills the copy from the variables, `write_back` brings
the variables up to date. What steps do with a replica is in `replica_ops`.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from absl import logging

from het_tf import ops
from het_tf.distribute.dense.replica_ops import ReplicaOps
from het_tf.distribute.dense.server_copy import DenseCopy
from het_tf.runtime.broadcast import cluster_devices, traced_by_device, visit
from het_tf.runtime.validation import INT32_MAX


class ReplicaStrategy(Protocol):
    """What replicas ask of the strategy that they belong to.

    Attributes:
      dense_staleness: steps after which a worker exchanges its variables with the servers.
      dense_merge: "average" or "sum", of the workers' contributions.
      dense_wire_dtype: dtype of contributions in messages.
    """

    dense_staleness: int | None
    dense_merge: str
    dense_wire_dtype: str

    @property
    def num_workers(self) -> int:
        """Workers of the cluster."""
        ...

    def is_lost(self, device: str) -> bool:
        """Whether the task of that device is down."""
        ...

    def forget_reports(self, source: Any) -> None:
        """Drops the reports of replicas that are gone."""
        ...


class DenseReplicas(ReplicaOps):
    """The variables of one training, as every worker has them.

    What is here runs eagerly, on the coordinator, while no step does.
    """

    def __init__(
        self,
        strategy: ReplicaStrategy,
        trainable: Sequence[tf.Variable],
        slots: Sequence[tf.Variable],
        least: Sequence[tf.Variable],
        seeds: Sequence[tf.Variable],
        others: Sequence[tf.Variable],
        constraints: Sequence[Callable[[tf.Tensor], tf.Tensor] | None] = (),
        counts: Sequence[tuple[tf.Variable, tf.Variable]] = (),
    ):
        """Describes the replicas; makes nothing yet.

        Args:
          strategy: says how stale replicas may be, and how contributions are merged. Where its
            `dense_staleness` is None, they have nothing to exchange while steps are made.
          trainable: float32; contributions are averaged, or added.
          slots: float32, of optimizers: they stay with the worker, and are averaged when they are
            written back.
          least: they stay with the worker, too; the least of all workers' is written back.
          seeds: of random generators, 32-bit integers: every worker has others.
          others: variables that a step assigns are averaged if they are float32, and added if they
            are int64; the others stay as they are.
          constraints: of the trainable ones, in their order; values are written back under them.
          counts: int64, pairs of variables. The first counts a worker's own steps, the second, of
            `others`, all workers'; the first's mean is written back. When something else than
            training changes the second, the first becomes the same.

        Raises:
          ValueError: there is no rule for a variable; the message names it.
        """
        self._strategy = strategy
        roles = {
            "trainable": trainable,
            "slot": slots,
            "least": least,
            "seed": seeds,
            "other": others,
            "count": [own for own, _ in counts],
        }
        all_natives = [native for natives in roles.values() for native in natives]
        self._roles = [role for role, natives in roles.items() for _ in natives]
        for native, role in zip(all_natives, self._roles, strict=True):
            _check(native, role)
        floats = sum(native.shape.num_elements() for native in trainable)
        bound = strategy.dense_staleness
        self._staleness = INT32_MAX if bound is None else bound
        name = f"dense/{uuid.uuid4().hex}"
        super().__init__(name, all_natives, DenseCopy(name, floats, self._staleness))
        self._constraints = dict(enumerate(constraints))
        places = {id(native): i for i, native in enumerate(self._natives)}
        # Places of a worker's own count -> of that of all, whose last value training made.
        self._counts = {places[id(own)]: places.get(id(all_)) for own, all_ in counts}
        self._counted = self._read_counts()
        self._workers = strategy.num_workers
        self._lock = threading.Lock()
        self._kinds: list[str] | None = None
        self._fingerprint: np.ndarray | None = None  # When they were last written or taken over.
        self._kept: set[int] = set()  # Changed meanwhile, and so not written.
        self._values_behind = self._slots_behind = False
        self._functions: dict[str, Any] = {}

    def begin(self, workers: int | None = None) -> None:
        """Before steps are scheduled: has the replicas start anew if the variables have changed.

        Does nothing before the first step's function is traced: only then is it known which
        variables it assigns.

        Args:
          workers: that make steps from now on, if not all: an averaged contribution counts as one
            of so many. What others have made is written back.
        """
        workers = workers or self._strategy.num_workers
        others, self._workers = workers != self._workers, workers
        if self._kinds is None:
            return
        changed = self._changed()
        if not (changed or others):
            return
        # The workers' slots go on, but for those that were changed, too.
        self._write_own(changed)
        # A replica that is there would make a step on what the variables were.
        self._destroy_on_workers()
        self._set()

    def note_steps(self) -> None:
        """To be called when steps have been made: the variables are behind them."""
        self._values_behind = self._slots_behind = True

    def write_back(self, slots: bool) -> None:
        """Brings the variables up to date, after `flush_here` on all workers.

        What something else than training has changed since the last time stays as it is, until
        `begin` has the replicas start from it.

        Args:
          slots: the optimizers' slots, too. Without them, of the workers' own variables only the
            seeds are: who draws random numbers next draws others.
        """
        slots = slots and self._slots_behind
        if not (self._values_behind or slots):
            return
        changed = self._changed()
        if self._values_behind:
            values = {i: self._natives[i].numpy() for i in changed}
            self._function("pull", self._pull)()
            for i, value in values.items():
                self._natives[i].assign(value)
            self._values_behind = False
            self._warn_of_kept(changed)
        if slots:
            self._write_own(changed)
            self._slots_behind = False
        elif self._indices("seed"):
            self._write_own(changed, "seed")
        known = self._fingerprint
        self._fingerprint = self._take_fingerprint()
        self._fingerprint[changed] = known[changed]
        for own, count in self._read_counts().items():
            if self._counts[own] not in changed:
                self._counted[own] = count

    @property
    def flush_here(self) -> Callable[[], tf.Tensor]:
        """A function that sends what the worker under which it is called holds back."""
        return self._function("flush", self.flush_op, opened=True)

    @property
    def stats_here(self) -> Callable[[], Any]:
        """A function that gives the counters of the worker under which it is called."""
        return self._function("stats", self.stats_op)

    @property
    def in_use(self) -> bool:
        """Whether any replica may exist."""
        return self._kinds is not None

    # Inside.

    def _function(self, name: str, build_ops: Callable[[], Any], opened: bool = False) -> Any:
        if name not in self._functions:

            def build() -> Any:
                if opened:
                    self.open_op()
                return build_ops()

            self._functions[name] = traced_by_device(build)
        return self._functions[name]

    def _make_handle(self) -> tf.Tensor:
        """Called when a function is about to run on a worker, which is the device now."""
        with self._lock:
            if self._kinds is None:
                with tf.init_scope():
                    self._decide_kinds()
                    self._set()
        return ops.replica_handle(
            shared_name=self.name,
            dtypes=self._dtypes,
            shapes=self._shapes,
            kinds=self._kinds,
            num_shards=self._copy.num_shards,
            num_phases=self._copy.phases,
            num_workers=self._strategy.num_workers,
            staleness=self._staleness,
            wire=self._strategy.dense_wire_dtype,
        )

    def _decide_kinds(self) -> None:
        kinds = []
        for native, role, variable in zip(self._natives, self._roles, self._variables, strict=True):
            kind = {"trainable": "float", "seed": "seed"}.get(role, "own")
            if role == "other" and variable.assigned:
                kind = {tf.float32: "float", tf.int64: "counter"}.get(native.dtype)
                if kind is None:
                    raise ValueError(
                        f"A step assigns the variable {native.name!r} of {native.dtype.name}; with"
                        " dense_staleness there is a rule for float32 (averaged over workers) and"
                        " int64 (added). Use dense_staleness=None, or one of these dtypes."
                    )
                if kind == "float" and np.isinf(native.numpy()).any():
                    raise ValueError(
                        f"A step assigns the variable {native.name!r}, which holds infinity; with"
                        " dense_staleness workers add to a variable what their steps change it by,"
                        " and what is added to infinity is lost. Begin with a finite value, or use"
                        " dense_staleness=None."
                    )
            kinds.append(kind)
        self._kinds = kinds

    def _indices(self, *kinds: str) -> list[int]:
        assert self._kinds is not None
        return [i for i, kind in enumerate(self._kinds) if kind in kinds]

    def _set(self) -> None:
        """The servers' copy becomes what the variables are."""
        counted = self._read_counts()
        for own, count in counted.items():
            if count != self._counted[own]:
                self._natives[own].assign(count)
        self._counted = counted
        values = [native.numpy() for native in self._natives]
        floats = _flat([values[i] for i in self._indices("float")], np.float32)
        counters = _flat([values[i] for i in self._indices("counter")], np.int64)
        rest = b"".join(
            np.ascontiguousarray(values[i]).tobytes() for i in self._indices("own", "seed")
        )
        rest = np.frombuffer(rest, np.uint8)
        num_trainable = sum(
            values[i].size for i, role in enumerate(self._roles) if role == "trainable"
        )
        average = 1.0 / self._workers
        first_weight = average if self._strategy.dense_merge == "average" else 1.0
        self._copy.set(floats, counters, rest, num_trainable, (first_weight, average))
        self._fingerprint = self._take_fingerprint()
        self._kept.clear()

    def _pull(self) -> None:
        """What is exchanged becomes the variables' values, from server to server."""
        kinds = [self._indices(kind) for kind in ("float", "counter")]
        sizes = [[self._shapes[i].num_elements() for i in indices] for indices in kinds]
        for indices, of_kind in zip(kinds, self._copy.pieces_op(sizes), strict=True):
            for i, pieces in zip(indices, of_kind, strict=True):
                with tf.device(self._natives[i].device):
                    value = tf.concat(pieces, 0) if pieces else tf.zeros([0], self._dtypes[i])
                    value = tf.reshape(value, self._shapes[i])
                    # Each worker's steps keep to it, but not what is merged of several.
                    constraint = self._constraints.get(i)
                    self._natives[i].assign(value if constraint is None else constraint(value))

    def _merge_own(self, *kinds: str) -> dict[int, np.ndarray]:
        """What becomes of the workers' own variables, by index: of those that have made steps."""
        only = kinds == ("seed",)
        read = self._function(
            "seeds" if only else "own",
            lambda: ops.replica_own(self._handle_op(), seeds_only=only),
        )
        reads = visit(cluster_devices("worker"), read, self._strategy.is_lost)
        owns = [own for own, steps in reads.values() if steps > 0]
        if not owns:
            return {}
        merged = {}
        begin = 0
        for i in self._indices(*kinds):
            end = begin + self._shapes[i].num_elements() * self._dtypes[i].size
            values = [own[begin:end].view(self._dtypes[i].as_numpy_dtype) for own in owns]
            merge = _MERGES.get(self._roles[i])
            if merge is not None:
                merged[i] = merge(values).reshape(self._shapes[i])
            begin = end
        return merged

    def _write_own(self, changed: list[int], *kinds: str) -> None:
        """Writes what becomes of the workers' own variables, but to those that were changed.

        Args:
          changed: their indices.
          kinds: "seed", of which there is one at least, or all.
        """
        for i, value in self._merge_own(*(kinds or ("own", "seed"))).items():
            if i not in changed:
                self._natives[i].assign(value)

    def _read_counts(self) -> dict[int, int]:
        """By the place of a worker's own count, that of all workers."""
        places = {own: all_ for own, all_ in self._counts.items() if all_ is not None}
        return {own: int(self._natives[all_].numpy()) for own, all_ in places.items()}

    def _changed(self) -> list[int]:
        """The variables on the servers that something else than training has changed."""
        return np.flatnonzero(
            np.any(self._fingerprint != self._take_fingerprint(), axis=1)
        ).tolist()

    def _warn_of_kept(self, changed: list[int]) -> None:
        exchanged = set(self._indices("float", "counter"))
        kept = [i for i in changed if i in exchanged and i not in self._kept]
        self._kept.update(kept)
        if kept:
            logging.warning(
                "changed while steps were made, which do not count for them until the next epoch"
                " begins: %s",
                ", ".join(repr(self._natives[i].name) for i in kept),
            )

    def _take_fingerprint(self) -> np.ndarray:
        """Of the variables on the servers."""

        def fingerprint() -> tf.Tensor:
            parts = []
            for native in self._natives:
                with tf.device(native.device):
                    value = tf.reshape(native.read_value(), [1, -1])
                    # Fingerprint takes no empty row.
                    value = tf.concat([value, tf.zeros([1, 1], value.dtype)], 1)
                    parts.append(tf.raw_ops.Fingerprint(data=value, method="farmhash64"))
            return tf.concat(parts, 0)

        return self._function("fingerprint", fingerprint)().numpy()

    def destroy(self) -> None:
        """Frees the memory that the replicas and their copy on the servers take."""
        self._workers = self._strategy.num_workers
        if self._kinds is None:
            return
        self._destroy_on_workers()
        self._copy.destroy()
        self._kinds = None
        self._functions.pop("pull", None)  # It is for these kinds.

    def _destroy_on_workers(self) -> None:
        def destroy() -> None:
            ops.replica_destroy(self._make_handle())

        visit(cluster_devices("worker"), destroy, lambda device, error: True)
        self._strategy.forget_reports(self)


# What becomes of the workers' own variables, by role: of values in the order of the workers.
_MERGES: dict[str, Callable[[list[np.ndarray]], np.ndarray]] = {
    "slot": lambda values: np.mean(values, axis=0, dtype=np.float64).astype(np.float32),
    "least": lambda values: np.min(values, axis=0),
    "count": lambda values: np.rint(np.mean(values, axis=0)).astype(np.int64),
    # All workers' follow from the first one's.
    "seed": lambda values: values[0],
}


def _check(native: tf.Variable, role: str) -> None:
    if not native.shape.is_fully_defined():
        raise ValueError(
            f"the variable {native.name!r} has the shape {native.shape}, not a fixed one"
        )
    if role in ("trainable", "slot") and native.dtype != tf.float32:
        raise ValueError(
            f"the variable {native.name!r} is {native.dtype.name}; with dense_staleness, variables"
            " that are trained and their optimizers' must be float32 (mixed_bfloat16 has them so)."
            " Use dense_staleness=None for others."
        )


def _flat(values: list[np.ndarray], dtype: Any) -> np.ndarray:
    return (
        np.concatenate([v.ravel().astype(dtype) for v in values]) if values else np.zeros(0, dtype)
    )
