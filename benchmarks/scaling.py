"""What a step would take with more workers and other networks: a model, checked against runs.

    python benchmarks/scaling.py --runs=out/netns.json

Reads runs of netns_cluster.py, predicts the time of each from what it moved and from what moving
costs where the network has no limit, prints the error, and then predicts clusters that do not fit
on this machine. The runs need "alone" and, for every variant, one with --rates=none.

A step of one of N workers takes the longest of

  wire      T_N of a closed queueing network: a worker computes for c, its messages from the servers
            pass the busiest server's link, then those to the servers do, and it starts over.
                r_i(n) = D_i * (1 + q_i(n - 1))        response time of link i, D_i = bytes / rate
                T_n    = c + o + r_1(n) + r_2(n)       q_i(n) = n * r_i(n) / T_n,    q_i(0) = 0
            (mean value analysis: Reiser and Lavenberg, J. ACM 27(2), 1980.) o: what the other
            servers send and get, which shares nothing but the worker's own link. With look-ahead
            and replicas of the dense variables a step's messages are under way while others are
            computed, one exchange at a time: then c is not in T_n, and bounds the step beside it.
  handling  c + h: h is the CPU time that messages cost a worker beyond computing, and the servers.
            Copying is done while the wire is busy, so the longer of the two counts, not the sum.
  cores     N * (all CPU time of a step) / cores, where all tasks share this machine's.

c     CPU time of a step of a worker that trains alone (the run "alone")
h     CPU time of the worker's process, less c, and of the servers', a step, in the run of the same
      variant without a limit: merging rows, applying gradients, serialising, the kernel's TCP
bytes of the servers' interfaces, in the run that is predicted
cores what this machine gave in the run that is predicted: idle time and the tasks' CPU time over
      wall time (what is neither was another user's)

In a cluster that is not measured every task has a host of its own. Then workers share the servers,
whose CPU time is a third station, with as many cores as --server_cores says ("wire" in what is
printed, too), and the chief, which schedules closures on one core, so that N times its CPU time of
a step is a bound in the place of "cores". (Some of that time is by the second and not by the step,
so that a chief may do better.) Bytes of the embeddings grow
with the number of workers, since bounds hold over all of them: on a straight line through the
numbers of workers measured, up to what they are without a cache. (With one number measured they
stay.) A variant's dense bytes stay, and those of variables kept on servers are split as variables
are: the largest is on one server.

The last column is the number of workers for one server from which on they wait for it (the knee of
the asymptotic bounds, T_1 / max D: Denning and Buzen, Computing Surveys 10(3), 1978).
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence

from absl import app, flags
from netns import criteo_shape, measure, runs
from netns.measure import Epoch
from netns.network import bits_per_second
from netns.runs import ALONE, NO_CACHE, TF_KERAS, Figures, Run, Setting

_RUNS = flags.DEFINE_list("runs", None, "files of netns_cluster.py", required=True)
_WORKERS = flags.DEFINE_list("workers", ["8", "32", "128", "512", "1024"], "to predict")
_RATES = flags.DEFINE_list("rates", ["1gbit", "10gbit", "25gbit", "100gbit", "400gbit"], "of hosts")
_PER_SERVER = flags.DEFINE_integer("workers_per_server", 8, "of clusters to predict")
_SERVER_CORES = flags.DEFINE_integer("server_cores", 16, "of a server of theirs")
_JSON = flags.DEFINE_string("json", None, "file to write the predictions to")

_LABEL = 70  # columns that the longest label of a setting takes

# Of the rate, what is left for payload: in packets of 1,500 bytes, and as tbf counts their headers.
_PAYLOAD_SHARE = 1448 / 1514


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step of one worker costs. Seconds and bytes.

    Attributes:
      compute: c.
      handling_worker: the worker's part of h.
      handling_servers: the servers' part.
      chief: CPU time of the chief.
      down: bytes from the servers, by server, the busiest first.
      up: bytes to the servers, in the same order.
      ahead: whether its messages are under way while other steps are computed.
    """

    compute: float
    handling_worker: float
    handling_servers: float
    chief: float
    down: tuple[float, ...]
    up: tuple[float, ...]
    ahead: bool

    @property
    def handling(self) -> float:
        """h."""
        return self.handling_worker + self.handling_servers

    def wire(self, rate: float | None) -> tuple[list[float], float]:
        """Demands of the busiest server's link, down and up, and what is spent at no server's.

        Args:
          rate: bit/s; None: no limit.
        """
        think = 0.0 if self.ahead else self.compute
        if rate is None:
            return [], think
        per_byte = 8 / (rate * _PAYLOAD_SHARE)
        others = sum(self.down[1:]) + sum(self.up[1:])
        return [self.down[0] * per_byte, self.up[0] * per_byte], think + others * per_byte


