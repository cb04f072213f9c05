"""Bytes between workers and parameter servers a training step, counted twice.

    python benchmarks/cluster_bytes.py --staleness=0,10,100,unbounded

Trains one embedding with row-wise Adagrad on ids drawn from a Zipf distribution, on a cluster of
processes on localhost, without a cache and then with one for each staleness. All runs see the same
batches, new ones in every step. The steps of the warm-up are not counted: by default they fill the
caches, since a cache that is still filling sends less. Updates that still wait in a cache at the
end are not counted either; for staleness s to send as many as it keeps back, let a worker make a
multiple of s steps.

  counted   the messages of het_tf, by its own counters: `HetEmbedding.cache_stats()`
  kernel    payload of every TCP connection between a worker and a parameter server (tcp_bytes.py):
            all that TensorFlow sends there, without TCP and IP headers. The coordinator's
            connections are others and not in it.

The kernel also sees gRPC's framing and the reads of the layer's two small variables, which live on
the parameter servers. The last row, one batch over and over with nothing to send, shows what they
come to. Up is from a worker to the parameter servers. A step is one batch on one worker; ms/step
is the time it takes while the other workers run theirs.

Exit status 1 if the kernel's total of a run is further than --tolerance from het_tf's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import time

import numpy as np
import tcp_bytes
import tensorflow as tf
from absl import app, flags
from zipf import zipf_ids

import het_tf

_IDS = flags.DEFINE_integer("ids", 4096, "ids in a batch")
_ROWS = flags.DEFINE_integer("rows", 1_000_000, "keys that ids are drawn from")
_DIM = flags.DEFINE_integer("dim", 128, "columns of a row")
_EXPONENT = flags.DEFINE_float("exponent", 1.05, "of the Zipf distribution")
_STEPS = flags.DEFINE_integer("steps", 400, "counted steps of each run, of all workers together")
_WARMUP = flags.DEFINE_integer("warmup", 400, "steps before those")
_CAPACITY = flags.DEFINE_integer("capacity", 100_000, "rows of a worker's cache")
_STALENESS = flags.DEFINE_list("staleness", ["0", "10", "100", "unbounded"], "one run each")
_WORKERS = flags.DEFINE_integer("workers", 2, "worker processes")
_PS = flags.DEFINE_integer("ps", 2, "parameter server processes")
_TOLERANCE = flags.DEFINE_float("tolerance", 0.1, "between the two counts, relative")
_JSON = flags.DEFINE_string("json", None, "file to write the figures to")

_STEPS_PER_CLOSURE = 10
_IDLE_STEPS = 50


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a run measured. Bytes are of one step."""

    mode: str
    ms_per_step: float
    hits: float  # share of the unique keys of a batch that were in the cache
    stale_hits: float  # share of them whose row was sent again, being too old
    up: float
    kernel_up: float
    down: float
    kernel_down: float

    @property
    def total(self) -> float:
        """Bytes counted, up and down."""
        return self.up + self.down

    @property
    def deviation(self) -> float:
        """How far the kernel's total is from het_tf's, relative."""
        kernel = self.kernel_up + self.kernel_down
        return abs(kernel / self.total - 1) if self.total else math.inf


class Run:
    """One table, its caches, and the training of it."""

    def __init__(
        self,
        cluster: het_tf.distribute.LocalCluster,
        strategy: het_tf.distribute.HetParameterServerStrategy,
        cache: het_tf.CacheConfig | None,
    ):
        """Makes the table on the parameter servers of `strategy`."""
        self._cluster = cluster
        self._strategy = strategy
        with strategy.scope():
            self._embedding = het_tf.layers.HetEmbedding(
                _DIM.value,
                optimizer=het_tf.optimizers.RowWiseAdagrad(0.05),
                embeddings_initializer="uniform",
                seed=1,
                cache=cache,
            )
            self._embedding.build()
        self._function = tf.function(
            self._steps, input_signature=[tf.TensorSpec([None, None], tf.int64)]
        )

    def measure(self, mode: str, warmup: np.ndarray, batches: np.ndarray) -> Figures:
        """Trains on `warmup`, then counts on `batches`. Both: int64 [steps, ids]."""
        self._train(warmup)
        counters, received = self._embedding.cache_stats(), self._received()
        start = time.perf_counter()
        self._train(batches)
        seconds = time.perf_counter() - start
        received_after = self._received()
        counted = {
            name: value - counters[name] for name, value in self._embedding.cache_stats().items()
        }
        kernel_up, kernel_down = (
            tcp_bytes.growth(before, after)
            for before, after in zip(received, received_after, strict=True)
        )
        steps = len(batches)
        assert counted["lookups"] == steps, "a worker was lost, or repeated a step"
        self._embedding.table.clear()  # frees the memory
        return Figures(
            mode,
            1000 * seconds * _WORKERS.value / steps,
            counted["hits"] / counted["keys"],
            counted["refreshes"] / counted["keys"],
            counted["bytes_up"] / steps,
            kernel_up / steps,
            counted["bytes_down"] / steps,
            kernel_down / steps,
        )

    def _steps(self, batches: tf.Tensor) -> None:
        for ids in batches:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.reduce_sum(self._embedding(ids), -1) - 1.0))
            variables = self._embedding.trainable_variables
            gradients = tape.gradient(loss, variables)
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign(gradient)  # as an optimizer does

    def _train(self, batches: np.ndarray) -> None:
        for first in range(0, len(batches), _STEPS_PER_CLOSURE):
            part = tf.constant(batches[first : first + _STEPS_PER_CLOSURE])
            self._strategy.coordinator.schedule(self._function, args=(part,))
        self._strategy.join()

    def _received(self) -> tuple[dict, dict]:
        """What the kernel has counted so far, up and down."""
        workers = [self._cluster.process("worker", i).pid for i in range(_WORKERS.value)]
        servers = [self._cluster.process("ps", i).pid for i in range(_PS.value)]
        return (
            tcp_bytes.received(receivers=servers, senders=workers),
            tcp_bytes.received(receivers=workers, senders=servers),
        )


