"""What was run and what it shows: settings, measured epochs, and the figures made of them."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from netns.measure import Epoch

ALONE = "alone"
TF_KERAS = "tf_keras"
NO_CACHE = "no_cache"
# Arguments of CacheConfig beside the capacity.
CACHES: dict[str, dict[str, Any]] = {
    "s0": {"staleness": 0},
    "default": {},
    "s100": {"staleness": 100},
    "unbounded": {"staleness": None},
    "synchronous": {},
    "herald": {},
    "fae": {},
}
SYNCHRONOUS = ("synchronous", "herald")
VARIANTS = (ALONE, TF_KERAS, NO_CACHE, *CACHES)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all runs of a comparison have in common.

    steps: of a worker and epoch. batches: different ones that a worker has; None: each step's own.
    """

    epochs: int
    steps: int
    steps_per_execution: int
    batch: int
    dim: int
    hidden: tuple[int, ...]
    capacity: int | None
    held_out: int
    learning_rate: float
    row_optimizer: str
    # Files written before there was any of these are read, too.
    batches: int | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compared.

    Attributes:
      variant: one of VARIANTS.
      workers: worker tasks; of ALONE programs.
      servers: parameter servers; of ALONE 0.
      rate: of every host, as tc takes it; None: no limit.
      dense_staleness: of HetParameterServerStrategy: a number, "none", or "default" where the
        argument is not given.
      lookahead: of CacheConfig; None: it is not given.
      seed: of data and initial values.
      sizes: of everything.
      delay: from host to host, such as "1ms"; None: none.
      dense_wire_dtype: of HetParameterServerStrategy.
      wire_dtype: of HetEmbedding.
      hot: of "fae": the hot rows in percent of all, and the batches of a phase.
    """

    variant: str
    workers: int
    servers: int
    rate: str | None
    dense_staleness: str
    lookahead: int | None
    seed: int
    sizes: Sizes
    # Files written before there was any of these are read, too.
    delay: str | None = None
    dense_wire_dtype: str = "float32"
    wire_dtype: str = "float32"
    hot: tuple[float, int] | None = None

    @property
    def label(self) -> str:
        """For a row of the table."""
        names = {
            ALONE: "each worker alone (the ceiling)",
            TF_KERAS: "tf_keras Embedding",
            NO_CACHE: "het_tf, no cache",
            "s0": "het_tf, staleness 0",
            "default": "het_tf, default bounds",
            "s100": "het_tf, staleness 100",
            "unbounded": "het_tf, no bound of staleness",
            "synchronous": "het_tf, synchronous",
            "herald": "het_tf, synchronous, location-aware",
        }
        if self.hot is not None:
            percent, phase = self.hot
            names["fae"] = f"het_tf, {percent:g} % of rows hot, phases of {phase} batches"
        label = names[self.variant]
        if self.lookahead is not None:
            label += f", look-ahead {self.lookahead}"
        if self.dense_staleness != "default":
            label += f", dense staleness {self.dense_staleness}"
        if self.dense_wire_dtype != "float32":
            label += f" as {self.dense_wire_dtype}"
        if self.wire_dtype != "float32":
            label += f", rows as {self.wire_dtype}"
        return label

    @property
    def looks_ahead(self) -> bool:
        """Whether rows are looked up before the step that needs them (`CacheConfig.lookahead`)."""
        return self.variant in CACHES and self.lookahead != 0 and self.variant not in SYNCHRONOUS

    @property
    def training(self) -> tuple[Any, ...]:
        """What is trained in which way, on whatever cluster."""
        bounds = self.dense_staleness, self.lookahead
        return self.variant, *bounds, self.dense_wire_dtype, self.wire_dtype, self.hot

    @property
    def row(self) -> Setting:
        """The setting with any seed: what a row of the table is made of."""
        return dataclasses.replace(self, seed=0)

    def alone(self) -> Setting:
        """The same training by each worker alone."""
        return dataclasses.replace(
            self,
            variant=ALONE,
            servers=0,
            rate=None,
            dense_staleness="default",
            lookahead=None,
            delay=None,
            dense_wire_dtype="float32",
            wire_dtype="float32",
        )


@dataclasses.dataclass
class Run:
    """A setting and its epochs, of which the first was for warming up, without a rate."""

    setting: Setting
    epochs: list[Epoch]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Run:
        """The inverse of `to_dict`."""
        setting = dict(fields["setting"])
        sizes = dict(setting["sizes"])
        setting["sizes"] = Sizes(**sizes | {"hidden": tuple(sizes["hidden"])})
        if setting.get("hot") is not None:
            setting["hot"] = tuple(setting["hot"])
        return cls(Setting(**setting), [Epoch(**epoch) for epoch in fields["epochs"]])


def read(path: pathlib.Path) -> list[Run]:
    """The runs of a file; none if there is no file."""
    return [Run.from_dict(each) for each in json.loads(path.read_text())] if path.exists() else []


def write(path: pathlib.Path, runs: Iterable[Run]) -> None:
    """Writes the runs to a file, which is whole at any time."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps([run.to_dict() for run in runs], indent=1))
    part.replace(path)


