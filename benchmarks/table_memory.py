"""Memory of an embedding table in one process, growth included.

    python benchmarks/table_memory.py --rows=10000000 --dim=16

Updates every key of [0, rows) once, in batches, and watches the process: its peak resident set (the
kernel's VmHWM, started anew) minus what was resident before. Growth counts, since that is when old
and new memory exist at once. The batches count too: some 5 MB at dim 16, next to 680 MB of rows.
The yardstick is the bytes of values and optimizer slots, float32. Keys, clocks and the index are
overhead. Exit status 1 if peak / yardstick is above --limit.
"""

from __future__ import annotations

import json
import pathlib
import time

import tensorflow as tf
from absl import app, flags
from process_memory import reset_peak, resident_bytes

from het_tf import ops, optimizers
from het_tf.tables.table import EmbeddingTable

_OPTIMIZERS = {
    cls.name: cls
    for cls in (
        optimizers.SGD,
        optimizers.Momentum,
        optimizers.Adagrad,
        optimizers.RowWiseAdagrad,
        optimizers.Adam,
        optimizers.RowWiseAdam,
        optimizers.Ftrl,
    )
}

_ROWS = flags.DEFINE_integer("rows", 10_000_000, "rows of the table", lower_bound=1)
_DIM = flags.DEFINE_integer("dim", 16, "columns of a row", lower_bound=1)
_OPTIMIZER = flags.DEFINE_enum("optimizer", "row_wise_adagrad", sorted(_OPTIMIZERS), "its slots")
_BATCH = flags.DEFINE_integer("batch", 65_536, "keys of an update", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "file to write the figures to")
_LIMIT = flags.DEFINE_float("limit", 1.5, "largest acceptable peak / (values and slots)")


def fill(table: EmbeddingTable, rows: int, batch: int, gradients: tf.Tensor) -> None:
    """One update of each key in [0, rows). gradients: float32 [batch, dim]."""
    rate = tf.constant(0.05)
    for first in range(0, rows, batch):
        keys = tf.range(first, min(first + batch, rows), dtype=tf.int64)
        table.apply_op(ops.unique_ids(keys), gradients[: keys.shape[0]], rate, "error")


def main(argv: list[str]) -> int:
    del argv
    rows, dim = _ROWS.value, _DIM.value
    optimizer = _OPTIMIZERS[_OPTIMIZER.value]()
    gradients = tf.random.normal([_BATCH.value, dim], stddev=0.01)
    # What the first use of TensorFlow's ops and threads takes is not the table's. This table stays,
    # so that nothing it used is free for the next one.
    warm_up = EmbeddingTable(dim, optimizer)
    fill(warm_up, 2 * _BATCH.value, _BATCH.value, gradients)
    slot_dim = warm_up.export().slots.shape[1]

    table = EmbeddingTable(dim, optimizer)
    reset_peak()
    before = resident_bytes()
    start = time.perf_counter()
    fill(table, rows, _BATCH.value, gradients)
    seconds = time.perf_counter() - start
    peak = resident_bytes("VmHWM") - before
    assert table.size() == rows

    payload = rows * (dim + slot_dim) * 4
    print(f"{rows} rows, dim {dim}, {optimizer.name}: {rows / seconds:.0f} rows/s")
    print(f"{'':40}{'MB':>10}{'/ payload':>11}")
    sizes = {
        "payload: values and slots": payload,
        'rows and index, stats()["memory_bytes"]': table.stats()["memory_bytes"],
        "peak resident, growth included": peak,
    }
    for name, size in sizes.items():
        print(f"{name:40}{size / 1e6:10.1f}{size / payload:11.3f}")
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(sizes, indent=1))
    if peak > _LIMIT.value * payload:
        print(f"peak resident is above {_LIMIT.value} times the payload")
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)
