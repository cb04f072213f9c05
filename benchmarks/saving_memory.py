"""Memory that saving and loading a table takes in the program that does it, by the table's size.

python benchmarks/saving_memory.py --megabytes 100 400

Each size has a process of its own, and each kind of file is written and read once before, with a
few rows. Prints JSON: of each size and kind, the MB by which the process's own memory (RssAnon of
/proc/self/status, looked at every 5 ms) grew at most; pages of files that are mapped, which the
kernel takes back when it wants to, do not count. What streams grows little from size to size.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

from process_memory import resident_bytes

DIM = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[100, 400])
    parser.add_argument("--here", action="store_true", help="in this process, the first size")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(int(arguments.megabytes[0] * 1e6 / (4 * DIM)))))
        return
    result = {}
    for megabytes in arguments.megabytes:
        command = [sys.executable, __file__, "--here", "--megabytes", str(megabytes)]
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        result[f"{megabytes:g} MB"] = json.loads(ended.stdout.splitlines()[-1])
    print(json.dumps(result, indent=1))


def measure(rows: int) -> dict[str, float]:
    import keras
    import numpy as np

    import het_tf
    from het_tf import interop

    ids = keras.Input((4,), dtype="int64")
    layer = het_tf.layers.HetEmbedding(DIM, optimizer=het_tf.optimizers.SGD(), seed=1)
    model = het_tf.keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(layer(ids))))

    def fill(first: int, last: int) -> None:
        keys = np.arange(first, last)
        layer.table.assign(keys, np.ones((len(keys), DIM), np.float32))

    def calls(folder: str) -> dict[str, Callable[[], object]]:
        npz, parquet = (interop.Npz(f"{folder}/a.npz"), interop.Parquet(f"{folder}/a.parquet"))
        return {
            "export": lambda: model.export(f"{folder}/model", verbose=False),
            "save_weights": lambda: model.save_weights(f"{folder}/a.weights.h5"),
            "load_weights": lambda: model.load_weights(f"{folder}/a.weights.h5"),
            "npz save": lambda: interop.save(layer, npz),
            "npz load": lambda: interop.load(layer, npz),
            "Parquet save": lambda: interop.save(layer, parquet),
            "Parquet load": lambda: interop.load(layer, parquet),
        }

    fill(0, 1000)
    with tempfile.TemporaryDirectory() as folder:
        for call in calls(folder).values():
            call()
    for first in range(0, rows, 50_000):
        fill(first, min(first + 50_000, rows))
    with tempfile.TemporaryDirectory() as folder:
        return {name: round(growth(call)) for name, call in calls(folder).items()}


def growth(call: Callable[[], object]) -> float:
    """MB by which the memory of this process grows at most while something is called."""
    before, ended = own_megabytes(), threading.Event()
    most = before

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.005):
            most = max(most, own_megabytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        call()
    finally:
        ended.set()
        watching.join()
    return most - before


def own_megabytes() -> float:
    return resident_bytes("RssAnon") / 1e6


if __name__ == "__main__":
    main()
