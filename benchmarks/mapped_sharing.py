"""How long a model with mapped rows loads, and what processes share of it.

python benchmarks/mapped_sharing.py --megabytes 100 500 2000 --dim 64

For each size, writes a model with `het_tf.serving.export_mapped`, which two processes load; then
each looks up all rows. Prints JSON: the MB of the file of rows; the seconds that each process took
to load, and the MB that its memory grew; and of the mapping of the file, by /proc/PID/smaps when
both have read all rows, the MB that are resident, those that both have, and those that are copies.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from process_memory import resident_bytes

BATCH = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[100, 500, 2000])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--folder", help="a model that is there already, to be served")
    parser.add_argument("--rows", type=int, help="of that")
    arguments = parser.parse_args()
    if arguments.folder:
        serve(arguments)
        return
    print(json.dumps([measure(arguments, each) for each in arguments.megabytes], indent=1))


def measure(arguments: argparse.Namespace, megabytes: float) -> dict:
    rows = int(megabytes * 1e6 / (8 + 4 * arguments.dim + 13))
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/model", rows, arguments.dim)
        (file,) = pathlib.Path(folder).rglob("*.rows")
        command = [sys.executable, __file__, "--folder", f"{folder}/model", "--rows", str(rows)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
        loaded = [json.loads(each.stdout.readline()) for each in processes]
        # Both have read all rows.
        kilobytes = [mapping_of(each.pid, str(file)) for each in processes]
        for each in processes:
            each.communicate("")
        result = {"rows": rows, "file_mb": round(file.stat().st_size / 1e6)}
    for name in ("seconds_to_load", "mb_to_load"):
        result[name] = [each[name] for each in loaded]
    for name in ("Rss", "Shared_Clean", "Private_Clean", "Private_Dirty", "Anonymous"):
        result[f"{name}_mb"] = [round(each[name] * 1024 / 1e6, 1) for each in kilobytes]
    return result


def write(folder: str, rows: int, dim: int) -> None:
    import keras
    import numpy as np

    import het_tf

    ids = keras.Input((None,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(dim, seed=1)
    model = het_tf.keras.Model(ids, embedding(ids))
    for first in range(0, rows, BATCH):
        keys = np.arange(first, min(first + BATCH, rows))
        values = np.random.default_rng(first).normal(size=(len(keys), dim))
        embedding.table.assign(keys, values.astype(np.float32))
    het_tf.serving.export_mapped(model, folder)
    os.sync()  # pages that the disk lacks are none that are clean


def mapping_of(process: int, path: str) -> dict[str, int]:
    """kB of the mapping of a file in /proc/PID/smaps."""
    lines = pathlib.Path(f"/proc/{process}/smaps").read_text().splitlines()
    (begin,) = [i for i, line in enumerate(lines) if line.endswith(path)]
    fields = [line.split() for line in lines[begin + 1 : begin + 25]]
    return {name.rstrip(":"): int(kb) for name, kb, *unit in fields if unit == ["kB"]}


def serve(arguments: argparse.Namespace) -> None:
    import numpy as np
    import tensorflow as tf

    import het_tf

    tf.zeros(1)  # TensorFlow begins
    before, begin = resident_bytes(), time.monotonic()
    model = tf.saved_model.load(arguments.folder)
    seconds, more = time.monotonic() - begin, (resident_bytes() - before) / 1e6
    assert het_tf.ops.LIBRARY
    for first in range(0, arguments.rows, BATCH):
        model.serve(np.arange(first, min(first + BATCH, arguments.rows))[np.newaxis])
    print(json.dumps({"seconds_to_load": round(seconds, 2), "mb_to_load": round(more)}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
