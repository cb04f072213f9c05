"""Memory and time of saving and restoring one shard on a parameter server.

    python benchmarks/checkpoint.py --rows=20000000 --dim=16 --folder=/data
    python benchmarks/checkpoint.py --chain

Puts rows into a table of one shard on a server of a local cluster, and saves and restores it with
`tf.train.Checkpoint`. Prints how far the resident sets of the server and of this process, the
coordinator, rose above what they were before (the kernel's VmHWM, started anew); the restore is
into the table that is there, whose memory the server gives back first. While it saves, a worker
trains; its steps a second are compared with those before.

The yardstick of the time is `dd` of as many bytes in the same folder, right before and right after,
of which the quicker one counts: written with fsync, read after the kernel was told to forget the
file. The checkpoint's files are treated the same: they are synced within the time, and forgotten
before they are read. Restoring reads them
twice, the first time to check them. Exit status 1 if a process takes more than --limit MB.

With --chain: a `het_tf.checkpoint.Manager` saves all rows, then, after one row in a hundred
changed, those, and restores both. Exit status 1 also if the second one has more than 2 % of the
bytes of the first.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import app, flags
from process_memory import reset_peak, resident_bytes

import het_tf
from het_tf.checkpoint import TableState
from het_tf.runtime.broadcast import cluster_devices
from het_tf.tables.table import EmbeddingTable, TableExport
from het_tf.tables.worker_cache import WorkerCache

_ROWS = flags.DEFINE_integer("rows", 20_000_000, "rows of the shard", lower_bound=1)
_DIM = flags.DEFINE_integer("dim", 16, "columns of a row", lower_bound=1)
_FOLDER = flags.DEFINE_string("folder", None, "where the files go; None: the folder for such")
_LIMIT = flags.DEFINE_float("limit", 64, "MB that a process may take beside the table")
_OUT = flags.DEFINE_string("out", None, "file for the figures, as JSON")
_CHAIN = flags.DEFINE_bool("chain", False, "of checkpoints that build on one another")
_PART = 200_000  # rows that are put into the table at once
_BATCH = 4096


def rise(pids: dict[str, int], action: Callable[[], None]) -> tuple[dict[str, int], float]:
    """Runs `action`; bytes by which each process's resident set was higher, and the seconds."""
    before = {}
    for name, pid in pids.items():
        reset_peak(pid)
        before[name] = resident_bytes(process=pid)
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    return {n: resident_bytes("VmHWM", pid) - before[n] for n, pid in pids.items()}, seconds