def response(customers: int, think: float, demands: Sequence[float]) -> float:
    """Seconds of a round of a closed queueing network, by mean value analysis.

    Args:
      customers: N.
      think: seconds of a round spent at no station.
      demands: seconds of service at each station.
    """
    queues = [0.0] * len(demands)
    total = think
    for n in range(1, customers + 1):
        times = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        total = think + sum(times)
        queues = [n * time / total for time in times]
    return total


def predict_here(step: Step, workers: int, rate: float | None, cores: float) -> dict[str, float]:
    """Seconds of a step where all tasks share this machine's cores, by what bounds it."""
    links, think = step.wire(rate)
    return {
        "wire": response(workers, think, links),
        "handling": step.compute + step.handling,
        "cores": workers * (step.compute + step.handling + step.chief) / cores,
    }


def predict_cluster(step: Step, workers: int, rate: float) -> dict[str, float]:
    """Seconds of a step where every task has a host of its own, by what bounds it."""
    links, think = step.wire(rate)
    servers = step.handling_servers / (len(step.down) * _SERVER_CORES.value)
    return {
        "wire": response(workers, think, [*links, servers]),
        "handling": step.compute + step.handling,
        "chief": workers * step.chief,
    }


def knee(step: Step, rate: float) -> float:
    """Workers from which on they wait for the busiest server."""
    links, think = step.wire(rate)
    servers = step.handling_servers / (len(step.down) * _SERVER_CORES.value)
    alone = max(think + sum(links), step.compute + step.handling)
    return alone / max(*links, servers)