def cache_config(staleness: str) -> het_tf.CacheConfig:
    """The cache of a run. staleness: a number or "unbounded"."""
    bound = None if staleness == "unbounded" else int(staleness)
    return het_tf.CacheConfig(_CAPACITY.value, policy="lfu", staleness=bound)


def measure_all() -> tuple[list[Figures], Figures]:
    """Figures of the runs, the one without a cache first; and those of a run with no messages."""
    shape = (_WARMUP.value + _STEPS.value, _IDS.value)
    ids = zipf_ids(np.random.default_rng(1), _ROWS.value, _EXPONENT.value, shape)
    modes = [("no cache", None)] + [(f"s={s}", cache_config(s)) for s in _STALENESS.value]
    with het_tf.distribute.LocalCluster(_WORKERS.value, _PS.value) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        runs = []
        for mode, cache in modes:
            run = Run(cluster, strategy, cache)
            runs.append(run.measure(mode, ids[: _WARMUP.value], ids[_WARMUP.value :]))
        one_batch = np.broadcast_to(ids[0], (_IDLE_STEPS, _IDS.value))
        run = Run(cluster, strategy, het_tf.CacheConfig(_IDS.value, staleness=None))
        idle = run.measure("no messages", one_batch, one_batch)
    return runs, idle


def print_table(runs: list[Figures], idle: Figures) -> None:
    """The figures, bytes in kB (1000 bytes)."""
    print(f"{'':14}{'':>9}{'':>16}{'-- up, kB/step --':>24}{'-- down, kB/step --':>24}")
    print(
        f"{'':14}{'ms/step':>9}{'hits':>8}{'stale':>8}"
        + 2 * f"{'counted':>8}{'kernel':>8}{'ratio':>8}"
        + f"{'bytes less':>12}"
    )
    for run in [*runs, idle]:
        line = f"{run.mode:14}{run.ms_per_step:9.1f}{run.hits:8.1%}{run.stale_hits:8.1%}"
        for kernel, counted in ((run.kernel_up, run.up), (run.kernel_down, run.down)):
            ratio = f"{kernel / counted:8.3f}" if counted else f"{'':8}"
            line += f"{counted / 1000:8.1f}{kernel / 1000:8.1f}{ratio}"
        print(line + ("" if run is idle else f"{1 - run.total / runs[0].total:12.1%}"))


def main(argv: list[str]) -> int:
    del argv
    runs, idle = measure_all()
    print(
        f"{_WORKERS.value} workers, {_PS.value} parameter servers, {_IDS.value} ids a batch of"
        f" {_ROWS.value} rows, Zipf({_EXPONENT.value}), dim {_DIM.value}, caches of"
        f" {_CAPACITY.value} rows, {_STEPS.value} steps after {_WARMUP.value}"
    )
    print_table(runs, idle)
    if _JSON.value:
        everything = [dataclasses.asdict(run) for run in [*runs, idle]]
        pathlib.Path(_JSON.value).write_text(json.dumps(everything, indent=1))
    apart = [run.mode for run in runs if run.deviation > _TOLERANCE.value]
    if apart:
        print(f"the two counts are more than {_TOLERANCE.value:.0%} apart: {', '.join(apart)}")
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)
