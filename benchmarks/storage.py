"""Training with most rows on a disk (het_tf.Storage), beside training with all rows in memory.

    python benchmarks/storage.py --path=/nvme/rows --rows=100000000

One worker and one parameter server on this machine train an embedding on ids of a Zipf
distribution, with look-ahead. First the table gets all rows, in one of two orders:

  frequent first   as in training, where frequent ids get their rows early
  shuffled         the worst order: rows of every frequency are in every page

"memory" has the rows in the server's memory. "disk" has --share of them there. Of the uniform
distribution, hardly a row comes again: its rate is the disk's. "disk rate" is how many pages of
4096 bytes this program reads from the same disk at random places, with as many reads under way.
"server MB" is the memory of the server process beyond that of an empty table, "table MB" what the
table counts of it: rows in memory, index and keys. "asked MB" is the storage's memory for rows.
"""

from __future__ import annotations

import json
import mmap
import os
import pathlib
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from process_memory import resident_bytes
from zipf import zipf_ranks

import het_tf

_PATH = flags.DEFINE_string("path", None, "folder on the disk", required=True)
_ROWS = flags.DEFINE_integer("rows", 100_000_000, "rows of the table")
_DIM = flags.DEFINE_integer("dim", 16, "columns of a row")
_SHARE = flags.DEFINE_float("share", 0.1, "of the rows' bytes that may be in memory")
_EXPONENT = flags.DEFINE_float("exponent", 1.05, "of the Zipf distribution")
_IDS = flags.DEFINE_integer("ids", 4096, "ids of a batch")
_STEPS = flags.DEFINE_integer("steps", 400, "measured steps")
_WARMUP = flags.DEFINE_integer("warmup", 800, "steps before those")
_CAPACITY = flags.DEFINE_integer("capacity", 100_000, "rows of the worker's cache")
_RUNS = flags.DEFINE_list(
    "runs",
    ["memory", "disk", "disk shuffled", "memory uniform", "disk uniform"],
    "what to run",
)
_JSON = flags.DEFINE_string("json", None, "file to write the figures to")

_RECORD_BYTES = 16 + 4  # key, clock, slot
_AT_ONCE = 200_000  # rows of an import
_DISK_PAGES, _DISK_READS = 1 << 18, 1 << 16


def disk_rate(path: str) -> float:
    """Returns the pages that the disk reads in a second, at random places of a file of 1 GB."""
    with tempfile.TemporaryFile(dir=path) as file:
        for _ in range(_DISK_PAGES >> 8):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pages = np.random.default_rng(1).permutation(_DISK_PAGES)[:_DISK_READS].tolist()
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)
            began = time.perf_counter()
            for first in range(0, _DISK_READS, _IDS.value):
                batch = pages[first : first + _IDS.value]
                for page in batch:
                    mapped.madvise(mmap.MADV_WILLNEED, page * 4096, 4096)
                for page in batch:
                    mapped[page * 4096]
            return _DISK_READS / (time.perf_counter() - began)


def memory_mb(pid: int) -> float:
    """Returns the memory of a process, pages of files among it."""
    return sum(resident_bytes(name, pid) for name in ("RssAnon", "RssFile")) / 1e6


def run(name: str) -> dict[str, float]:
    """Trains in one of the ways, and returns the figures."""
    rng = np.random.default_rng(1)
    shape = (_WARMUP.value + _STEPS.value, _IDS.value)
    if "uniform" in name:
        ids = rng.integers(0, _ROWS.value, shape)
    else:
        ids = zipf_ranks(rng, _ROWS.value, _EXPONENT.value, shape)
    # Ids are ranks. Keys of ranks are mixed, so that no key tells its rank.
    keys = np.arange(_ROWS.value) * 1_000_003
    asked = int(_SHARE.value * _ROWS.value * (_RECORD_BYTES + 4 * _DIM.value))
    storage = het_tf.Storage(asked, _PATH.value) if "disk" in name else None
    with het_tf.distribute.LocalCluster(1, 1) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            inputs = keras.Input((_IDS.value,), dtype="int64")
            layer = het_tf.layers.HetEmbedding(
                _DIM.value,
                optimizer=het_tf.optimizers.RowWiseAdagrad(0.05),
                cache=het_tf.CacheConfig(_CAPACITY.value),
                storage=storage,
            )
            model = het_tf.keras.Model(inputs, keras.ops.sum(layer(inputs), axis=(1, 2)))
            model.compile("sgd", "mse")
        pid = cluster.process("ps", 0).pid
        empty = memory_mb(pid)
        order = rng.permutation(_ROWS.value) if "shuffled" in name else np.arange(_ROWS.value)
        began = time.perf_counter()
        for first in range(0, _ROWS.value, _AT_ONCE):
            part = keys[order[first : first + _AT_ONCE]]
            layer.table.assign(part, np.full((len(part), _DIM.value), 0.01, np.float32))
        filled = time.perf_counter() - began
        batches = keys[ids][:, np.newaxis]

        def train(part: np.ndarray) -> float:
            dataset = tf.data.Dataset.from_tensor_slices((part, np.zeros((len(part), 1))))
            began = time.perf_counter()
            model.fit(dataset, verbose=0)
            return time.perf_counter() - began

        train(batches[: _WARMUP.value])
        before = layer.table.stats()
        seconds = train(batches[_WARMUP.value :])
        after = layer.table.stats()
        used = memory_mb(pid) - empty
        assert after["rows"] == _ROWS.value
        figures = {
            "fill_seconds": filled,
            "steps_per_s": _STEPS.value / seconds,
            "rows_merged": (after["rows_merged"] - before["rows_merged"]) / _STEPS.value,
            "pages_read": (after["pages_read"] - before["pages_read"]) / _STEPS.value,
            "pages_per_s": (after["pages_read"] - before["pages_read"]) / seconds,
            "server_mb": used,
            "table_mb": after["memory_bytes"] / 1e6,
            "asked_mb": (asked if storage else 0) / 1e6,
            "disk_mb": after["disk_bytes"] / 1e6,
        }
        layer.table.clear()
        return figures


def main(argv: list[str]) -> None:
    """Prints the table."""
    del argv
    rate = disk_rate(_PATH.value)
    print(
        f"{_ROWS.value:,} rows of {_DIM.value} columns, Zipf({_EXPONENT.value}), {_SHARE.value:.0%}"
        f" in memory, {_IDS.value} ids a step; disk rate {rate:,.0f} pages/s"
    )
    results = {"disk_rate": rate}
    for name in _RUNS.value:
        results[name] = figures = run(name)
        print(f"{name:16}" + ", ".join(f"{k} {v:,.1f}" for k, v in figures.items()), flush=True)
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    app.run(main)