class Measured:
    """The runs, and the costs that are read from them."""

    def __init__(self, measured: Sequence[Run]):
        """Takes in the runs.

        Raises:
          ValueError: none of them is of ALONE.
        """
        self.figures = runs.figures(measured)
        self._runs: dict[Setting, list[Run]] = {row.setting: [] for row in self.figures}
        for run in measured:
            self._runs[run.setting.row].append(run)
        alone = [row for row in self.figures if row.setting.variant == ALONE]
        if not alone:
            raise ValueError('the runs need one of "alone": netns_cluster.py --variants=alone')
        self._alone = {row.setting.workers: row for row in alone}

    def cores(self, setting: Setting) -> float:
        """Cores that this machine gave: what was not idle and not the tasks' was another user's."""
        return statistics.median(
            (sum(epoch.cpu_seconds.values()) + epoch.idle_seconds) / epoch.seconds
            for run in self._runs[setting]
            for epoch in run.epochs[1:]
        )

    def unlimited(self, setting: Setting) -> Setting:
        """The same without a limit, of as many workers and servers if there is one.

        Raises:
          ValueError: there is none.
        """
        same = [each for each in self._same(setting) if each.rate is None]
        if not same:
            raise ValueError(f"the runs need one of {setting.label} with --rates=none")
        shape = setting.workers, setting.servers
        return min(same, key=lambda each: (each.workers, each.servers) != shape)

    def step(self, setting: Setting) -> Step:
        """What a step of a measured setting costs: its own bytes, CPU time without a limit."""
        return self._costs(
            setting,
            self._by_server(setting, lambda epoch: epoch.sent),
            self._by_server(setting, lambda epoch: epoch.received),
        )

    def step_of(self, setting: Setting, workers: int, servers: int) -> Step:
        """What a step of a measured variant costs in a cluster that was not measured."""
        down = self._spread(setting, lambda e: e.received, "bytes_down", workers, servers)
        up = self._spread(setting, lambda e: e.sent, "bytes_up", workers, servers)
        return self._costs(setting, down, up)

    def _by_server(
        self, setting: Setting, side: Callable[[Epoch], dict[str, int]]
    ) -> Sequence[float]:
        """Bytes of each server's interface for a step of one worker, the busiest first."""
        hosts = [measure.name("ps", index) for index in range(setting.servers)]
        each = [
            self._per_step(setting, lambda epoch, host=host: side(epoch)[host]) for host in hosts
        ]
        return sorted(each, reverse=True)

    def _spread(
        self,
        setting: Setting,
        side: Callable[[Epoch], dict[str, int]],
        counter: str,
        workers: int,
        servers: int,
    ) -> Sequence[float]:
        """The same for a cluster that was not measured; side and counter: of the workers."""
        total = self._per_step(setting, lambda epoch: runs.of_kind(side(epoch), "worker"))
        largest = 4.0 * criteo_shape.FIELDS * setting.sizes.dim * setting.sizes.hidden[0]
        if setting.variant == TF_KERAS:
            dense = self._runs[setting][0].epochs[0].dense_bytes
            # Its table is one variable, too.
            return _busiest_first(0.0, [largest, total - dense], dense - largest, servers)
        rest = total - self._per_step(setting, lambda epoch: epoch.counters[counter])
        rows = self._rows_bytes(setting, counter, workers)
        if setting.dense_staleness in ("default", "none"):
            return _busiest_first(rows, [largest], rest - largest, servers)
        return _busiest_first(rows + rest, [], 0.0, servers)

    def _costs(self, setting: Setting, down: Sequence[float], up: Sequence[float]) -> Step:
        unlimited = self.unlimited(setting)
        (free,) = (row for row in self.figures if row.setting == unlimited)
        compute = self._alone_as(free.setting.workers).worker_ms / 1000
        worker = max(0.0, free.worker_ms / 1000 - compute)
        chief = self._per_step(unlimited, lambda epoch: epoch.cpu_seconds["chief"])
        # At dense_staleness 0 the step itself reads and writes, as it does on the servers.
        ahead = setting.looks_ahead and setting.dense_staleness not in ("default", "none", "0")
        servers = free.server_ms / 1000
        return Step(compute, worker, servers, chief, tuple(down), tuple(up), ahead)

    def _rows_bytes(self, setting: Setting, counter: str, workers: int) -> float:
        """Bytes of the embedding's messages a step with so many workers."""

        def measured(settings: Iterable[Setting]) -> dict[int, float]:
            return {s.workers: self._per_step(s, lambda e: e.counters[counter]) for s in settings}

        points = measured(self._same(setting))
        few, many = min(points), max(points)
        slope = (points[many] - points[few]) / (many - few) if many > few else 0.0
        no_cache = dataclasses.replace(setting, variant=NO_CACHE, lookahead=None)
        most = max(measured(self._same(no_cache)).values(), default=math.inf)
        return min(points[few] + slope * (workers - few), max(most, points[few]))

    def _per_step(self, setting: Setting, read: Callable[[Epoch], float]) -> float:
        epochs = [epoch for run in self._runs[setting] for epoch in run.epochs[1:]]
        return statistics.median(map(read, epochs)) / (setting.sizes.steps * setting.workers)

    def _same(self, setting: Setting) -> list[Setting]:
        """Measured settings of the same training on any cluster."""
        return [s for s in self._runs if s.training == setting.training]

    def _alone_as(self, workers: int) -> Figures:
        """Of as many workers, run close to those on a cluster, if there is that."""
        return self._alone.get(workers) or next(iter(self._alone.values()))


