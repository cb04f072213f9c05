"""Replicas of the dense variables on the workers (docs/protocol.md, section 8).

The variables stay on the parameter servers. While `fit` runs, every worker trains its own replica.
The servers also hold a flat copy of the variables. The replicas exchange contributions with this
copy under a bound. `begin` fills the copy from the variables, and `write_back` updates the
variables. `replica_ops` has the ops of training steps.
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
from het_tf.runtime.broadcast import TracedByDevice, cluster_devices, visit
from het_tf.runtime.validation import INT32_MAX


class NoRuleError(ValueError):
    """Replicas have no rule for a variable. The message names the variable."""


class ReplicaStrategy(Protocol):
    """The part of the strategy's interface that replicas use.

    Attributes:
      dense_wire_dtype: dtype of contributions in messages.
      health: its `ClusterHealth`, which knows whether the task of a device is down.
      held: its `HeldUpdates`, which has the reports of replicas.
    """

    dense_wire_dtype: str
    health: Any
    held: Any

    @property
    def num_workers(self) -> int:
        """Number of workers of the cluster."""
        ...


class DenseReplicas(ReplicaOps):
    """The replicas of one training's dense variables.

    The methods of this class run eagerly on the coordinator, while no step runs.
    """

    def __init__(
        self,
        strategy: ReplicaStrategy,
        staleness: int | None,
        trainable: Sequence[tf.Variable],
        slots: Sequence[tf.Variable],
        least: Sequence[tf.Variable],
        seeds: Sequence[tf.Variable],
        others: Sequence[tf.Variable],
        owed: tf.Variable | None = None,
        counts_in_full: bool = True,
        constraints: Sequence[Callable[[tf.Tensor], tf.Tensor] | None] = (),
        counts: Sequence[tuple[tf.Variable, tf.Variable]] = (),
        same: Sequence[tf.Variable] = (),
    ):
        """Stores the variables. Creates no replica.

        Args:
          strategy: strategy of the cluster.
          staleness: bound on unsent steps and on missed steps. None: replicas exchange nothing.
          trainable: float32 variables. Contributions are added, over several exchanges.
          slots: float32 optimizer slots. Every worker has its own, and `write_back` stores their
            mean.
          least: variables of which every worker has its own. `write_back` stores the smallest.
          seeds: states of random generators, 32-bit integers. Every worker has a different one.
          others: other variables. If a step assigns a float32 variable, its changes are averaged.
            If a step assigns an int64 variable, its changes are added. Variables that no step
            assigns do not change.
          owed: float32 [number of elements of `trainable`], contributions that the variables do not
            hold yet. None if there is no `trainable`.
          counts_in_full: whether a contribution to `trainable` counts in full in the end, or as
            1 / sqrt(workers).
          constraints: constraints of `trainable`, in the same order. `write_back` applies them.
          counts: pairs of int64 variables. The first counts a worker's own steps, and `write_back`
            stores the mean. The second is one of `others` and counts all workers' steps. If other
            code than training changes the second, the first is set to the same value.
          same: variables that synchronous steps keep the same on all workers. If there are some,
            `write_back` stores everything.

        Raises:
          NoRuleError: a variable has no rule. The message names the variable.
        """
        self._strategy = strategy
        roles = {
            "trainable": trainable,
            "slot": slots,
            "least": least,
            "seed": seeds,
            "other": others,
            "count": [own for own, _ in counts],
            "same": same,
        }
        all_natives = [native for natives in roles.values() for native in natives]
        self._roles = [role for role, natives in roles.items() for _ in natives]
        for native, role in zip(all_natives, self._roles, strict=True):
            _check(native, role)
        floats = sum(native.shape.num_elements() for native in trainable)
        self._staleness = INT32_MAX if staleness is None else staleness
        name = f"dense/{uuid.uuid4().hex}"
        super().__init__(name, all_natives, DenseCopy(name, floats, self._staleness))
        self._owed = owed
        self._counts_in_full = counts_in_full
        self._are_same = bool(same)
        self.steps_together = 0
        self._constraints = dict(enumerate(constraints))
        places = {id(native): i for i, native in enumerate(self._natives)}
        # Index of every count of own steps -> index of the count of all workers' steps.
        self._counts = {places[id(own)]: places.get(id(all_)) for own, all_ in counts}
        # Values of the counts of all workers' steps after the last training.
        self._counted = self._read_counts()
        self._workers = strategy.num_workers
        self._lock = threading.Lock()
        self._kinds: list[str] | None = None
        # Of the variables and of `owed`, after the last `_set` or `write_back`.
        self._fingerprint: np.ndarray | None = None
        # Indices of variables that other code changed during training. They were not written back.
        self._kept: set[int] = set()
        self._values_behind = self._slots_behind = False
        self._functions: dict[str, Any] = {}

    def begin(self, workers: int | None = None) -> None:
        """Restarts the replicas from the variables if variables or the number of workers changed.

        Called before steps are scheduled. Does nothing before the step's function is traced,
        because the assigned variables are unknown until then. Before a restart, the variables of
        which every worker has its own are written back.

        Args:
          workers: number of workers that make the next steps. None: all.
        """
        workers = workers or self._strategy.num_workers
        others, self._workers = workers != self._workers, workers
        if self._kinds is None:
            return
        changed = self._changed()
        if not (changed or others):
            return
        # Keeps the workers' slots, except for the slots that were changed, too.
        self._write_own(changed)
        # An existing replica would make its next step from the old values.
        self._destroy_on_workers()
        self._set([] if self._owed_changed() else self._replaced(changed))

    def note_together(self, steps: int) -> None:
        """Records synchronous steps that all workers have made, or those that made most."""
        self.steps_together += steps

    def restart(self) -> None:
        """Restarts all replicas with the values of those that made most steps."""
        self.write_back(slots=True)
        self._destroy_on_workers()
        self._set([])

    def note_steps(self) -> None:
        """Records that steps were made, so that the variables need a `write_back`."""
        self._values_behind = self._slots_behind = True

    def write_back(self, slots: bool) -> None:
        """Updates the variables from the copy and the workers. Call `flush_here` on them first.

        A variable that other code has changed since the last call keeps its value. The next `begin`
        restarts the replicas from this value.

        Args:
          slots: whether to update the optimizers' slots, too. If not, seeds are the only updated
            variables of which workers have their own. Later random numbers then differ.
        """
        slots = (slots or self._are_same) and self._slots_behind
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
        old_fingerprint = self._fingerprint
        self._fingerprint = self._take_fingerprint()
        self._fingerprint[changed] = old_fingerprint[changed]
        for own, count in self._read_counts().items():
            if self._counts[own] not in changed:
                self._counted[own] = count

    @property
    def flush_here(self) -> TracedByDevice:
        """A function that flushes the replica of the current device's worker."""
        return self._function("flush", self.flush_op, opened=True)

    @property
    def stats_here(self) -> TracedByDevice:
        """A function that returns the counters of the current device's worker."""
        return self._function("stats", self.stats_op)

    @property
    def in_use(self) -> bool:
        """Whether replicas may exist."""
        return self._kinds is not None

    def _function(
        self, name: str, build_ops: Callable[[], Any], opened: bool = False
    ) -> TracedByDevice:
        if name not in self._functions:

            def build() -> Any:
                if opened:
                    self.open_op()
                return build_ops()

            self._functions[name] = TracedByDevice(build)
        return self._functions[name]

    def _make_handle(self) -> tf.Tensor:
        """Creates the handle of the current device's worker, before a function runs there."""
        with self._lock:
            if self._kinds is None:
                try:
                    with tf.init_scope():
                        self._decide_kinds()
                        self._set([] if self._owed_changed() else self._changed())
                except BaseException:
                    # The worker of this thread may have died. The thread of another tries again.
                    self._kinds = None
                    raise
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
                check_assignable(native)
                kind = "float" if native.dtype == tf.float32 else "counter"
            kinds.append(kind)
        self._kinds = kinds

    def _indices(self, *kinds: str) -> list[int]:
        assert self._kinds is not None
        return [i for i, kind in enumerate(self._kinds) if kind in kinds]

    def _set(self, replaced: list[int]) -> None:
        """Fills the copy on the servers from the variables.

        Args:
          replaced: indices of variables with values of other code, to which nothing is owed.
        """
        counted = self._read_counts()
        for own, count in counted.items():
            if count != self._counted[own]:
                self._natives[own].assign(count)
        self._counted = counted
        values = [native.numpy() for native in self._natives]
        owed = np.zeros(0, np.float32) if self._owed is None else self._owed.numpy()
        ends = np.cumsum([0, *(value.size for value in values)])
        for i in replaced:  # Trained variables are the first ones, in both.
            owed[ends[i] : ends[i + 1]] = 0
        floats = _flat([values[i] for i in self._indices("float")], np.float32)
        counters = _flat([values[i] for i in self._indices("counter")], np.int64)
        packed = b"".join(
            np.ascontiguousarray(values[i]).tobytes() for i in self._indices("own", "seed")
        )
        rest = np.frombuffer(packed, np.uint8)
        steps = max(counted.values(), default=0)
        self.steps_together = 0
        total = 1.0 if self._counts_in_full else self._workers**-0.5
        self._copy.set(floats, owed, counters, rest, steps, self._workers, total)
        self._fingerprint = self._take_fingerprint()
        self._kept.clear()

    def _pull(self) -> None:
        """Assigns the values of the copy to the variables, from server to server."""
        kinds = [self._indices(kind) for kind in ("float", "counter")]
        sizes = [[self._shapes[i].num_elements() for i in indices] for indices in kinds]
        float_pieces, counter_pieces, owed = self._copy.pieces_op(*sizes)
        if self._owed is not None:
            with tf.device(self._owed.device):
                self._owed.assign(tf.concat(owed, 0))
        for indices, of_kind in zip(kinds, (float_pieces, counter_pieces), strict=True):
            for i, pieces in zip(indices, of_kind, strict=True):
                with tf.device(self._natives[i].device):
                    value = tf.concat(pieces, 0) if pieces else tf.zeros([0], self._dtypes[i])
                    value = tf.reshape(value, self._shapes[i])
                    # The steps of a worker meet the constraint, but the merged value may not.
                    constraint = self._constraints.get(i)
                    self._natives[i].assign(value if constraint is None else constraint(value))

    def _merge_own(self, *kinds: str) -> dict[int, np.ndarray]:
        """Merges the variables of which every worker has its own. Returns the values by index.

        Only workers that have made steps count.

        Args:
          *kinds: "own" and "seed", or only "seed".
        """
        only = kinds == ("seed",)
        read = self._function(
            "seeds" if only else "own",
            lambda: ops.replica_own(self._handle_op(), seeds_only=only),
        )
        reads = visit(cluster_devices("worker"), read, self._strategy.health.is_lost)
        least = max([1, *(steps for _, steps in reads.values())]) if self._are_same else 1
        owns = [own for own, steps in reads.values() if steps >= least]
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
        """Writes the variables of which every worker has its own, after merging.

        Args:
          changed: indices of variables to skip, because other code has changed them.
          *kinds: "seed" to write only seeds. Empty: all.
        """
        for i, value in self._merge_own(*(kinds or ("own", "seed"))).items():
            if i not in changed:
                self._natives[i].assign(value)

    def _read_counts(self) -> dict[int, int]:
        """Reads the counts of all workers' steps, by the index of the count of own steps."""
        places = {own: all_ for own, all_ in self._counts.items() if all_ is not None}
        return {own: int(self._natives[all_].numpy()) for own, all_ in places.items()}

    def _changed(self) -> list[int]:
        """Returns the indices of variables that other code than training has changed."""
        if self._fingerprint is None:
            return []
        differ = np.any(self._fingerprint != self._take_fingerprint(), axis=1)
        return np.flatnonzero(differ[: len(self._natives)]).tolist()

    def _replaced(self, changed: list[int]) -> list[int]:
        """Returns those of the changed variables that are more than rounded off.

        `keras.callbacks.SwapEMAWeights` swaps weights and averages back and forth by additions.
        """
        merged = self._copy.floats()
        ends = np.cumsum([0, *(shape.num_elements() for shape in self._shapes)])
        replaced = []
        for i in changed:
            if self._roles[i] != "trainable":
                continue
            value = merged[ends[i] : ends[i + 1]].reshape(self._shapes[i])
            constraint = self._constraints.get(i)
            value = value if constraint is None else constraint(value)
            if not np.allclose(self._natives[i].numpy(), value, rtol=1e-4, atol=1e-6):
                replaced.append(i)
        return replaced

    def _owed_changed(self) -> bool:
        """Whether other code than training has changed `owed`, such as a restored checkpoint."""
        if self._fingerprint is None or self._owed is None:
            return True
        return bool(np.any(self._fingerprint[-1] != self._take_fingerprint()[-1]))

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
        """Computes a fingerprint of every variable and of `owed`, uint8 [variables, 8]."""

        def fingerprint() -> tf.Tensor:
            parts = []
            for native in [*self._natives, *([] if self._owed is None else [self._owed])]:
                with tf.device(native.device):
                    value = tf.reshape(native.read_value(), [1, -1])
                    # The op Fingerprint rejects empty rows.
                    value = tf.concat([value, tf.zeros([1, 1], value.dtype)], 1)
                    parts.append(tf.raw_ops.Fingerprint(data=value, method="farmhash64"))
            return tf.concat(parts, 0)

        return self._function("fingerprint", fingerprint)().numpy()

    def destroy(self) -> None:
        """Frees the replicas, and their copy on the servers."""
        self._workers = self._strategy.num_workers
        if self._kinds is None:
            return
        self._destroy_on_workers()
        self._copy.destroy()
        self._kinds = None
        self.steps_together = 0
        self._functions.pop("pull", None)  # It depends on `_kinds`.

    def _destroy_on_workers(self) -> None:
        def destroy() -> None:
            ops.replica_destroy(self._make_handle())

        visit(cluster_devices("worker"), destroy, lambda device, error: True)
        self._strategy.held.forget_reports(self)


