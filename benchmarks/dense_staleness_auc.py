"""Test AUC and bytes per example over dense_staleness: which k costs no AUC?

    OPENBLAS_NUM_THREADS=1 python benchmarks/dense_staleness_auc.py --json=dense_auc.json \\
        --movielens_100k=DIR

Trains a network on embeddings (embedding_network.py) on MovieLens 100K, for every optimizer of the
dense variables, number of workers, dense_staleness and seed, without a cache and with
`CacheConfig()`'s default bounds (or others: --caches). The workers take their steps in turn, in
this process and on the real ops (one_process.py, dense_workers.py); each has its own replica with
slots of its own, and its own cache, which holds every row. Rows are trained with row-wise Adagrad.
Test AUC is of what the servers have after the last flush; bytes are all messages as replicas and
caches count them, the last flush included (of dense_staleness None those of weights and gradients),
divided by the training examples. Everything but the setting under test is the same in the runs of a
seed: order of the examples, initial rows and weights. Learning rates are those that are best for
dense_staleness None without a cache on the first seed.

Every run is appended to --json when it ends, and a run that is there already is not made again: cut
the work into parts by the flags, and --read what other parts have made.

At the end, the table of dense_staleness_table.py.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator

import auc_runs
import click_data
import dense_workers
import factorization_machine
import numpy as np
import one_process
from absl import app, flags
from dense_staleness_table import Run, Setting, report
from embedding_network import EmbeddingNetwork

from het_tf import optimizers
from het_tf.cache_config import CacheConfig

_MOVIELENS_100K = flags.DEFINE_string(
    "movielens_100k", None, "data_dir of tensorflow-datasets with movielens/100k-ratings"
)
_OPTIMIZERS = flags.DEFINE_list("optimizers", ["adam", "adagrad"], "of adam, adagrad, sgd")
_RATES = flags.DEFINE_list("learning_rates", ["0.002", "0.2"], "one for each of --optimizers")
_WORKERS = flags.DEFINE_list("workers", ["2", "4", "8"], "numbers of workers")
_STALENESS = flags.DEFINE_list("staleness", ["0", "1", "4", "16", "64"], "beside None")
_CACHES = flags.DEFINE_list(
    "caches", ["none", "default"], "none, default, or a number: CacheConfig's total_staleness"
)
_SEEDS = flags.DEFINE_integer("seeds", 5, "runs of every setting, with seeds 1, 2, ...")
_DIM = flags.DEFINE_integer("dim", 16, "columns of a row")
_ROW_RATE = flags.DEFINE_float("row_learning_rate", 0.1, "of row-wise Adagrad")
_BATCH = flags.DEFINE_integer("batch", 128, "examples of a step")
_EPOCHS = flags.DEFINE_integer("epochs", 3, "passes over the data")
_EXAMPLES = flags.DEFINE_integer("examples", None, "train on that many only")
_JSON = flags.DEFINE_string("json", None, "file of the runs, appended to")
_READ = flags.DEFINE_list("read", [], "further files of runs, read only")

_ALL_ROWS = 1_000_000  # more than the data set has
_ACCUMULATOR = 1e-4  # initial; gradients are those of a mean over a batch


def make_rows(setting: Setting, seed: int) -> one_process.Workers:
    """The table and the workers' caches."""
    cached = setting.cache != "none"
    total = int(setting.cache) if cached and setting.cache != "default" else None
    config = CacheConfig(_ALL_ROWS, total_staleness=total)
    bounds = config.bound_attributes(setting.workers) if cached else {}
    return one_process.Workers(
        setting.workers,
        _DIM.value,
        optimizers.RowWiseAdagrad(initial_accumulator_value=_ACCUMULATOR),
        _ALL_ROWS if cached else 0,
        **bounds,
        seed=seed,
    )


def make_dense(setting: Setting, initial: np.ndarray) -> dense_workers.DenseWorkers:
    """The dense variables and the workers' replicas."""
    optimizer = dense_workers.OPTIMIZERS[setting.optimizer](setting.learning_rate)
    if setting.staleness is None:
        return dense_workers.OneForAll(initial, optimizer)
    return dense_workers.Replicas(setting.workers, setting.staleness, initial, optimizer)


