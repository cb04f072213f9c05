"""What staleness costs the examples: table 1 of HET (VLDB 2022), with the models of examples/.

    python benchmarks/example_quality.py --json=runs.json kge --data=fb15k237 --epochs=5
    python benchmarks/example_quality.py --json=runs.json --plot=docs

Trains a program of examples/ with every bound and seed on one cluster, and in this process with
keras.layers.Embedding. Everything else is as the program has it; the words after its name are its
flags. Dense variables have the strategy's defaults, but for the run with dense_staleness=None.
Every run is appended to --json when it ends, and a run that is there already is not made again.
--report prints what all runs of the file show. --plot draws a picture for each program, too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import pathlib
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import flags

import het_tf

_EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
PROGRAMS = {name: (name, "train") for name in ("ctr", "gnn", "kge", "retrieval", "sequence")}
PROGRAMS["links"] = ("gnn", "links")
_KERAS = "keras"  # in the place of a bound: one process, keras.layers.Embedding
# In the place of a bound: default bounds of rows, and dense variables on the parameter servers.
_ON_SERVERS = "dense_staleness=None"
_BOUNDS = ("0", "10", "100", "1000", "unbounded", "default", _ON_SERVERS, _KERAS)
# Which one a program is compared by, and its name in tables.
_METRICS = {
    "auc": "AUC",
    "AUC": "AUC",
    "MRR": "MRR",
    "Recall@20": "Recall@20",
    "NDCG@10": "NDCG@10",
}
_ROWS = 120_000  # of a keras.layers.Embedding; more than the ids of any example


class InMemory(keras.layers.Embedding):
    """keras.layers.Embedding for any ids, which get their rows in the order of their first use."""

    def __init__(self, dim: int, *, optimizer="same", name=None, embeddings_initializer="uniform"):
        super().__init__(_ROWS, dim, embeddings_initializer, name=name)
        self.rows_optimizer = optimizer
        self._rows: dict[int, int] = {}

    @property
    def table(self) -> InMemory:
        return self

    def _rows_of(self, ids: np.ndarray) -> np.ndarray:
        unique, at = np.unique(ids, return_inverse=True)
        rows = [self._rows.setdefault(key, len(self._rows)) for key in unique.tolist()]
        return np.array(rows, np.int64)[at].reshape(ids.shape)

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        return np.array(self.embeddings)[self._rows_of(ids)]

    def call(self, ids):
        rows = tf.numpy_function(self._rows_of, [ids], tf.int64)
        return super().call(tf.ensure_shape(rows, ids.shape))


class Collection(keras.layers.Layer):
    """A layer of rows for each feature, in the place of a HetEmbeddingCollection."""

    layer_of_rows: type[keras.layers.Layer] = InMemory

    def __init__(self, features: dict[str, het_tf.layers.FeatureConfig]):
        super().__init__()
        self._features = features
        self._tables = {
            name: self.layer_of_rows(
                feature.table.embedding_dim,
                embeddings_initializer=feature.table.initializer,
                name=name,
            )
            for name, feature in features.items()
        }

    @property
    def layers(self) -> list[keras.layers.Layer]:
        return list(self._tables.values())

    def call(self, ids, weights):
        outputs = {}
        for name, feature in self._features.items():
            rows = self._tables[name](ids[name])
            if feature.table.combiner == "mean":
                weight = weights[name][..., None]
                total = keras.ops.maximum(keras.ops.sum(weight, -2), 1e-9)
                rows = keras.ops.sum(rows * weight, -2) / total
            outputs[name] = rows
        return outputs


def layers_of(layer: keras.layers.Layer, kind: type) -> list[keras.layers.Layer]:
    """The layers of a kind in a model, also those in models and collections in the model."""
    inner = [found for each in getattr(layer, "layers", ()) for found in layers_of(each, kind)]
    return list(dict.fromkeys([*([layer] if isinstance(layer, kind) else []), *inner]))


def one_share(data):
    """The data of one worker of one."""
    return data(tf.distribute.InputContext(1, 0, 1)) if callable(data) else data


class InProcess(keras.Model):
    """keras.Model that takes het_tf's functions of data, and optimizers of layers."""

    def fit(self, data, **kwargs):
        return super().fit(one_share(data), **kwargs)

    def evaluate(self, data, **kwargs):
        return super().evaluate(one_share(data), **kwargs)

    def compile(self, optimizer, *args, **kwargs):
        super().compile(optimizer, *args, **kwargs)
        self._of_rows = [
            (rows_optimizer(layer.rows_optimizer), layer.trainable_variables)
            for layer in layers_of(self, InMemory)
            if layer.rows_optimizer != "same"
        ]

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        variables = self.trainable_variables
        grads = dict(zip([v.path for v in variables], tape.gradient(loss, variables), strict=True))
        for optimizer, mine in self._of_rows:
            optimizer.apply([grads.pop(v.path) for v in mine], mine)
        rest = [v for v in variables if v.path in grads]
        if rest:
            self.optimizer.apply([grads[v.path] for v in rest], rest)
        return self.compute_metrics(x, y, predicted) | {"loss": loss}


