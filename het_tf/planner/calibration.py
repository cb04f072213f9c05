"""Measurements on this machine that plans are made of."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from het_tf.distribute import HetParameterServerStrategy, LocalCluster
from het_tf.keras.model import Model
from het_tf.layers.embedding import HetEmbedding
from het_tf.planner.cost import Calibration
from het_tf.planner.plan import Planner
from het_tf.planner.replay import replay
from het_tf.planner.statistics import Statistics, TableStatistics
from het_tf.planner.tables import EmbeddingConfig
from het_tf.planner.topology import Constraints, Topology
from het_tf.runtime.key_counts import FrequentKeys
from het_tf.runtime.validation import INT32_MAX, check_integer

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_WARM_STEPS = 16
_EPOCH_STEPS = 320
_FEW_ROWS, _MANY_ROWS = 64, 8192
_SERVERS = 4
_MANY_TABLES = 16
_CONFIG = EmbeddingConfig("rows", 64, "adagrad", cache=None)


def step_seconds(model: keras.Model, dataset: tf.data.Dataset, steps: int = 50) -> float:
    """Returns the CPU time of a training step in this process, in seconds.

    It is the argument `step_seconds` of `plan`. Measure it on a machine like the workers.

    Args:
      model: compiled model, made without a strategy. It trains `steps` batches and a few more.
      dataset: batches of the size that a worker trains. They are repeated if there are few.
      steps: number of measured steps.

    Raises:
      ValueError: `steps` is not positive, or the model was made under a parameter server strategy.
    """
    steps = check_integer("steps", steps, 1, INT32_MAX)
    if isinstance(model.distribute_strategy, tf.distribute.ParameterServerStrategy):
        raise ValueError("step_seconds: the model was made under a strategy; make it without one")
    repeated = dataset.repeat()
    model.fit(repeated.take(_WARM_STEPS), shuffle=False, verbose=0)
    return _measured(lambda: model.fit(repeated.take(steps), shuffle=False, verbose=0)) / steps


def calibrate() -> Calibration:
    """Measures what messages cost on this machine, with a worker and servers on localhost.

    Takes half a minute. It connects this process to a cluster of its own, so call it before you
    make a strategy, or in another process.

        calibration = het_tf.planner.calibrate()

    Returns:
      Times for the argument `calibration` of `plan`.
    """
    alone = [_step_alone(rows) for rows in (_FEW_ROWS, _MANY_ROWS)]
    with LocalCluster(1, _SERVERS) as cluster:
        strategy = HetParameterServerStrategy(cluster.resolver)
        pids = [cluster.process(*task).pid for task in (("worker", 0), ("ps", 0))]
        few, many = (_on_cluster(strategy, rows, 1, pids) for rows in (_FEW_ROWS, _MANY_ROWS))
        spread = _on_cluster(strategy, _FEW_ROWS, _SERVERS, pids)
        parts = [
            _on_cluster(strategy, _FEW_ROWS, servers, pids, _MANY_TABLES)
            for servers in (1, _SERVERS)
        ]
    moved = many.num_bytes - few.num_bytes
    # The messages of more tables to more servers, less those of one table.
    more_parts = (_MANY_TABLES - 1) * (_SERVERS - 1)
    worker_part = (parts[1].worker - parts[0].worker - spread.worker + few.worker) / more_parts
    worker_part = max(0.0, worker_part)
    server_part = max(0.0, (parts[0].server - few.server) / (_MANY_TABLES - 1))
    # Every message has a part.
    message = max(0.0, (spread.worker - few.worker) / (_SERVERS - 1) - worker_part)
    handling = [few.worker - alone[0], many.worker - alone[1]]
    # Merging and reading the rows is the table's own work, which plans have from replays.
    server = [few.server, many.server - _table_seconds()]
    return Calibration(
        worker_step=max(0.0, handling[0] - message - worker_part),
        worker_message=message,
        worker_byte=max(0.0, (handling[1] - handling[0]) / moved),
        worker_part=worker_part,
        server_message=max(0.0, server[0] - server_part),
        server_part=server_part,
        server_byte=max(0.0, (server[1] - server[0]) / moved),
        chief_step=few.chief,
    )


@dataclasses.dataclass(frozen=True)
class _Costs:
    """CPU seconds and bytes of a step."""

    worker: float
    server: float
    chief: float
    num_bytes: float


def _measured(run: Callable[[], object]) -> float:
    """Returns the CPU time of this process while a function runs."""
    began = time.process_time()
    run()
    return time.process_time() - began


def _model(rows: int, tables: int = 1) -> tuple[Model, tf.data.Dataset]:
    """Returns a model that does little but look rows up and update them, and its batches."""
    ids = keras.Input((rows,), dtype="int64")
    found = [
        HetEmbedding(_CONFIG.dim, optimizer=_CONFIG.optimizer, cache=_CONFIG.cache, name=name)(part)
        for name, part in zip(_names(tables), keras.ops.split(ids, tables, axis=1), strict=True)
    ]
    model = Model(ids, keras.ops.sum(keras.ops.concatenate(found, axis=1), axis=(1, 2)))
    model.compile("adagrad", "mse")
    batch = np.arange(rows)[np.newaxis]
    return model, tf.data.Dataset.from_tensors((batch, np.zeros(1, np.float32))).repeat()


def _names(tables: int) -> list[str]:
    return [f"{_CONFIG.name}_{table}" for table in range(tables)]


def _step_alone(rows: int) -> float:
    model, dataset = _model(rows)
    return step_seconds(model, dataset)


def _on_cluster(
    strategy: HetParameterServerStrategy, rows: int, servers: int, pids: list[int], tables: int = 1
) -> _Costs:
    """Returns the costs of a step whose rows are on the first servers."""
    names = _names(tables)
    planner = Planner(
        [dataclasses.replace(_CONFIG, name=name) for name in names],
        _statistics(rows // tables, names),
        1,
        step_seconds=1,
        constraints=dict.fromkeys(names, Constraints(servers=range(servers))),
    )
    strategy.plan = planner.plan(Topology(1, _SERVERS))
    with strategy.scope():
        model, dataset = _model(rows, tables)

    def fit() -> None:
        model.fit(dataset, steps_per_epoch=_EPOCH_STEPS, verbose=0)

    fit()
    layer = model.get_layer(names[0])
    before, counters = [cpu_seconds(pid) for pid in pids], layer.cache_stats()
    chief = _measured(fit)
    worker, server = (cpu_seconds(pid) - b for pid, b in zip(pids, before, strict=True))
    after = layer.cache_stats()
    moved = sum(after[name] - counters[name] for name in ("bytes_up", "bytes_down"))
    return _Costs(*(cost / _EPOCH_STEPS for cost in (worker, server, chief, moved)))


def _statistics(rows: int, names: list[str]) -> Statistics:
    """Returns the statistics of batches that have the same rows of every table."""
    batch = (np.arange(rows), np.ones(rows, np.int32))
    count, num_ids = _WARM_STEPS, rows * _WARM_STEPS
    table = TableStatistics(count, num_ids, num_ids, 1.0, [batch] * count, FrequentKeys(1))
    return Statistics(count, count, dict.fromkeys(names, table))


def _table_seconds() -> float:
    """Returns the CPU time in which a server's table serves a step with many rows."""
    table = _statistics(_MANY_ROWS, [_CONFIG.name]).tables[_CONFIG.name]
    return replay(table, _CONFIG, workers=1, capacity=None).server_seconds


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process so far, of all its threads (proc(5): utime and stime)."""
    # The second field, the program's name in brackets, may hold spaces.
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