def _busiest_first(
    even: float, pieces: Sequence[float], small: float, servers: int
) -> Sequence[float]:
    """Bytes by server.

    Args:
      even: bytes that every server has the same part of.
      pieces: bytes that are of one server each; no two of the same, where there are servers enough.
      small: bytes that go where there is room.
      servers: number of servers.
    """
    total = even + sum(pieces) + small
    if servers == 1:
        return [total]
    busiest = max(total / servers, max(pieces, default=0.0) + even / servers)
    return [busiest, *[(total - busiest) / (servers - 1)] * (servers - 1)]


def check(measured: Measured) -> list[dict[str, object]]:
    """Predictions of what was measured, printed beside it."""
    columns = ("measured", "predicted", "error", "bound by", "cores")
    print(
        f"{'ms a step of a worker':{_LABEL + 22}}" + "".join(f"{column:>10}" for column in columns)
    )
    checked = []
    for row in measured.figures:
        setting = row.setting
        if setting.variant == ALONE:
            continue
        rate = None if setting.rate is None else bits_per_second(setting.rate)
        cores = measured.cores(setting)
        parts = predict_here(measured.step(setting), setting.workers, rate, cores)
        bound = max(parts, key=parts.__getitem__)
        predicted = 1000 * parts[bound]
        error = predicted / row.ms_per_step - 1
        cluster = f"{setting.workers}+{setting.servers}, {setting.rate or 'no limit'}"
        print(
            f"{setting.label:{_LABEL}}{cluster:22}{row.ms_per_step:10.1f}{predicted:10.1f}{error:10.0%}"
            f"{bound:>10}{cores:10.2f}"
        )
        checked.append(
            {"case": f"{setting.label}, {cluster}", "ms": row.ms_per_step, "predicted": predicted}
        )
    errors = [abs(each["predicted"] / each["ms"] - 1) for each in checked]
    print(f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}\n")
    return checked


def foresee(measured: Measured) -> list[dict[str, object]]:
    """Predictions of clusters that were not measured, printed."""
    foreseen = []
    settings = [row.setting for row in measured.figures if row.setting.variant != ALONE]
    variants = {s.training: s for s in reversed(settings)}
    for text in _RATES.value:
        rate = bits_per_second(text)
        print(
            f"{text}, {_PER_SERVER.value} workers a server: examples/s, share of the ceiling, bound"
        )
        print(
            f"{'workers':{_LABEL}}" + "".join(f"{n:>24}" for n in _WORKERS.value) + f"{'knee':>6}"
        )
        for setting in reversed(variants.values()):
            free = measured.unlimited(setting)
            line = f"{setting.label:{_LABEL}}"
            for workers in map(int, _WORKERS.value):
                servers = math.ceil(workers / _PER_SERVER.value)
                step = measured.step_of(free, workers, servers)
                parts = predict_cluster(step, workers, rate)
                bound = max(parts, key=parts.__getitem__)
                examples = workers * setting.sizes.batch / parts[bound]
                share = step.compute / parts[bound]
                line += f"{examples:10,.0f} {share:4.0%} {bound:8}"
                foreseen.append(
                    {"case": setting.label, "rate": text, "workers": workers}
                    | {"servers": servers, "examples_per_s": examples, "bound": bound}
                )
            one_server = measured.step_of(free, max(map(int, _WORKERS.value)), 1)
            print(f"{line}{knee(one_server, rate):6.1f}")
        print()
    return foreseen


def main(argv: list[str]) -> int:
    del argv
    files = [pathlib.Path(path) for path in _RUNS.value]
    measured = Measured([run for path in files for run in runs.read(path)])
    everything = {"measured": check(measured), "foreseen": foresee(measured)}
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(everything, indent=1))
    return 0


if __name__ == "__main__":
    app.run(main)