def rows_optimizer(optimizer) -> keras.optimizers.Optimizer:
    """The optimizer of a layer's rows, as Keras has it."""
    if isinstance(optimizer, het_tf.optimizers.RowWiseAdagrad):
        start = optimizer.initial_accumulator_value
        return keras.optimizers.Adagrad(optimizer.learning_rate, start)
    return type(optimizer).from_config(optimizer.get_config())


@contextlib.contextmanager
def cached(bound: str) -> Iterator[None]:
    """Gives the layers of the examples another cache, or makes them Keras's."""
    if bound == _KERAS:

        def embedding(dim, optimizer="same", embeddings_initializer="uniform", name=None, **_):
            return InMemory(
                dim, optimizer=optimizer, embeddings_initializer=embeddings_initializer, name=name
            )

        with (
            mock.patch.object(het_tf.layers, "HetEmbedding", embedding),
            mock.patch.object(het_tf.layers, "HetEmbeddingCollection", Collection),
            mock.patch.object(het_tf.keras, "Model", InProcess),
        ):
            yield
        return
    if bound in ("default", _ON_SERVERS):
        yield
        return
    config = het_tf.CacheConfig(staleness=None if bound == "unbounded" else int(bound))

    def with_cache(layer):
        @functools.wraps(layer)
        def made(*args, **kwargs):
            return layer(*args, **{**kwargs, "cache": config})

        return made

    with (
        mock.patch.object(het_tf.layers, "HetEmbedding", with_cache(het_tf.layers.HetEmbedding)),
        mock.patch.object(
            het_tf.layers,
            "HetEmbeddingCollection",
            with_cache(het_tf.layers.HetEmbeddingCollection),
        ),
    ):
        yield


def load_program(name: str, words: list[str]) -> ModuleType:
    """A program of examples/, whose flags are given."""
    folder, module = PROGRAMS[name]
    sys.path.insert(0, str(_EXAMPLES / folder))
    program = importlib.import_module(module)
    flags.FLAGS([name, *words])
    return program


