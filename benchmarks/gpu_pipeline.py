"""Time of a step on a device's cache whose stages run beside each other, beside its slowest stage.

A step goes through three stages, each on a thread of its own, as look-ahead has it on a cluster:

  fetch     unique ids, lookup, and the shard's answer: what crosses the network
  install   the rows that came: what crosses the bus
  compute   gather, the dense network, and the update

so that step t computes while the rows of t + 1 are installed and those of t + 2 are on their way.
Each stage is made longer, by a sleep within it and outside of the ops, so that what is seen is
what the ops of one keep those of another from doing, as by a lock that is held too long. It does
not show what a GPU does at the same time: a sleep stands for the time of the network, of the bus
and of the dense network, and all of a cache's work is on the dense network's stream.

Of each case, medians: the stages' times where one comes after the other, the sleep included, and a
step's then; a step's of the pipeline, and that over the slowest stage's. At the end the table must
have every update of every step once.

Runs with the host build in a GPU's place, or on the GPU where TensorFlow sees one.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import queue
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import app, flags
from zipf import zipf_ids

from het_tf import ops

_IDS = flags.DEFINE_integer("ids", 2_048, "ids in a step")
_ROWS = flags.DEFINE_integer("rows", 100_000, "keys that ids are drawn from")
_DIM = flags.DEFINE_integer("dim", 16, "columns of a row")
_LINES = flags.DEFINE_integer("lines", 20_000, "rows on the device")
_STEPS = flags.DEFINE_integer("steps", 40, "steps of a case", lower_bound=10)
_CASES = flags.DEFINE_multi_string(
    "case",
    ["30,5,15", "15,30,15", "10,5,30", "30,30,30"],
    "milliseconds that fetch, install and compute are made longer by",
)
_JSON = flags.DEFINE_string("json", None, "where to write the figures")

_STAGES = ("fetch", "install", "compute")
_END = None


@dataclasses.dataclass
class Step:
    """A step on its way through the stages."""

    ids: tf.Tensor
    ticket: tf.Tensor | None = None
    reply: tf.Tensor | None = None


class Training:
    """A table, a cache of its rows on a device, and the stages of a step on them."""

    def __init__(self, device: str, delays: dict[str, float], number: int):
        """Makes the cache on a device; a stage takes `delays` seconds longer."""
        rows = {"dim": _DIM.value, "optimizer": "sgd", "initializer": "zeros"}
        name = f"gpu_pipeline/{number}"
        self._device = device
        self.table = ops.table_handle(shared_name=name, **rows)
        with tf.device(device):
            self._cache = ops.cache_handle(
                shared_name=name, capacity=0, device_capacity=_LINES.value, **rows
            )
        self._delays = delays
        self.seconds: dict[str, list[float]] = {stage: [] for stage in _STAGES}

    def run(self, stage: str, step: Step) -> Step:
        """Takes a step through a stage."""
        begin = time.monotonic()
        with tf.device(self._device):
            getattr(self, f"_{stage}")(step)
        self.seconds[stage].append(time.monotonic() - begin)
        return step

    def _fetch(self, step: Step) -> None:
        unique_ids = ops.unique_ids(step.ids, on_device=True)
        step.ticket, (request,) = ops.cache_lookup(self._cache, unique_ids, num_shards=1)
        step.reply = self._answer(request)
        time.sleep(self._delays["fetch"])

    def _install(self, step: Step) -> None:
        time.sleep(self._delays["install"])
        ops.cache_install(self._cache, step.ticket, [step.reply])

    def _compute(self, step: Step) -> None:
        rows = ops.cache_gather(self._cache, step.ticket)
        time.sleep(self._delays["compute"])
        ops.cache_update(self._cache, step.ticket, tf.ones_like(rows), 1.0)
        step.ticket = None

    def _answer(self, request: tf.Tensor) -> tf.Tensor:
        with tf.device("/device:CPU:0"):
            if request.shape[0] == 0:
                return tf.zeros([0], tf.uint8)
            return ops.table_sync(self.table, request)

    def check(self, steps: list[tf.Tensor]) -> None:
        """Raises a RuntimeError if the table has not the sum of the gradients of these ids."""
        with tf.device(self._device):
            ticket, (request,) = ops.cache_flush(self._cache, num_shards=1)
            ops.cache_install(self._cache, ticket, [self._answer(request)])
        keys, values, _, clocks = (each.numpy() for each in ops.table_export(self.table, 0, 1))
        order = np.argsort(keys)
        all_ids, counts = np.unique(np.concatenate(steps), return_counts=True)
        _, updates = np.unique(np.concatenate([np.unique(s) for s in steps]), return_counts=True)
        right = (
            np.array_equal(keys[order], all_ids)
            and np.array_equal(values[order], -np.repeat(counts[:, None], _DIM.value, 1))
            and np.array_equal(clocks[order], updates)
        )
        if not right:
            raise RuntimeError("the table has not every update of every step once")


def one_after_the_other(training: Training, steps: list[tf.Tensor]) -> list[float]:
    """When each step ended."""
    ends = []
    for ids in steps:
        step = Step(ids)
        for stage in _STAGES:
            training.run(stage, step)
        ends.append(time.monotonic())
    return ends


def beside_each_other(training: Training, steps: list[tf.Tensor]) -> list[float]:
    """When each step ended, with each stage on a thread of its own."""
    # One step is in a stage, and the next one waits for it.
    between = [queue.Queue(maxsize=1) for _ in range(len(_STAGES) - 1)]
    ends: list[float] = []
    errors: list[Exception] = []

    def work(stage: str, take: Callable[[], Step | None], put: Callable[[Step | None], None]):
        try:
            while (step := take()) is not _END:
                put(training.run(stage, step))
        except Exception as error:
            errors.append(error)
            while take() is not _END:  # those before must not wait
                pass
        put(_END)

    sources = iter([*(Step(ids) for ids in steps), _END])
    takes = [lambda: next(sources), *(each.get for each in between)]
    puts = [*(each.put for each in between), lambda _: ends.append(time.monotonic())]
    threads = [
        threading.Thread(target=work, args=each) for each in zip(_STAGES, takes, puts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return ends[: len(steps)]


def median_ms(ends: list[float]) -> float:
    """Of a step, the first few left out, in which the pipeline fills."""
    return 1e3 * float(np.median(np.diff(ends[3:])))


def measure(device: str, delays: dict[str, float], number: int) -> dict[str, float]:
    """The figures of a case, in milliseconds."""
    rng = np.random.default_rng(number)
    all_ids = zipf_ids(rng, _ROWS.value, 1.05, (_STEPS.value, _IDS.value))
    steps = [tf.constant(ids) for ids in all_ids]
    figures = {}
    for way, is_pipeline in ((one_after_the_other, False), (beside_each_other, True)):
        training = Training(device, delays, 2 * number + is_pipeline)
        figures[way.__name__] = median_ms(way(training, steps))
        training.check(list(all_ids))
        if not is_pipeline:
            stages = {s: 1e3 * statistics.median(t) for s, t in training.seconds.items()}
    return figures | stages | {"ratio": figures["beside_each_other"] / max(stages.values())}


def main(_: list[str]) -> None:
    gpu = ops.build()["cuda"] is not None and bool(tf.config.list_logical_devices("GPU"))
    device = f"/device:{'GPU' if gpu else 'CPU'}:0"
    results = []
    print(f"{_IDS.value:,} ids a step on {device}, milliseconds:")
    print(f"{'made longer by':>16} {'fetch':>8} {'install':>8} {'compute':>8}", end="")
    print(f" {'in turn':>8} {'pipeline':>9} {'of slowest':>11}")
    for number, case in enumerate(_CASES.value):
        delays = dict(zip(_STAGES, (float(ms) / 1e3 for ms in case.split(",")), strict=True))
        figures = measure(device, delays, number)
        results.append({"case": case} | figures)
        print(f"{case:>16}", *(f"{figures[stage]:8.1f}" for stage in _STAGES), end="")
        in_turn, pipeline = figures["one_after_the_other"], figures["beside_each_other"]
        print(f" {in_turn:8.1f} {pipeline:9.1f} {figures['ratio']:11.2f}", flush=True)
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    app.run(main)