def forget(paths: list[pathlib.Path]) -> None:
    """Has the kernel drop what it keeps of files in memory."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd(*arguments: str) -> float:
    """Seconds that dd takes."""
    start = time.perf_counter()
    subprocess.run(["dd", *arguments, "bs=4M"], check=True, capture_output=True)
    return time.perf_counter() - start


class Training:
    """Steps of a worker without a cache, in the background."""

    def __init__(self, strategy: het_tf.distribute.HetParameterServerStrategy, cache: WorkerCache):
        self.steps = 0
        self._ends = threading.Event()
        keys = tf.random.uniform([_BATCH], maxval=_ROWS.value, dtype=tf.int64)
        gradients = tf.zeros([_BATCH, _DIM.value])

        @tf.function
        def step() -> None:
            _, ticket = cache.lookup_op(cache.unique_ids_op(keys))
            cache.update_op(ticket, gradients, tf.constant(0.1))

        def run() -> None:
            while not self._ends.is_set():
                with tf.device(strategy.worker_device(0)):
                    step()
                self.steps += 1

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


def fill(table: EmbeddingTable) -> None:
    """Every key in [0, rows)."""
    rng = np.random.default_rng(0)
    for first in range(0, _ROWS.value, _PART):
        keys = np.arange(first, min(first + _PART, _ROWS.value))
        values = rng.random((len(keys), _DIM.value), np.float32)
        slots = rng.random((len(keys), table.slot_dim), np.float32)
        table.import_(TableExport(keys, values, slots, np.ones(len(keys), np.int64)))


def measure_chain(
    table: EmbeddingTable, pids: dict[str, int], folder: pathlib.Path
) -> dict[str, float]:
    checkpoint = tf.train.Checkpoint(table=TableState(table, lambda: None))
    manager = het_tf.checkpoint.Manager(checkpoint, folder, full_every=10)
    out: dict[str, float] = {}

    def save() -> None:
        manager.save()
        manager.wait()

    def note(what: str, action: Callable[[], None]) -> None:
        taken, out[f"{what} s"] = rise(pids, action)
        out.update({f"{what}: {name} MB": taken[name] / 1e6 for name in taken})

    note("save all", save)
    rng = np.random.default_rng(1)
    keys = rng.choice(_ROWS.value, _ROWS.value // 100, replace=False)
    shape = (len(keys), _DIM.value)
    slots = np.ones((len(keys), table.slot_dim), np.float32)
    clocks = np.full(len(keys), 2)
    table.import_(TableExport(keys, np.full(shape, 3, np.float32), slots, clocks))
    note("save 1 %", save)
    sizes = [
        sum(file.stat().st_size for file in folder.glob(f"{pathlib.Path(path).name}.*"))
        for path in manager.checkpoints
    ]
    assert len(sizes) == 2
    out["all MB"] = sizes[0] / 1e6
    out["bytes of 1 %, in %"] = 100 * sizes[1] / sizes[0]
    note("restore both", lambda: manager.restore_or_initialize())
    assert table.size() == _ROWS.value
    assert (table.lookup(keys[:1000]) == 3).all()
    return out


def measure(cluster: het_tf.distribute.LocalCluster, folder: pathlib.Path) -> dict[str, float]:
    strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
    pids = {"server": cluster.process("ps", 0).pid, "coordinator": os.getpid()}
    devices = cluster_devices("ps")
    optimizer = het_tf.optimizers.RowWiseAdagrad(0.1)
    table = EmbeddingTable(_DIM.value, optimizer, devices=devices)
    cache = WorkerCache(table, None)
    checkpoint = tf.train.Checkpoint(table=TableState(table, lambda: None))
    # What the first use takes is not the table's.
    small = EmbeddingTable(_DIM.value, optimizer, devices=devices)
    of_small = tf.train.Checkpoint(table=TableState(small, lambda: None))
    of_small.read(of_small.write(str(folder / "small"))).assert_consumed()
    fill(table)
    out = {"rows": table.size(), "table MB": table.stats()["memory_bytes"] / 1e6}
    if _CHAIN.value:
        return out | measure_chain(table, pids, folder / "chain")

    def save() -> None:
        checkpoint.write(str(folder / "rows"))
        for path in folder.glob("rows.*"):
            with path.open("rb") as file:
                os.fsync(file)

    size = table.size() * (16 + 4 * (_DIM.value + table.slot_dim))
    dd_file = folder / "dd"
    blocks = f"count={max(1, size >> 22)}"
    write = functools.partial(dd, "if=/dev/zero", f"of={dd_file}", blocks, "conv=fsync")
    dd_seconds = [write()]
    taken, seconds = rise(pids, save)
    dd_seconds.append(write())
    files = list(folder.glob("rows.*"))
    out |= {"file MB": sum(path.stat().st_size for path in files) / 1e6, "save s": seconds}
    out |= {f"save: {name} MB": taken[name] / 1e6 for name in taken}
    out["dd write s"] = min(dd_seconds)
    out["save / dd throughput"] = out["dd write s"] / seconds

    training = Training(strategy, cache)
    time.sleep(1)
    start, steps = time.perf_counter(), training.steps
    time.sleep(3)
    out["steps/s alone"] = (training.steps - steps) / (time.perf_counter() - start)
    steps = training.steps
    taken, seconds = rise(pids, save)
    out["steps/s while saving"] = (training.steps - steps) / seconds
    out["save while training s"] = seconds
    out |= {f"save while training: {name} MB": taken[name] / 1e6 for name in taken}
    training.end()

    def read() -> float:
        forget([dd_file])
        return dd(f"if={dd_file}", "of=/dev/null")

    dd_seconds = [read()]
    forget(files)
    taken, seconds = rise(pids, lambda: checkpoint.read(str(folder / "rows")).assert_consumed())
    out["restore s"] = seconds
    out |= {f"restore: {name} MB": taken[name] / 1e6 for name in taken}
    out["dd read s"] = min(*dd_seconds, read())
    out["restore / dd throughput"] = out["dd read s"] / seconds
    assert table.size() == _ROWS.value
    return out


def main(argv: list[str]) -> int:
    del argv
    folder = pathlib.Path(tempfile.mkdtemp(dir=_FOLDER.value))
    try:
        with het_tf.distribute.LocalCluster(num_workers=1, num_ps=1) as cluster:
            out = measure(cluster, folder)
    finally:
        shutil.rmtree(folder)
    for name, value in out.items():
        print(f"{name:36}{value:14.2f}")
    if _OUT.value:
        pathlib.Path(_OUT.value).write_text(json.dumps(out))
    most = max(value for name, value in out.items() if ": " in name)
    if most > _LIMIT.value * 1.048576:
        print(f"a process took more than {_LIMIT.value} MB beside the table")
        return 1
    return int(out.get("bytes of 1 %, in %", 0) > 2)


if __name__ == "__main__":
    app.run(main)
