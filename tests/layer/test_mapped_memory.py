"""What processes that serve the same model have of its rows in memory."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf

SERVE = """
import sys, numpy as np, tensorflow as tf
tf.load_op_library(sys.argv[1])
model = tf.saved_model.load(sys.argv[2])
model.serve(tf.constant(np.arange(int(sys.argv[3]))[np.newaxis]))
print("served", flush=True)
sys.stdin.read()
"""

ROWS, DIM = 20_000, 16


def mappings_of(process: int, name: str) -> list[dict[str, int | str]]:
    """What /proc/PID/smaps says of the mappings of files of that name: permissions, and kB."""
    found: list[dict[str, int | str]] = []
    named = False
    for line in pathlib.Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            _, permissions, _, _, _, *path = line.split(maxsplit=5)
            if named := bool(path) and path[0].endswith(name):
                found.append({"permissions": permissions})
        elif named and (match := re.match(r"(\w+): +(\d+) kB", line)):
            found[-1][match[1]] = int(match[2])
    return found


@pytest.mark.exhaustive
def test_processes_share_the_memory_of_the_rows(tmp_path):
    ids = keras.Input((None,), dtype="int64", name="ids")
    embedding = het_tf.layers.HetEmbedding(DIM, seed=1)
    model = het_tf.keras.Model(ids, embedding(ids))
    embedding.table.assign(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
    het_tf.serving.export_mapped(model, tmp_path / "model")
    (file,) = (tmp_path / "model/assets.extra/het_tf").glob("*.rows")
    command = [sys.executable, "-c", SERVE, het_tf.ops.LIBRARY, tmp_path / "model", str(ROWS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as other:
        served = tf.saved_model.load(str(tmp_path / "model"))
        assert (served.serve(np.arange(ROWS)[np.newaxis]).numpy() == 1).all()
        assert other.stdout.readline() == "served\n"
        for process in (os.getpid(), other.pid):
            (mapping,) = mappings_of(process, str(file))
            assert mapping["permissions"] == "r--s"
            assert mapping["Size"] == -(-file.stat().st_size // 4096) * 4
            # All rows were read, and none was copied: each page is in both processes.
            rows_kb = ROWS * (8 + 4 * DIM) // 1024
            assert mapping["Shared_Clean"] + mapping["Shared_Dirty"] >= rows_kb
            assert mapping["Anonymous"] == mapping["Private_Dirty"] == 0
        other.stdin.close()
    assert other.returncode == 0
