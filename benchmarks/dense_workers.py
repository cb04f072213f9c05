"""The dense variables of workers that take their steps in turn, in this process, on the real ops.

All that is trained is one flat vector; its optimizer's slots and the count of steps are beside it,
as `het_tf.keras.Model.fit` has them (docs/protocol.md, 8).
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import tensorflow as tf

from het_tf import ops

_unique = itertools.count()


@functools.cache
def _integer(value: int) -> tf.Tensor:
    """Making one takes as long as the op that takes it."""
    return tf.constant(value, tf.int64)


@dataclasses.dataclass(frozen=True)
class Optimizer(abc.ABC):
    """Of the dense variables, with Keras's formulas and defaults.

    Attributes:
      learning_rate: what it says.
      initial_slots: what its slots are filled with, one value each.
    """

    learning_rate: float
    initial_slots: ClassVar[tuple[float, ...]] = ()

    @abc.abstractmethod
    def apply(
        self, value: tf.Tensor, slots: Sequence[tf.Tensor], steps: int, gradient: np.ndarray
    ) -> None:
        """One step.

        Args:
          value: handle of a float32 variable [n].
          slots: handles of likewise.
          steps: made before this one, with these slots.
          gradient: float32 [n].
        """


class Sgd(Optimizer):
    """`keras.optimizers.SGD`."""

    def apply(
        self, value: tf.Tensor, slots: Sequence[tf.Tensor], steps: int, gradient: np.ndarray
    ) -> None:
        del slots, steps
        tf.raw_ops.ResourceApplyGradientDescent(var=value, alpha=self.learning_rate, delta=gradient)


class Adagrad(Optimizer):
    """`keras.optimizers.Adagrad`."""

    initial_slots: ClassVar[tuple[float, ...]] = (0.1,)

    def apply(
        self, value: tf.Tensor, slots: Sequence[tf.Tensor], steps: int, gradient: np.ndarray
    ) -> None:
        del steps
        tf.raw_ops.ResourceApplyAdagradV2(
            var=value, accum=slots[0], lr=self.learning_rate, epsilon=1e-7, grad=gradient
        )


class Adam(Optimizer):
    """`keras.optimizers.Adam`."""

    initial_slots: ClassVar[tuple[float, ...]] = (0.0, 0.0)

    def apply(
        self, value: tf.Tensor, slots: Sequence[tf.Tensor], steps: int, gradient: np.ndarray
    ) -> None:
        beta_1, beta_2 = 0.9, 0.999
        tf.raw_ops.ResourceApplyAdam(
            var=value,
            m=slots[0],
            v=slots[1],
            beta1_power=beta_1 ** (steps + 1),
            beta2_power=beta_2 ** (steps + 1),
            lr=self.learning_rate,
            beta1=beta_1,
            beta2=beta_2,
            epsilon=1e-7,
            grad=gradient,
        )


OPTIMIZERS = {"adam": Adam, "adagrad": Adagrad, "sgd": Sgd}


class DenseWorkers(abc.ABC):
    """What the workers train. Worker numbers are 0, 1, ...; `weights`, then `update`, is a step."""

    @abc.abstractmethod
    def weights(self, worker: int) -> np.ndarray:
        """A step begins: what the worker computes it with, float32 [n]."""

    @abc.abstractmethod
    def update(self, worker: int, gradient: np.ndarray) -> None:
        """A step ends. gradient: float32 [n]."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Every worker sends what it has not sent yet."""

    @abc.abstractmethod
    def shared_weights(self) -> np.ndarray:
        """What the server has, float32 [n]."""

    @abc.abstractmethod
    def stats(self) -> dict[str, int]:
        """bytes_up and bytes_down, of all workers, among others."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees everything."""


class OneForAll(DenseWorkers):
    """dense_staleness None: every worker reads, and steps on, the variables on the server.

    Bytes are those of the weights and of the gradients alone: nothing is sent here.
    """

    def __init__(self, initial: np.ndarray, optimizer: Optimizer):
        """Makes the variables. initial: float32 [n]."""
        self._optimizer = optimizer
        self._value = tf.Variable(initial)
        self._slots = [tf.Variable(np.full_like(initial, x)) for x in optimizer.initial_slots]
        self._steps = 0

    def weights(self, worker: int) -> np.ndarray:
        del worker
        return self._value.numpy()

    def update(self, worker: int, gradient: np.ndarray) -> None:
        del worker
        slots = [slot.handle for slot in self._slots]
        self._optimizer.apply(self._value.handle, slots, self._steps, gradient)
        self._steps += 1

    def flush(self) -> None:
        pass

    def shared_weights(self) -> np.ndarray:
        return self._value.numpy()

    def stats(self) -> dict[str, int]:
        bytes_each_way = self._steps * self._value.shape.num_elements() * 4
        return {"bytes_up": bytes_each_way, "bytes_down": bytes_each_way}

    def close(self) -> None:
        del self._value, self._slots


