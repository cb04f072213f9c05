"""Bytes of a synchronous step with replicas of hot rows on every worker (FlexShard), and without.

    python benchmarks/hot_row_replicas.py

A simulation. Every worker has batches of sequences of ids, and every row that a worker touched is
updated. Bytes of a step of one worker, of ids, rows and gradients:

  occurrences  no cache, as FlexShard has no cache: every occurrence of an id moves a row
  FlexShard    the same with the best replicas: a replicated row moves once in each direction, in
               every step, whether it is touched or not
  het_tf       synchronous steps: a touched row has one gradient, and moves to the worker if another
               worker has updated the row
  replicas     what the best replicas would save of the last
"""

from __future__ import annotations

import numpy as np
from absl import app, flags
from zipf import zipf_ranks

_WORKERS = flags.DEFINE_integer("workers", 8, "number of workers")
_SEQUENCES = flags.DEFINE_integer("sequences", 256, "sequences of a batch")
_LENGTH = flags.DEFINE_integer("length", 50, "ids of a sequence")
_ROWS = flags.DEFINE_integer("rows", 1_000_000, "rows of the table")
_STEPS = flags.DEFINE_integer("steps", 60, "steps, of which the second half counts")
_EXPONENTS = flags.DEFINE_list("exponents", ["1.05", "1.2"], "of the Zipf distribution")
_DIMS = flags.DEFINE_list("dims", ["16", "64", "128"], "columns of a row")

_LOOKUP_BYTES, _UPDATE_BYTES, _FLOAT_BYTES = 16, 8, 4  # key and clock; key


def counts(exponent: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean numbers of a step of one worker by row: occurrences, touches, and rows that move."""
    rng = np.random.default_rng(0)
    workers, rows = _WORKERS.value, _ROWS.value
    held = np.zeros((workers, rows), bool)  # Whether a worker has the row's last version.
    occurred, touched, moved = np.zeros((3, rows))
    for step in range(_STEPS.value):
        touches = np.zeros((workers, rows), bool)
        for worker in range(workers):
            ids = zipf_ranks(rng, rows, exponent, (_SEQUENCES.value * _LENGTH.value,))
            touches[worker, ids] = True
            if step >= _STEPS.value // 2:
                occurred += np.bincount(ids, minlength=rows)
                touched += touches[worker]
                moved += touches[worker] & ~held[worker]
        held |= touches
        held &= touches.sum(0) - touches == 0  # No other worker has updated the row.
    steps = workers * (_STEPS.value - _STEPS.value // 2)
    return occurred / steps, touched / steps, moved / steps


def main(argv: list[str]) -> None:
    del argv
    print("exponent  dim  occurrences  FlexShard    het_tf  replicas")
    for exponent in map(float, _EXPONENTS.value):
        occurred, touched, moved = counts(exponent)
        for dim in map(int, _DIMS.value):
            row = _FLOAT_BYTES * dim
            by_occurrence = occurred * (_LOOKUP_BYTES + 2 * row)
            flexshard = np.minimum(by_occurrence, 2 * row).sum()
            each = touched * (_LOOKUP_BYTES + _UPDATE_BYTES + row) + moved * row
            saved = np.maximum(each - 2 * row, 0).sum() / each.sum()
            sizes = (f"{x / 1e6:9.2f} MB" for x in (by_occurrence.sum(), flexshard, each.sum()))
            print(f"{exponent:8} {dim:4} {' '.join(sizes)} {saved:9.2%}", flush=True)


if __name__ == "__main__":
    app.run(main)