def run_all(name: str, words: list[str], bounds: list[str], seeds: int, workers: int, path: str):
    """Trains with every bound and seed that the file of runs does not have."""
    runs = read(path)
    program = load_program(name, [*words, f"--workers={workers}"])
    key = {"example": name, "flags": " ".join(words)}
    missing = [
        {**key, "bound": bound, "workers": 1 if bound == _KERAS else workers, "seed": seed}
        for seed in range(1, seeds + 1)
        for bound in bounds
    ]
    made = [
        {field: run[field] for field in ("example", "flags", "bound", "workers", "seed")}
        for run in runs
    ]
    missing = [setting for setting in missing if setting not in made]
    data = program.load()

    def run(setting: dict, strategy) -> None:
        # Initial weights and dropout. With TensorFlow's seed, too, every worker would draw the same
        # negatives and neighbours, and the same ones in each epoch.
        random.seed(setting["seed"])
        start = time.perf_counter()
        with cached(setting["bound"]):
            found = program.evaluate(program.train(strategy, data), data)
        seconds = round(time.perf_counter() - start, 1)
        metrics = {name: round(value, 4) for name, value in found.items()}
        runs.append({**setting, "seconds": seconds, "metrics": metrics})
        print(runs[-1], flush=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(runs, file, indent=1)

    for setting in missing:
        if setting["bound"] == _KERAS:
            run(setting, tf.distribute.get_strategy())
    clustered = [setting for setting in missing if setting["bound"] != _KERAS]
    if clustered:
        with het_tf.distribute.LocalCluster(workers, flags.FLAGS.ps) as cluster:
            strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
            bound_of_dense = strategy.dense_staleness
            for setting in clustered:
                on_servers = setting["bound"] == _ON_SERVERS
                strategy.dense_staleness = None if on_servers else bound_of_dense
                run(setting, strategy)


def read(path: str) -> list[dict]:
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def main_metric(metrics: dict[str, float]) -> tuple[str, float]:
    """The metric that a program is compared by: its name in tables, and its value."""
    name = next(name for name in _METRICS if name in metrics)
    return _METRICS[name], metrics[name]


def command(run: dict) -> str:
    """The command that trains the program."""
    folder, module = PROGRAMS[run["example"]]
    return f"{folder}/{module}.py {run['flags']}".strip()


def by_command(runs: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """Runs by command and bound."""
    found: dict[str, dict[str, list[dict]]] = {}
    for run in sorted(runs, key=lambda run: list(PROGRAMS).index(run["example"])):
        found.setdefault(command(run), {}).setdefault(run["bound"], []).append(run)
    return found


def report(runs: list[dict]) -> str:
    """A table: a line for each program, mean and standard deviation over the seeds."""
    bounds = [bound for bound in _BOUNDS if any(run["bound"] == bound for run in runs)]
    names = [f"{int(bound):,}" if bound.isdigit() else bound for bound in bounds]
    lines = [["command", "", *names], ["---"] * (2 + len(names))]
    for words, of_bound in by_command(runs).items():
        line = [f"`{words}`", main_metric(next(iter(of_bound.values()))[0]["metrics"])[0]]
        for bound in bounds:
            found = [main_metric(run["metrics"])[1] for run in of_bound.get(bound, [])]
            spread = f" ±{statistics.stdev(found):.3f}" if len(found) > 1 else ""
            line.append(f"{statistics.mean(found):.3f}{spread}" if found else "")
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(runs: list[dict], folder: str) -> None:
    """Draws a picture for each program: what the table has."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "het_tf", "svg.fonttype": "none", "font.size": 10}
    for name in dict.fromkeys(run["example"] for run in runs):
        figure, axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
        bounds = [bound for bound in _BOUNDS if bound != _KERAS]
        commands = by_command(runs_of(runs, name))
        for number, (words, of_bound) in enumerate(commands.items()):
            label = ", ".join(re.findall(r"--(?:model|format)=(\w+)", words)) or name
            for bound, mine in of_bound.items():
                values = [main_metric(run["metrics"])[1] for run in mine]
                color = f"C{number}"
                if bound == _KERAS:
                    axis.axhline(statistics.mean(values), color=color, linestyle=":")
                    continue
                x = bounds.index(bound)
                axis.plot([x] * len(values), values, "o", color=color, alpha=0.6)
            axis.plot([], [], "o", color=f"C{number}", label=label)
        axis.plot([], [], ":", color="grey", label="keras.layers.Embedding")
        axis.set_xticks(range(len(bounds)), [bound.replace("=", "\n=") for bound in bounds])
        axis.set_xlabel("staleness")
        axis.set_ylabel(main_metric(runs_of(runs, name)[0]["metrics"])[0])
        axis.grid(alpha=0.3)
        figure.legend(fontsize=8, loc="outside upper center", ncols=3)
        figure.savefig(os.path.join(folder, f"example_{name}.svg"), metadata={"Date": None})
        plt.close(figure)


def runs_of(runs: list[dict], name: str) -> list[dict]:
    return [run for run in runs if run["example"] == name]


def program_parser(doc: str) -> argparse.ArgumentParser:
    """Flags and words of a benchmark that trains a program of examples/."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--json", required=True, help="file of the runs, appended to")
    parser.add_argument("--report", action="store_true", help="print the runs of the file")
    parser.add_argument("example", nargs="?", choices=PROGRAMS, help="program of examples/")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="flags of the program")
    return parser


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--bounds", default=",".join(_BOUNDS), help="staleness, with commas")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every bound")
    parser.add_argument("--workers", type=int, default=8, help="worker processes")
    parser.add_argument("--plot", help="folder to draw pictures of the runs into")
    args = parser.parse_args()
    bounds = args.bounds.split(",")
    if set(bounds) - set(_BOUNDS):
        parser.error(f"--bounds={args.bounds} must be of {', '.join(_BOUNDS)}")
    if args.report or args.plot:
        print(report(read(args.json)))
        if args.plot:
            plot(read(args.json), args.plot)
    elif args.example:
        run_all(args.example, args.words, bounds, args.seeds, args.workers, args.json)
    else:
        parser.error("an example is needed, or --report")


if __name__ == "__main__":
    main()