# Merge rules for variables of which every worker has its own, by role. The arguments are the
# workers' values, in the order of the workers.
_MERGES: dict[str, Callable[[list[np.ndarray]], Any]] = {
    "slot": lambda values: np.mean(values, axis=0, dtype=np.float64).astype(np.float32),
    "least": lambda values: np.min(values, axis=0),
    "count": lambda values: np.rint(np.mean(values, axis=0)).astype(np.int64),
    "same": lambda values: values[0],
    # The states of all workers are derived from the first worker's state.
    "seed": lambda values: values[0],
}


def check_assignable(native: tf.Variable) -> None:
    """Raises a NoRuleError if there is no rule for a variable that a step assigns."""
    if native.dtype not in (tf.float32, tf.int64):
        raise NoRuleError(
            f"A step assigns the variable {native.name!r} of {native.dtype.name}; with"
            " dense_staleness there is a rule for float32 (averaged over workers) and"
            " int64 (added). Use dense_staleness=None, or one of these dtypes."
        )
    if native.dtype == tf.float32 and np.isinf(native.numpy()).any():
        raise NoRuleError(
            f"A step assigns the variable {native.name!r}, which holds infinity; with"
            " dense_staleness workers add to a variable what their steps change it by,"
            " and what is added to infinity is lost. Begin with a finite value, or use"
            " dense_staleness=None."
        )


def _check(native: tf.Variable, role: str) -> None:
    if not native.shape.is_fully_defined():
        raise NoRuleError(
            f"the variable {native.name!r} has the shape {native.shape}, not a fixed one"
        )
    if role in ("trainable", "slot") and native.dtype != tf.float32:
        raise NoRuleError(
            f"the variable {native.name!r} is {native.dtype.name}; with dense_staleness, variables"
            " that are trained and their optimizers' must be float32 (mixed_bfloat16 has them so)."
            " Use dense_staleness=None for others."
        )


def _flat(values: list[np.ndarray], dtype: Any) -> np.ndarray:
    return (
        np.concatenate([v.ravel().astype(dtype) for v in values]) if values else np.zeros(0, dtype)
    )
