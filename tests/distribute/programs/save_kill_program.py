"""Saves tables of two parameter servers while one of them, or this program, is killed.

python save_kill_program.py FOLDER KIND SEED KILLS

With TF_CONFIG it kills itself, and its servers go on; else servers of a LocalCluster, KILLS times.
When is counted in changes of the files that a save writes. Prints a line of JSON of every restore,
and a program that kills itself the number of every save that is there.
Run by test_save_kills.py.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import random
import signal
import sys
import threading

import numpy as np
import tensorflow as tf

import het_tf
from het_tf.checkpoint import TableState
from het_tf.runtime.broadcast import cluster_devices
from het_tf.tables.table import EmbeddingTable, TableExport

ROWS, WIDTH = 60_000, 16
# Of a chain, one in so many rows is changed between two checkpoints.
PARTS = 16
MANAGERS = {
    "full": het_tf.checkpoint.Manager,
    "chain": functools.partial(het_tf.checkpoint.Manager, full_every=3),
}
MOST_CHANGES = 20  # of some saves


class Killer(threading.Thread):
    """Kills at the n-th change that it sees of the files in a folder while a save is under way."""

    def __init__(self, folder: str, at: int, kill):
        super().__init__(daemon=True)
        self._folder, self._at, self._kill = pathlib.Path(folder), at, kill
        self.start()

    def run(self) -> None:
        seen = self._files()
        while self._at > 0:
            files = self._files()
            self._at -= files != seen and any("_temp" in name for name in files)
            seen = files
        self._kill()

    def _files(self) -> dict[str, int]:
        sizes = {}
        for path, _, names in os.walk(self._folder):
            for name in names:
                try:
                    sizes[f"{path}/{name}"] = os.stat(f"{path}/{name}").st_size
                except FileNotFoundError:
                    continue
        return sizes


class Saver:
    """A table and a variable whose numbers say in which save they were written."""

    def __init__(self, strategy, folder: str, kind: str):
        self._chain = kind == "chain"
        self._strategy = strategy
        self.table = EmbeddingTable(
            WIDTH, het_tf.optimizers.Adagrad(0.1), devices=cluster_devices("ps")
        )
        with strategy.scope():
            self.number = tf.Variable(0, dtype=tf.int64)
        state = TableState(self.table, lambda: None)
        checkpoint = tf.train.Checkpoint(table=state, number=self.number)
        self.manager = MANAGERS[kind](checkpoint, folder, max_to_keep=2)
        self.saved = 0  # the last one that was told to be there

    def save(self) -> None:
        number = self.saved + 1
        keys = np.arange(ROWS)
        if self._chain and number > 1:
            keys = keys[keys % PARTS == number % PARTS]
        filled = np.full((len(keys), WIDTH), number, np.float32)
        self.table.import_(TableExport(keys, filled, filled, np.full(len(keys), number)))
        self.number.assign(number)
        self.manager.save()
        self.manager.wait()
        self.saved = number

    def restore(self) -> dict:
        """Restores the latest checkpoint; what is in it."""
        self._strategy.restore_or_initialize(self.manager)
        number = int(self.number)
        rows = self.table.export()
        expected = np.full(len(rows.keys), number)
        if self._chain:
            expected -= np.minimum((number - rows.keys) % PARTS, number - 1)
        right = (
            sorted(rows.keys.tolist()) == list(range(ROWS if number else 0))
            and np.array_equal(rows.clocks, expected)
            and (rows.values == expected[:, None]).all()
            and (rows.slots == expected[:, None]).all()
        )
        told = {"saved": self.saved, "restored": number, "right": bool(right)}
        self.saved = number
        return told


def kill_servers(folder: str, kind: str, rng: random.Random, kills: int) -> None:
    with het_tf.distribute.LocalCluster(num_workers=1, num_ps=2) as cluster:
        strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
        saver = Saver(strategy, folder, kind)
        saver.save()  # Without any there is nothing to restore.
        for _ in range(kills):
            server = rng.randrange(2)
            at = rng.randint(1, MOST_CHANGES)
            killer = Killer(folder, at, functools.partial(cluster.kill_ps, server))
            try:
                while True:
                    saver.save()
            except tf.errors.OpError:
                killer.join()  # It is no other error.
            cluster.restart_ps(server)
            print(json.dumps(saver.restore()), flush=True)


def kill_this_program(folder: str, kind: str, rng: random.Random) -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    saver = Saver(het_tf.distribute.HetParameterServerStrategy(resolver), folder, kind)
    print(json.dumps(saver.restore()), flush=True)
    if saver.saved == 0:
        saver.save()
        print(saver.saved, flush=True)
    Killer(folder, rng.randint(1, MOST_CHANGES), lambda: os.kill(os.getpid(), signal.SIGKILL))
    while True:
        saver.save()
        print(saver.saved, flush=True)


def main(folder: str, kind: str, seed: str, kills: str) -> None:
    rng = random.Random(int(seed))
    if "TF_CONFIG" in os.environ:
        kill_this_program(folder, kind, rng)
    else:
        kill_servers(folder, kind, rng, int(kills))


if __name__ == "__main__":
    main(*sys.argv[1:])
