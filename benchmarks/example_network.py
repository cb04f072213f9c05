"""How long the examples take on a network, beside tf_keras on tf.distribute's own strategy.

    python benchmarks/example_network.py --json=network.json kge --data=fb15k237 --epochs=3
    python benchmarks/example_network.py --json=network.json --report

Trains a program of examples/ on 4 workers and 2 parameter servers, each of which is a host of its
own (a network namespace) with 1 Gbit/s, with the defaults of het_tf; then the same model, data and
loss with tf_keras's Embedding under tf.distribute.ParameterServerStrategy (netns/train_example.py).
Runs are appended to --json. It needs root.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys

from example_quality import command, main_metric, program_parser, read
from netns import measure, tf_keras_environment

_SYSTEMS = ("het_tf", "tf_keras")
# That a pass trains on: of the data that docs/ shows, by words of the command.
_EXAMPLES = {
    "fb15k237": 272_115,
    "amazon_book": 652_514,
    "github_graph": 30_160,
    "deezer_hu": 200_599,
    "video_games": 30_901,
    "movielens": 89_872,
}


def train(
    system: str, example: str, words: list[str], workers: int, servers: int, rate: str, timeout: int
) -> dict:
    """Returns what netns.train_example prints, of a cluster of hosts."""
    path = [tf_keras_environment.install()] if system == "tf_keras" else []
    program = [sys.executable, "-m", "netns.train_example", system, example, *words]
    with measure.started(workers, servers) as cluster:
        cluster.network.limit(rate)
        with cluster.logs.open("chief") as log:
            done = subprocess.run(
                cluster.network.command("chief", program),
                env=cluster.chief_environment(path),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=timeout,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"{system} {example} failed:\n{cluster.logs.tail('chief')}")
    return json.loads(done.stdout.splitlines()[-1])


def seconds_to(target: float, run: dict) -> float:
    """Seconds of training until a metric is reached, in whole epochs."""
    values = [main_metric(metrics)[1] for metrics in run["metrics"]]
    epochs = next(i for i, value in enumerate(values, 1) if value >= target)
    return sum(run["seconds"][:epochs])


def report(runs: list[dict]) -> str:
    """A table: metrics, examples/s of an epoch without the first, seconds to 99 % of the metric.

    The 99 % are those of the lower metric of the two systems.
    """
    lines = [["command", "", *_SYSTEMS, *(f"{each}, examples/s" for each in _SYSTEMS), "times"]]
    lines[0] += [f"{each}, 99 %" for each in [*_SYSTEMS, "times"]]
    lines.append(["---"] * len(lines[0]))
    for words in dict.fromkeys(command(run) for run in runs):
        mine = {run["system"]: run for run in runs if command(run) == words}
        last = {system: main_metric(run["metrics"][-1]) for system, run in mine.items()}
        target = 0.99 * min(value for _, value in last.values())
        line = [f"`{words}`", next(iter(last.values()))[0]]
        line += [f"{last[each][1]:.3f}" if each in last else "" for each in _SYSTEMS]
        examples = next((count for word, count in _EXAMPLES.items() if word in words), math.nan)
        of_pass = {system: statistics.median(run["seconds"][1:]) for system, run in mine.items()}
        to_target = {system: seconds_to(target, run) for system, run in mine.items()}
        rates = {system: examples / seconds for system, seconds in of_pass.items()}
        for cells, seconds, form in (rates, of_pass, ",.0f"), (to_target, to_target, ".1f"):
            line += [format(cells[each], form) if each in cells else "" for each in _SYSTEMS]
            both = len(seconds) == len(_SYSTEMS)
            line.append(f"{seconds['tf_keras'] / seconds['het_tf']:.1f}" if both else "")
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--systems", default=",".join(_SYSTEMS), help="with commas")
    parser.add_argument("--workers", type=int, default=4, help="worker hosts")
    parser.add_argument("--servers", type=int, default=2, help="parameter server hosts")
    parser.add_argument("--rate", default="1gbit", help="of every host, as tc takes it")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds of a run")
    args = parser.parse_args()
    runs = read(args.json)
    if args.report:
        print(report(runs))
        return
    if not args.example:
        parser.error("an example is needed, or --report")
    for system in args.systems.split(","):
        found = train(
            system, args.example, args.words, args.workers, args.servers, args.rate, args.timeout
        )
        setting = {"system": system, "example": args.example, "flags": " ".join(args.words)}
        runs.append(
            {
                **setting,
                "workers": args.workers,
                "servers": args.servers,
                "rate": args.rate,
                "seconds": [round(seconds, 2) for seconds in found["seconds"]],
                "metrics": [
                    {name: round(value, 4) for name, value in metrics.items()}
                    for metrics in found["metrics"]
                ],
            }
        )
        print(runs[-1], flush=True)
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(runs, file, indent=1)


if __name__ == "__main__":
    main()
