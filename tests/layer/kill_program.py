"""Saves a table without end, over and over, in processes that are killed. Run by test_kills.py.

The processes are forks of this one, which has loaded TensorFlow and not used it yet: starting one
takes no time.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import random
import signal
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import het_tf
from het_tf.checkpoint import TableState
from het_tf.tables.table import EmbeddingTable, TableExport

ROWS, WIDTH = 20_000, 16


MANAGERS = {
    "theirs": tf.train.CheckpointManager,
    "ours": het_tf.checkpoint.Manager,
    "chain": functools.partial(het_tf.checkpoint.Manager, full_every=4),
}
# Of a chain, one in so many rows is changed between two checkpoints.
PARTS = 16


def die_in_third_save(moment: str) -> None:
    """Has this process kill itself where the rows of its third checkpoint are, or were, written."""
    save, saves = het_tf.ops.table_save, itertools.count(1)

    def save_or_die(*args: Any, **kwargs: Any) -> Any:
        is_third = next(saves) == 3
        if is_third and moment == "before rows":
            os.kill(os.getpid(), signal.SIGKILL)
        saved = save(*args, **kwargs)
        if is_third:
            os.kill(os.getpid(), signal.SIGKILL)
        return saved

    het_tf.ops.table_save = save_or_die


def save_without_end(folder: str, kind: str, tell: int) -> None:
    """Restores the latest checkpoint, tells what is in it, then saves ever greater numbers."""
    table = EmbeddingTable(WIDTH, het_tf.optimizers.Adagrad(0.1))
    number = tf.Variable(0, dtype=tf.int64)
    manager = MANAGERS[kind](
        tf.train.Checkpoint(table=TableState(table, lambda: None), number=number),
        folder,
        max_to_keep=2,
    )
    manager.restore_or_initialize()
    rows = table.export()
    # What a row has, if it is right, and what was not changed since is older.
    behind = np.minimum((int(number) - rows.keys) % PARTS, int(number) - 1) * (kind == "chain")
    columns = [rows.values + behind[:, None], rows.slots + behind[:, None], rows.clocks + behind]
    told = {
        "number": int(number),
        "rows": len(rows.keys),
        "numbers": sorted({x for column in columns for x in np.unique(column).tolist()}),
    }
    os.write(tell, json.dumps(told).encode() + b"\n")
    while True:
        number.assign_add(1)
        keys = np.arange(ROWS)
        if kind == "chain" and number > 1:
            keys = keys[keys % PARTS == int(number) % PARTS]
        filled = np.full((len(keys), WIDTH), int(number), np.float32)
        table.import_(TableExport(keys, filled, filled, np.full(len(keys), int(number))))
        manager.save()
        getattr(manager, "wait", lambda: None)()
        os.write(tell, b"saved %d\n" % int(number))


def main(folder: str, kind: str, *moments: str) -> None:
    rng = random.Random(1)
    runs = []
    for moment in [*moments, "before rows"]:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            if moment != "at random":
                die_in_third_save(moment)
            save_without_end(folder, kind, write)
        os.close(write)
        with os.fdopen(read) as told:
            run = {"restored": json.loads(told.readline())}
            told.readline()  # at least one save
            if moment == "at random":
                # Not what is tested, but when: a save takes some tens of milliseconds.
                time.sleep(rng.random() * 0.2)
                os.kill(pid, signal.SIGKILL)
            saves = [line for line in told if line.endswith("\n")]
            run["saved"] = run["restored"]["number"] + 1 + len(saves)
        os.waitpid(pid, 0)
        run["left"] = sorted(path.name for path in pathlib.Path(folder).glob("*_temp"))
        runs.append(run)
    print(json.dumps(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