class Replicas(DenseWorkers):
    """A replica for each worker, and one server.

    What `fit` does beside a step happens here between its beginning and its end: the replica asks
    what it misses and exchanges what is due, and takes it over when its next step begins. At
    dense_staleness 0 a step is sent when the worker's next one begins, in the message that reads.
    So the steps of N workers overlap as if each took as long as a turn of all N.
    """

    def __init__(self, workers: int, staleness: int, initial: np.ndarray, optimizer: Optimizer):
        """Makes the replicas and what they have in common.

        Args:
          workers: how many.
          staleness: dense_staleness.
          initial: float32 [n].
          optimizer: of which each replica has slots of its own.
        """
        self._optimizer = optimizer
        self._staleness = staleness
        num_slots = len(optimizer.initial_slots)
        self._dtypes = [tf.float32] * (1 + num_slots) + [tf.int64]
        self._shapes = [initial.shape] * (1 + num_slots) + [[]]
        name = f"dense_workers/{next(_unique)}"
        self._server = ops.dense_handle(shared_name=name)
        slots = [np.full_like(initial, x).tobytes() for x in optimizer.initial_slots]
        ops.dense_set(
            self._server,
            initial,
            np.zeros_like(initial),
            np.zeros(1, np.int64),
            np.frombuffer(b"".join(slots), np.uint8),
            tf.constant(0, tf.int64),
            num_workers=workers,
            total=workers**-0.5 if isinstance(optimizer, Adam) else 1.0,
        )
        self._replicas = [
            ops.replica_handle(
                shared_name=f"{name}/{worker}",
                dtypes=self._dtypes,
                shapes=self._shapes,
                kinds=["float"] + ["own"] * num_slots + ["counter"],
                num_shards=1,
                num_workers=workers,
                staleness=staleness,
            )
            for worker in range(workers)
        ]
        self._variables = [
            ops.replica_variables(
                replica, n=len(self._dtypes), dtypes=self._dtypes, shapes=self._shapes
            )
            for replica in self._replicas
        ]
        self._made = [0] * workers  # steps
        self._unsettled = [0] * workers
        self._pushes = [0] * workers  # exchanged

    def weights(self, worker: int) -> np.ndarray:
        self._settle(worker, reads=True)
        value = self._read(worker, 0).numpy()
        if self._staleness > 0:
            self._exchange(worker, asks=True)
            missing = ops.replica_settle(
                self._replicas[worker], self._variables[worker], _integer(0), reads=True
            )
            if bool(missing) or self._replica_stats(worker)["pushes"] > self._pushes[worker]:
                self._exchange(worker)
        return value

    def update(self, worker: int, gradient: np.ndarray) -> None:
        value, *slots, steps = self._variables[worker]
        self._optimizer.apply(value, slots, self._made[worker], gradient)
        self._made[worker] += 1
        tf.raw_ops.AssignAddVariableOp(resource=steps, value=_integer(1))
        self._unsettled[worker] += 1

    def flush(self) -> None:
        for worker in range(len(self._replicas)):
            self._settle(worker, reads=False, everything=True)

    def shared_weights(self) -> np.ndarray:
        return ops.dense_get(self._server).floats.numpy()

    def owed(self) -> np.ndarray:
        """What the server has of the workers' steps and has not added to the weights yet."""
        return ops.dense_get(self._server).owed.numpy()

    def steps_known(self, worker: int) -> int:
        """Steps of all workers that a worker's replica holds, its own included."""
        return int(self._read(worker, len(self._dtypes) - 1))

    def stats(self) -> dict[str, int]:
        """The counters of all replicas, summed (`ReplicaCounter`)."""
        total: collections.Counter[str] = collections.Counter()
        for worker in range(len(self._replicas)):
            total.update(self._replica_stats(worker))
        return dict(total)

    def close(self) -> None:
        for replica in self._replicas:
            ops.replica_destroy(replica)
        tf.raw_ops.DestroyResourceOp(resource=self._server)

    def _settle(self, worker: int, reads: bool, everything: bool = False) -> None:
        replica, variables = self._replicas[worker], self._variables[worker]
        steps, self._unsettled[worker] = self._unsettled[worker], 0
        while bool(
            ops.replica_settle(replica, variables, _integer(steps), reads=reads, all=everything)
        ):
            self._exchange(worker)
            steps, reads = 0, False

    def _exchange(self, worker: int, asks: bool = False) -> None:
        replica = self._replicas[worker]
        if not asks:
            self._pushes[worker] = self._replica_stats(worker)["pushes"]
        ticket, requests = ops.replica_request(replica, num_shards=1, asks=asks)
        ops.replica_receive(replica, ticket, [ops.dense_sync(self._server, requests[0])])

    def _read(self, worker: int, variable: int) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(
            resource=self._variables[worker][variable], dtype=self._dtypes[variable]
        )

    def _replica_stats(self, worker: int) -> dict[str, int]:
        names, values = (
            each.numpy().tolist() for each in ops.replica_stats(self._replicas[worker])
        )
        return dict(zip([name.decode() for name in names], values, strict=True))
