"""What het_tf.planner predicts, beside what runs on a cluster measured.

    python benchmarks/planner.py --runs=out/netns.json

Reads runs of netns_cluster.py with the variants "alone" and "default", or "no_cache", and plans for
each the same cluster and ids. All tasks share this machine's cores. The plan's `shared_cores` are
those that this machine gave in the run: idle time and the tasks' CPU time over wall time.
`step_seconds` is the CPU time of a step in the run "alone". Calibrates first.

The busiest part of a run is the one that was used most: the link of the busiest server, in its
busier direction, or the cores. Exit status 1 if a prediction is beyond its limit: hit rates 2
points, bytes 10 %, times 20 %, one of ten busiest parts.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics

import numpy as np
import tensorflow as tf
from absl import app, flags
from netns import criteo_shape, measure, runs
from netns.network import bits_per_second
from netns.runs import ALONE, NO_CACHE, Run

import het_tf
from het_tf import planner

_RUNS = flags.DEFINE_list("runs", None, "files of netns_cluster.py", required=True)
_CALIBRATION = flags.DEFINE_string("calibration", None, "JSON file; measured if there is none")
_JSON = flags.DEFINE_string("json", None, "file to write the figures to")

_MOST_STEPS = 64  # of a worker between two exchanges of dense variables
_LIMITS = {"hit rate": 0.02, "bytes": 0.1, "ms": 0.2}


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured or predicted of a run."""

    hit_rate: float
    kb: float  # of rows' messages, for a step
    ms: float  # a step
    busiest: str


def measured(run: Run) -> Figures:
    """The medians of the run's epochs after the first."""
    size, workers = run.setting.sizes, run.setting.workers
    steps = size.steps * workers

    def of_epoch(epoch: measure.Epoch) -> tuple[float, float, float, float, float]:
        counters = epoch.counters
        hosts = [measure.name("ps", index) for index in range(run.setting.servers)]
        links = 0.0
        if run.setting.rate is not None:
            moved = max(max(epoch.sent[host], epoch.received[host]) for host in hosts)
            links = 8 * moved / epoch.seconds / bits_per_second(run.setting.rate)
        cpu = sum(epoch.cpu_seconds.values())
        return (
            counters["hit_ids"] / counters["ids"],
            (counters["bytes_up"] + counters["bytes_down"]) / steps / 1000,
            1000 * epoch.seconds / size.steps,
            links,
            cpu / (cpu + epoch.idle_seconds),
        )

    each = np.median([of_epoch(epoch) for epoch in run.epochs[1:]], axis=0)
    return Figures(*each[:3].tolist(), "network" if each[3] > each[4] else "cores")


def cores(run: Run) -> float:
    """Cores that this machine gave: what was not idle and not the tasks' was another user's."""
    return statistics.median(
        (sum(epoch.cpu_seconds.values()) + epoch.idle_seconds) / epoch.seconds
        for epoch in run.epochs[1:]
    )


def predicted(run: Run, step_seconds: float, calibration: planner.Calibration) -> Figures:
    """The same from a plan."""
    setting, size = run.setting, run.setting.sizes
    samples = size.epochs * size.steps * setting.workers * size.batch
    clicks = criteo_shape.Generator(setting.seed).draw(samples, stream=0)
    dataset = tf.data.Dataset.from_tensor_slices(clicks.ids).batch(size.batch)
    found = planner.statistics(dataset, lambda ids: {"rows": ids})
    cache = None if setting.variant == NO_CACHE else het_tf.CacheConfig(size.capacity)
    optimizer = {
        "rowwise_adagrad": het_tf.optimizers.RowWiseAdagrad,
        "adagrad": het_tf.optimizers.Adagrad,
    }[size.row_optimizer](size.learning_rate)
    # Young networks are exchanged more often than the planner assumes: every tenth of their steps.
    measured_steps = np.arange(size.steps, size.epochs * size.steps)
    exchanges = np.mean(1 / np.clip(measured_steps / 10, 1, _MOST_STEPS))
    plan = planner.plan(
        [planner.EmbeddingConfig("rows", size.dim, optimizer, cache)],
        found,
        size.batch,
        planner.Topology(
            setting.workers,
            setting.servers,
            bandwidth=None if setting.rate is None else int(bits_per_second(setting.rate)),
            shared_cores=cores(run),
        ),
        step_seconds=step_seconds,
        # As in the run, which had no plan.
        constraints={"rows": planner.Constraints(servers=range(setting.servers))},
        steps_per_epoch=size.steps,
        dense_parameters=round(run.epochs[0].dense_bytes / 4 * exchanges * _MOST_STEPS),
        calibration=calibration,
    )
    traffic = plan.tables["rows"].traffic
    busiest = "network" if plan.bound == "network" else "cores"
    kb = (traffic.bytes_up + traffic.bytes_down) / 1000
    return Figures(traffic.hit_rate, kb, 1000 * plan.step_seconds, busiest)


def errors(found: Figures, real: Figures) -> dict[str, float]:
    """How far a prediction is from what was measured, as the limits count."""
    return {
        "hit rate": abs(found.hit_rate - real.hit_rate),
        "bytes": abs(found.kb / real.kb - 1),
        "ms": abs(found.ms / real.ms - 1),
    }


def main(argv: list[str]) -> int:
    del argv
    every = [run for path in _RUNS.value for run in runs.read(pathlib.Path(path))]
    alone = [run for run in every if run.setting.variant == ALONE]
    if not alone:
        print('the runs need one of "alone": netns_cluster.py --variants=alone')
        return 2
    step_seconds = statistics.median(
        epoch.cpu_seconds[measure.name("worker", 0)] / run.setting.sizes.steps
        for run in alone
        for epoch in run.epochs[1:]
    )
    if _CALIBRATION.value and pathlib.Path(_CALIBRATION.value).exists():
        text = pathlib.Path(_CALIBRATION.value).read_text()
        calibration = planner.Calibration(**json.loads(text))
    else:
        calibration = planner.calibrate()
        if _CALIBRATION.value:
            text = json.dumps(dataclasses.asdict(calibration))
            pathlib.Path(_CALIBRATION.value).write_text(text)
    print(calibration)
    print(f"{'':54}{'hit rate':>16}{'kB a step':>16}{'ms a step':>18}  busiest part")
    results, wrong = [], 0
    worst = dict.fromkeys(_LIMITS, 0.0)
    for run in every:
        if run.setting.variant == ALONE:
            continue
        real, found = measured(run), predicted(run, step_seconds, calibration)
        setting = run.setting
        label = f"{setting.label}, {setting.workers}+{setting.servers}"
        label += f", {setting.rate or 'no limit'}, {setting.sizes.capacity or 'all'} rows"
        print(
            f"{label:54}{real.hit_rate:8.1%}{found.hit_rate:8.1%}{real.kb:8.0f}{found.kb:8.0f}"
            f"{real.ms:9.1f}{found.ms:9.1f}  {real.busiest}, {found.busiest}"
        )
        for name, error in errors(found, real).items():
            worst[name] = max(worst[name], error)
        wrong += real.busiest != found.busiest
        results.append({"case": label, "measured": vars(real), "predicted": vars(found)})
    print(", ".join(f"{name}: off by {error:.1%} at most" for name, error in worst.items()))
    print(f"busiest part: {wrong} of {len(results)} wrong")
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(results, indent=1))
    beyond = any(worst[name] > limit for name, limit in _LIMITS.items())
    return int(beyond or wrong > len(results) / 10)


if __name__ == "__main__":
    app.run(main)