@dataclasses.dataclass(frozen=True)
class Figures:
    """A row of the table: medians over the measured epochs of all runs of a setting.

    Attributes:
      setting: the setting, of no certain seed.
      ms_per_step: a step of one worker, while the others take theirs: wall time.
      examples_per_s: of the whole cluster.
      kb_sent: 1000 bytes that a worker's interface sends a step.
      kb_received: the same, received.
      kb: those two together, by kind (`_kinds`).
      compute_ms: CPU time of a step of a worker that trains alone; None: that was not run.
      worker_ms: CPU time of a worker's process a step.
      server_ms: CPU time of all servers' processes for a step of one worker.
      messages: exchanges between the worker's embedding and servers a step.
      waited: share of the steps that waited for what was looked up ahead; None: nothing was.
      waited_ms: for how long, over all steps.
      examples: at the ends of the epochs, those trained on so far.
      auc: at the same, the mean over the seeds.
      auc_sd: standard deviation of the last one over the seeds; None: one seed.
    """

    setting: Setting
    ms_per_step: float
    examples_per_s: float
    kb_sent: float
    kb_received: float
    kb: dict[str, float]
    compute_ms: float | None
    worker_ms: float
    server_ms: float
    messages: float
    waited: float | None
    waited_ms: float | None
    examples: list[int]
    auc: list[float]
    auc_sd: float | None

    def shares(self) -> dict[str, float] | None:
        """What a worker's step is spent on, as shares of its wall time; None: not known.

        compute: CPU time of the same step of a worker that trains alone.
        messages: what the worker's process uses beyond that: putting messages together and taking
          them apart, copying, the kernel's TCP, TensorFlow's bookkeeping.
        waiting: the rest, in which the worker has nothing to do but wait for the wire, a server or
          a core. A worker that runs several threads at a time has less of it, down to none.
        """
        if self.compute_ms is None:
            return None
        messages = max(0.0, self.worker_ms - self.compute_ms)
        waiting = max(0.0, self.ms_per_step - self.compute_ms - messages)
        total = self.compute_ms + messages + waiting
        parts = {"compute": self.compute_ms, "messages": messages, "waiting": waiting}
        return {part: ms / total for part, ms in parts.items()}

    def seconds_to(self, auc: float) -> float | None:
        """Training time to an AUC at the measured examples/s; None: not reached.

        On straight lines between evaluations. The first epoch counts with its examples, not with
        the time it took to trace functions.
        """
        before = (0, 0.5)
        for point in zip(self.examples, self.auc, strict=True):
            if point[1] >= auc:
                (x0, y0), (x1, y1) = before, point
                return (x0 + (x1 - x0) * (auc - y0) / (y1 - y0)) / self.examples_per_s
            before = point
        return None