def train(network: EmbeddingNetwork, data: click_data.Clicks, setting: Setting, seed: int) -> Run:
    """One run: the workers' steps in turn."""
    start = time.perf_counter()
    rows = make_rows(setting, seed)
    dense = make_dense(setting, network.initial_weights(seed))
    rng = np.random.default_rng(seed)
    keys, labels = data.train_keys, data.train_labels
    batch = _BATCH.value
    trained = 0
    turn = itertools.cycle(range(setting.workers))
    for _ in range(_EPOCHS.value):
        order = rng.permutation(len(labels))[: _EXAMPLES.value]
        for first in range(0, len(order) - batch + 1, batch):
            chosen = order[first : first + batch]
            worker = next(turn)
            present = keys[chosen] != click_data.PAD
            inputs = np.zeros((*present.shape, rows.dim), np.float32)
            inputs[present] = rows.lookup(worker, keys[chosen][present])
            weights = dense.weights(worker)
            of_rows, of_weights = network.gradients(inputs, labels[chosen], weights)
            rows.update(worker, of_rows[present], _ROW_RATE.value)
            dense.update(worker, of_weights)
            trained += batch
    rows.flush()
    dense.flush()
    row_stats, dense_stats = rows.stats(), dense.stats()
    auc = test_auc(network, data, rows, dense)
    rows.close()
    dense.close()
    return Run(
        setting,
        seed,
        auc,
        (row_stats["bytes_up"] + row_stats["bytes_down"]) / trained,
        (dense_stats["bytes_up"] + dense_stats["bytes_down"]) / trained,
        time.perf_counter() - start,
    )


def test_auc(
    network: EmbeddingNetwork,
    data: click_data.Clicks,
    rows: one_process.Workers,
    dense: dense_workers.DenseWorkers,
) -> float:
    """Of what the servers have."""
    present = data.test_keys != click_data.PAD
    inputs = np.zeros((*present.shape, rows.dim), np.float32)
    inputs[present] = rows.table_rows(data.test_keys[present])
    scores = network.logits(inputs, dense.shared_weights())
    return factorization_machine.area_under_curve(scores, data.test_labels)


def settings() -> Iterator[Setting]:
    """As the flags ask for, and what they are compared with.

    Workers that share everything and take turns are as one: without a cache and with None there is
    one setting for any number of them.
    """
    rates = map(float, _RATES.value)
    for optimizer, rate in zip(_OPTIMIZERS.value, rates, strict=True):
        yield Setting(optimizer, rate, "none", 1, None)
        for cache, workers in itertools.product(_CACHES.value, map(int, _WORKERS.value)):
            if cache != "none":
                yield Setting(optimizer, rate, cache, workers, None)
            for staleness in map(int, _STALENESS.value):
                yield Setting(optimizer, rate, cache, workers, staleness)


def main(argv: list[str]) -> None:
    del argv
    one_process.single_threaded()

    @functools.cache
    def data() -> click_data.Clicks:
        return click_data.movielens_100k(_MOVIELENS_100K.value)

    @functools.cache
    def network() -> EmbeddingNetwork:
        return EmbeddingNetwork(
            data().train_keys.shape[1], added=click_data.GENRES_100K, dim=_DIM.value
        )

    def train_and_say(setting: Setting, seed: int) -> Run:
        run = train(network(), data(), setting, seed)
        print(
            f"{setting.optimizer} {setting.learning_rate:g}, cache {setting.cache},"
            f" {setting.workers} workers, k {setting.staleness}, seed {seed}: AUC {run.auc:.4f},"
            f" {run.row_bytes:.1f} + {run.dense_bytes:.1f} bytes/example, {run.seconds:.1f} s",
            flush=True,
        )
        return run

    runs = auc_runs.make(
        list(settings()), _SEEDS.value, _JSON.value, _READ.value, Run, train_and_say
    )
    print(report(runs))


if __name__ == "__main__":
    app.run(main)
