"""Rows that move in synchronous steps, by the order of the input: Herald's table.

    python benchmarks/herald.py --json=herald.json

Workers with real caches and a shard, in this process (real ops, `ServeStep`). Every step trains
--batch examples on each worker. Pulls are rows that the shard sends, pushes are rows that workers
send; both relative to the naive mode:

  naive           examples in turn, every update is pushed at the end of its step
  on-demand       examples in turn, a row is pushed when another worker needs it
  location-aware  examples go to the workers that cache most of their rows, every update is pushed
  both            the two together

  ids             ids of Criteo's shape whose fields go together (netns/criteo_shape.py)
  independent     the same, each field shuffled on its own
  criteo          lines of Criteo's format (--criteo)
  movielens       users and movies of MovieLens 100K, in a random order (--movielens)

Planning is the time of the op for a step, on one thread, as a share of --step_ms.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import pathlib
import time

import numpy as np
import one_process
import tensorflow as tf
from absl import app, flags
from netns import criteo_shape

from het_tf import initializers, ops, optimizers
from het_tf.datasets import movielens

_DATA = flags.DEFINE_list("data", ["ids", "independent"], "ids, independent, criteo, movielens")
_CRITEO = flags.DEFINE_string("criteo", None, "file of lines of Criteo's format")
_MOVIELENS = flags.DEFINE_string("movielens", None, "data_dir of tensorflow-datasets")
_WORKERS = flags.DEFINE_integer("workers", 8, "workers")
_BATCH = flags.DEFINE_integer("batch", 128, "examples of a worker's step")
_STEPS = flags.DEFINE_integer("steps", 200, "steps")
_WARM = flags.DEFINE_integer("warm", 100, "of them, before rows are counted")
_PERCENT = flags.DEFINE_float("percent", 10, "rows that a cache holds, of all")
_POLICY = flags.DEFINE_string("policy", "lru", "of the caches")
_DIM = flags.DEFINE_integer("dim", 8, "columns of a row")
_JSON = flags.DEFINE_string("json", None, "file to write the figures to")

_MODES = {
    "naive": (False, False),
    "on-demand": (False, True),
    "location-aware": (True, False),
    "both": (True, True),
}
_unique = itertools.count()


def keys_of(data: str) -> tuple[np.ndarray, int]:
    """Returns keys, int64 [examples, columns], and the number of rows."""
    count = _WORKERS.value * _BATCH.value * _STEPS.value
    if data == "movielens":
        (train, _), *_ = movielens.load_arrays(_MOVIELENS.value)
        keys = np.stack([train["user"], train["movie"] + 100_000], 1).astype(np.int64)
        return np.random.default_rng(1).permutation(keys), 943 + 1682
    if data == "criteo":
        lines = pathlib.Path(_CRITEO.value).read_text().splitlines()
        fields = [line.split("\t")[14:40] for line in lines]
        columns = []
        for column, values in enumerate(zip(*fields, strict=True)):
            _, numbers = np.unique(np.array(values), return_inverse=True)
            columns.append(numbers + (column << 32))
        keys = np.stack(columns, 1).astype(np.int64)
        return keys, len(np.unique(keys))
    keys = criteo_shape.Generator(1).draw(count, 0).ids.astype(np.int64)
    if data == "independent":
        rng = np.random.default_rng(2)
        keys = np.stack([rng.permutation(column) for column in keys.T], 1)
    return keys, criteo_shape.KEYS


class SynchronousWorkers:
    """Workers with caches and a shard, whose steps count as one."""

    def __init__(self, workers: int, dim: int, capacity: int, pushes_on_demand: bool):
        """Makes the table and the caches."""
        name = f"herald/{next(_unique)}"
        row = {
            "dim": dim,
            "optimizer": optimizers.RowWiseAdagrad(0.1).spec(),
            "initializer": initializers.spec("uniform"),
        }
        self._table = ops.table_handle(shared_name=name, shard=0, **row)
        self._caches = [
            ops.cache_handle(
                shared_name=f"{name}/{worker}",
                capacity=capacity,
                policy=_POLICY.value,
                read_bound=0,
                write_bound=0,
                synchronous=True,
                **row,
            )
            for worker in range(workers)
        ]
        for cache in self._caches:
            ops.cache_keep(cache, pushes_on_demand)
        self._steps = ops.step_handle(shared_name=name)
        ops.step_begin(self._steps, 1, workers)
        self._pool = concurrent.futures.ThreadPoolExecutor(workers)
        self._dim = dim
        self._tickets: list[tf.Tensor] = []

    def step(self, number: int, ids: list[np.ndarray], due: list[np.ndarray]) -> None:
        """Pushes due rows, looks the ids up, and updates them."""

        def run(worker: int) -> None:
            cache = self._caches[worker]
            ops.cache_push(cache, due[worker])
            unique_ids = ops.unique_ids(tf.constant(ids[worker].ravel(), tf.int64))
            ticket, (request,) = ops.cache_lookup(cache, unique_ids, num_shards=1)
            place = tf.constant([1, worker, number, 0], tf.int64)
            header = tf.reshape(tf.bitcast(place, tf.uint8), [-1])
            message = ops.pack_frames([header, request, tf.zeros([0], tf.uint8)])
            reply = ops.serve_step(self._steps, [self._table], message)
            reply, _ = ops.unpack_frames(reply, n=2)
            ops.cache_install(cache, ticket, [reply])
            gradients = tf.ones([ids[worker].size, self._dim])
            ops.cache_update(cache, ticket, gradients, 0.1)

        list(self._pool.map(run, range(len(self._caches))))

    def counters(self) -> dict[str, int]:
        """Rows that the shard has sent, rows that the workers have pushed, and bytes of both."""
        names, values = ops.table_stats(self._table)
        stats = dict(zip(names.numpy().tolist(), values.numpy().tolist(), strict=True))
        return {
            "pulls": stats[b"rows_sent"],
            "pushes": stats[b"rows_merged"],
            "bytes": stats[b"bytes_sent"] + stats[b"bytes_received"],
        }


def run(keys: np.ndarray, rows: int, is_aware: bool, is_on_demand: bool) -> dict[str, float]:
    """Trains on the keys. Returns counters of a step, and the time of planning a step."""
    workers, share = _WORKERS.value, _WORKERS.value * _BATCH.value
    columns = keys.shape[1]
    capacity = int(rows * _PERCENT.value / 100)
    cluster = SynchronousWorkers(workers, _DIM.value, capacity, is_on_demand)
    planners = [tf.raw_ops.OptionalNone()] * workers
    steps = min(_STEPS.value, len(keys) // share)
    warm = min(_WARM.value, steps // 2)
    before: dict[str, int] = {}
    seconds, hits = [], 0
    for step in range(steps):
        of_step = keys[step * share : (step + 1) * share]
        if not is_aware and not is_on_demand:
            plans = [np.arange(share) % workers]
            due = [np.zeros(0, np.int64)] * workers
        else:
            began = time.process_time()
            plans, due = [], []
            for worker in range(workers):
                planners[worker], plan, _, keys_due, counts = ops.plan(
                    planners[worker],
                    of_step,
                    num_workers=workers,
                    worker=worker,
                    capacity=capacity,
                    synchronous=True,
                    tables=[0] * columns,
                    scored=list(range(columns)) if is_aware else [],
                )
                plans.append(plan.numpy())
                due.append(keys_due.numpy() if is_on_demand else np.zeros(0, np.int64))
            seconds.append((time.process_time() - began) / workers)
            hits += int(counts[1])
        if step == warm:
            before = cluster.counters()
        cluster.step(step, [of_step[plans[0] == w] for w in range(workers)], due)
    counted = {k: (v - before[k]) / (steps - warm) for k, v in cluster.counters().items()}
    return counted | {"planning_ms": 1e3 * float(np.median(seconds or [0]))}


def main(argv: list[str]) -> None:
    """Prints the table."""
    del argv
    one_process.single_threaded()
    figures = {}
    for data in _DATA.value:
        keys, rows = keys_of(data)
        figures[data] = {mode: run(keys, rows, *how) for mode, how in _MODES.items()}
        naive = figures[data]["naive"]
        print(f"{data}: {rows} rows, a step of {_WORKERS.value} x {_BATCH.value} examples")
        for mode, counted in figures[data].items():
            relative = " ".join(f"{k} {counted[k] / naive[k]:.2f}" for k in naive if naive[k])
            print(f"  {mode:15} {relative}, planning {counted['planning_ms']:.1f} ms")
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    app.run(main)