def figures(runs: Sequence[Run]) -> list[Figures]:
    """One for each setting, in the order of the runs."""
    rows = dict.fromkeys(run.setting.row for run in runs)
    return [_figures(row, [run for run in runs if run.setting.row == row], runs) for row in rows]


def _figures(setting: Setting, own: Sequence[Run], runs: Sequence[Run]) -> Figures:
    sizes = setting.sizes
    # Steps of all workers in an epoch, and of one.
    steps, worker_steps = sizes.steps * setting.workers, sizes.steps
    measured = [epoch for run in own for epoch in run.epochs[1:]]
    alone = [run for run in runs if run.setting.row == setting.alone().row]

    def median(values: Iterable[float]) -> float:
        return statistics.median(values)

    def cpu_ms(epochs: Sequence[Epoch], kind: str) -> float:
        return 1000 / steps * median(of_kind(epoch.cpu_seconds, kind) for epoch in epochs)

    seconds = median(epoch.seconds for epoch in measured)
    sent = median(of_kind(epoch.sent, "worker") for epoch in measured) / steps
    received = median(of_kind(epoch.received, "worker") for epoch in measured) / steps
    # A file written before waits were counted has none.
    ahead = setting.looks_ahead and "lookahead_steps" in measured[0].counters
    curves = [[epoch.auc for epoch in run.epochs] for run in own]
    last = [curve[-1] for curve in curves]
    return Figures(
        setting,
        1000 * seconds / worker_steps,
        steps * sizes.batch / seconds,
        sent / 1000,
        received / 1000,
        _kinds(setting, measured, (sent + received) / 1000),
        cpu_ms([e for run in alone for e in run.epochs[1:]], "worker") if alone else None,
        cpu_ms(measured, "worker"),
        cpu_ms(measured, "ps"),
        median(epoch.counters.get("messages", 0) for epoch in measured) / steps,
        median(e.counters["lookahead_waited_steps"] for e in measured) / steps if ahead else None,
        median(1000 * e.counters["lookahead_waited_seconds"] for e in measured) / steps
        if ahead
        else None,
        [(i + 1) * steps * sizes.batch for i in range(sizes.epochs)],
        [statistics.fmean(points) for points in zip(*curves, strict=True)],
        statistics.stdev(last) if len(last) > 1 else None,
    )


def _kinds(setting: Setting, epochs: Sequence[Epoch], total: float) -> dict[str, float]:
    """kB of a worker and step, by kind.

    embeddings: messages of het_tf, by its own counters.
    dense: messages of dense replicas, by their own counters; without replicas the dense layers'
      weights twice, since all are read and all gradients sent in each step.
    rest: framing, headers, acknowledgements, control, and what TCP sent again.
    embeddings + rest: of tf_keras, which does not count.
    dense + rest: of synchronous steps, and of dense replicas in a file written before those were
      counted.
    """
    if setting.variant == ALONE:
        return {}
    steps = setting.sizes.steps * setting.workers
    weights = 2 * epochs[0].dense_bytes / 1000
    if setting.variant == TF_KERAS:
        return {"dense": weights, "embeddings + rest": total - weights}

    def counted(prefix: str) -> float:
        up, down = f"{prefix}bytes_up", f"{prefix}bytes_down"
        return statistics.median(e.counters[up] + e.counters[down] for e in epochs) / steps / 1000

    embeddings = counted("")
    dense = counted("dense_") if "dense_bytes_up" in epochs[0].counters else weights
    rest = total - embeddings - dense
    # Synchronous steps have no replicas whose messages are counted.
    if rest < 0 or setting.variant in SYNCHRONOUS:
        return {"embeddings": embeddings, "dense + rest": total - embeddings}
    return {"embeddings": embeddings, "dense": dense, "rest": rest}


def of_kind(values: dict[str, float], kind: str) -> float:
    """The sum over the tasks of a kind, "worker" or "ps"."""
    return sum(value for task, value in values.items() if task.startswith(kind))
