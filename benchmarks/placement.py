"""Tables divided over all servers, beside tables where a plan has them.

    python benchmarks/placement.py --servers=8

A model with tables of many sizes trains on a cluster on this machine, once with every table divided
over all servers by a hash, and once with the tables where het_tf.planner has them. All tasks share
this machine's cores. --limit: exit status 1 if the plan is slower than so many times the divided
tables.

--sets: so many random placements of whole tables follow. Each line has the CPU time of every server
for a step, predicted and measured.
"""

from __future__ import annotations

import json
import os
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import het_tf
from het_tf import planner
from het_tf.planner.calibration import cpu_seconds

_TABLES = flags.DEFINE_integer("tables", 26, "number of tables")
_SERVERS = flags.DEFINE_integer("servers", 8, "number of parameter servers")
_BATCH = flags.DEFINE_integer("batch", 512, "examples of a step")
_STEPS = flags.DEFINE_integer("steps", 400, "of an epoch")
_EPOCHS = flags.DEFINE_integer("epochs", 3, "measured epochs")
_CORES = flags.DEFINE_float("cores", None, "of this machine; None: as many as it has")
_SETS = flags.DEFINE_integer("sets", 0, "random placements")
_LIMIT = flags.DEFINE_float("limit", None, "of the plan's time, in times of the divided tables")
_JSON = flags.DEFINE_string("json", None, "file to write the figures to")


def names() -> list[str]:
    """Names of the tables."""
    return [f"table_{number}" for number in range(_TABLES.value)]


def clicks() -> dict[str, np.ndarray]:
    """Ids of every table: few or many of an example, of few or many rows."""
    rng = np.random.default_rng(7)
    examples = _BATCH.value * _STEPS.value
    found = {}
    for name in names():
        count, rows = 1 + rng.poisson(rng.lognormal(0, 1)), int(10 ** rng.uniform(2, 6))
        found[name] = rng.zipf(1.2, (examples, count)) % rows
    return found


def make_model(ids: dict[str, np.ndarray]) -> het_tf.keras.Model:
    """A model with all tables."""
    rng = np.random.default_rng(8)
    inputs = {name: keras.Input((part.shape[1],), dtype="int64") for name, part in ids.items()}
    pooled = [
        keras.ops.sum(
            het_tf.layers.HetEmbedding(int(rng.choice([8, 16, 32, 64])), name=name)(x), axis=1
        )
        for name, x in inputs.items()
    ]
    output = keras.layers.Dense(1, activation="sigmoid")(keras.ops.concatenate(pooled, axis=1))
    model = het_tf.keras.Model(inputs, output)
    model.compile("adagrad", "binary_crossentropy", steps_per_execution=20)
    return model


def run(
    plan: planner.Plan, ids: dict[str, np.ndarray], data: tf.data.Dataset
) -> tuple[float, list[float]]:
    """Trains with a plan. Time of a step, and the CPU time of the worker and each server, in ms."""
    with het_tf.distribute.LocalCluster(1, _SERVERS.value) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver, plan=plan)
        with strategy.scope():
            model = make_model(ids)
        model.fit(data, verbose=0)
        tasks = [("worker", 0), *(("ps", server) for server in range(_SERVERS.value))]
        pids = [cluster.process(*task).pid for task in tasks]
        before, began = [cpu_seconds(pid) for pid in pids], time.perf_counter()
        model.fit(data, epochs=_EPOCHS.value, verbose=0)
        seconds = time.perf_counter() - began
        used = [cpu_seconds(pid) - b for pid, b in zip(pids, before, strict=True)]
    per_step = 1000 / (_STEPS.value * _EPOCHS.value)
    return seconds * per_step, [each * per_step for each in used]


def main(argv: list[str]) -> int:
    del argv
    ids = clicks()
    labels = np.random.default_rng(9).integers(0, 2, (_BATCH.value * _STEPS.value, 1))
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(_BATCH.value)
    calibration = planner.calibrate()
    statistics = planner.statistics(data.take(64), lambda ids, label: ids)
    model = make_model(ids)
    step_seconds = planner.step_seconds(model, data)
    cores = _CORES.value or len(os.sched_getaffinity(0))
    topology = planner.Topology(1, _SERVERS.value, bandwidth=None, shared_cores=cores)

    def plan_with(constraints: dict[str, planner.Constraints]) -> planner.Plan:
        return planner.plan(
            model,
            statistics,
            _BATCH.value,
            topology,
            step_seconds=step_seconds,
            constraints=constraints,
            calibration=calibration,
            steps_per_epoch=_STEPS.value,
        )

    everywhere = planner.Constraints(servers=range(_SERVERS.value))
    figures = {}
    for name, constraints in ("divided", dict.fromkeys(names(), everywhere)), ("planned", {}):
        plan = plan_with(constraints)
        parts = sum(len(table.servers) for table in plan.tables.values())
        step, (worker, *servers) = run(plan, ids, data)
        figures[name] = {
            "parts": parts,
            "step": step,
            "predicted": 1000 * plan.step_seconds,
            "worker": worker,
            "servers": servers,
        }
        print(
            f"{name:8} {parts:4} parts  {step:6.2f} ms/step (predicted"
            f" {1000 * plan.step_seconds:.2f})  CPU: worker {worker:.2f} ms, busiest server"
            f" {max(servers):.2f} ms, all servers {sum(servers):.2f} ms",
            flush=True,
        )
    rng = np.random.default_rng(1)
    for number in range(_SETS.value):
        share = rng.dirichlet(np.ones(_SERVERS.value))
        owners = rng.choice(_SERVERS.value, _TABLES.value, p=share).tolist()
        plan = plan_with(
            {n: planner.Constraints(servers=[o]) for n, o in zip(names(), owners, strict=True)}
        )
        predicted = [1000 * seconds for seconds in plan.server_seconds]
        _, (_, *servers) = run(plan, ids, data)
        figures[f"set {number}"] = {"predicted": predicted, "servers": servers}
        texts = (" ".join(f"{ms:.2f}" for ms in each) for each in (predicted, servers))
        print("predicted {}  measured {}".format(*texts), flush=True)
    ratio = figures["planned"]["step"] / figures["divided"]["step"]
    print(f"planned / divided: {ratio:.2f}")
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(figures, indent=1))
    return int(_LIMIT.value is not None and ratio > _LIMIT.value)


if __name__ == "__main__":
    app.run(main)
