"""Restores damaged checkpoints for as long as one likes.

    python tests/layer/fuzz_checkpoints.py [seconds [seed]]

A checkpoint of one table, one of three that build on one another, or a weights file with rows is
damaged at random: bytes of its files, which checksums should notice, or its tensors, written anew
with correct checksums. The table must be as before, or have exactly what the file says, each key
once, also where TensorFlow or HDF5 finds its own part of it damaged. Prints the seed of what went
wrong; a crash shows as one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import test_chains as chains
import test_checkpoint as cases
import test_weights_check as weights

import het_tf
import het_tf.table as tables
from het_tf.table import EmbeddingTable, TableExport

ROWS, WIDTH = 2000, 8


def make_table(rows: int, seed: int, lifetimes: str = "") -> EmbeddingTable:
    rng = np.random.default_rng(seed)
    table = EmbeddingTable(
        WIDTH, het_tf.optimizers.Adagrad(0.1), name="fuzzed", lifetimes=lifetimes
    )
    values, slots = (rng.random((rows, WIDTH), np.float32) for _ in range(2))
    table.import_(TableExport(np.arange(rows) * 3, values, slots, np.arange(rows)))
    return table


def save_chain(folder: pathlib.Path) -> EmbeddingTable:
    """Rows that come, change and go, in ckpt-1, ckpt-2 and ckpt-3."""
    table = make_table(ROWS, 0, chains.SOME_EXPIRE)
    manager = chains.manager_of(table, folder, full_every=10)
    for now in (1, 4, 8):
        table.expire(now)
        # Of the last two some are counted, exactly and in a sketch.
        keys = np.concatenate([np.arange(x, x + 20) for x in (10 * now, 20_000 + now, 30_000)])
        keys = tf.constant(keys)
        gradients = tf.ones([60, WIDTH])
        table.apply_op(table.lookup_op(keys)[1], gradients, tf.constant(0.1), "error")
        chains.save(manager)
    return table


def damage_bytes(rng: random.Random, folder: pathlib.Path, name: str) -> None:
    """Changes one to three ranges of a file."""
    files = sorted(folder.glob(f"{name}.*"))
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content) + 1)
        length = min(rng.choice((1, 1, 4, 8, 64, 4096)), len(content) - at)
        kind = rng.choice(("flip", "cut", "remove", "insert", "zero", "ones", "copy"))
        if kind == "flip" and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del content[at:]
        elif kind == "remove":
            del content[at : at + length]
        elif kind == "insert":
            content[at:at] = rng.randbytes(length)
        elif kind in ("zero", "ones"):
            content[at : at + length] = bytes([255 * (kind == "ones")]) * length
        else:
            source = rng.choice(files).read_bytes()
            begin = rng.randrange(len(source))
            content[at : at + length] = source[begin : begin + length]
    path.write_bytes(content)


def damage_tensors(rng: random.Random, tensors: dict) -> None:
    """Changes a tensor or an entry of the config."""
    name = rng.choice([name for name in tensors if name.startswith(cases.PART)])
    if name.endswith("config"):
        tensors[name] = damage_config(rng, tensors[name])
    else:
        damage_array(rng, tensors, name)


def damage_weights(rng: random.Random, arrays: dict) -> None:
    """Changes an array of rows or an entry of what the file says of them."""
    name = rng.choice([name for name in arrays if not name.isdigit()])
    if name == "table":
        arrays[name] = np.frombuffer(damage_config(rng, arrays[name].tobytes()), np.uint8)
        return
    damage_array(rng, arrays, name)
    if rng.random() < 0.8:
        weights.with_checksums(arrays)


def damage_config(rng: random.Random, text: bytes) -> bytes:
    """Changes an entry."""
    config = json.loads(text)
    numbers = [-(2**63), -1, 0, 1, 7, ROWS - 1, ROWS + 1, 2**31, 2**62, 2**63 - 1, 10**30, 0.5]
    key = rng.choice(list(config))
    others = ["", "sgd", "ckpt-1", "ckpt-2", "ckpt-3", None, [], {}, *numbers, float("nan")]
    others += [{"checkpoint": rng.choice(others), "cut": rng.choice(others)}]
    config[key] = rng.choice(others)
    if rng.random() < 0.2:
        del config[key]
    text = json.dumps(config).encode()
    return text if rng.random() < 0.9 else text[: rng.randrange(len(text))]


def damage_array(rng: random.Random, arrays: dict, name: str) -> None:
    """Changes an array, or removes it."""
    array = arrays[name]
    kind = rng.randrange(7)
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[name] = array[: rng.randrange(len(array))]
    elif kind == 2:
        arrays[name] = array.reshape(-1)
    elif kind == 3:
        arrays[name] = array.astype(rng.choice((np.float64, np.int32, np.int64, np.float32)))
    elif kind == 4:
        arrays[name] = np.concatenate([array, array])
    elif kind == 5:
        array = array.copy()
        array[rng.randrange(len(array))] = array[rng.randrange(len(array))]
        arrays[name] = array
    else:
        array = array.copy()
        bad = [np.nan, np.inf, 3e38] if array.dtype == np.float32 else [-1, 2**62 + 1, -(2**63)]
        array[rng.randrange(len(array))] = rng.choice(bad)
        arrays[name] = array


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is damaged.

    Attributes:
      saved: the table of the undamaged files.
      names: what files are to be damaged.
      make: what the files are read into: a table, or a model.
      table_of: its table.
      restore: reads the files of a folder into it.
      rewrite: changes the tensors of the file of a name in a folder.
      damage: of tensors.
    """

    saved: EmbeddingTable
    names: list[str]
    make: Callable[[], Any]
    restore: Callable[[Any, pathlib.Path], None]
    rewrite: Callable[[pathlib.Path, str, Callable[[dict], None]], None]
    damage: Callable[[random.Random, dict], None]
    table_of: Callable[[Any], EmbeddingTable] = lambda table: table


def save_kinds(folder: pathlib.Path) -> dict[str, Kind]:
    """Writes what is to be damaged, each kind into a folder of its name."""
    for name in ("one", "weights"):
        (folder / name).mkdir()
    one = make_table(ROWS, 0)
    cases.checkpoint_of(one).save(str(folder / "one" / "ckpt"))
    model = weights.layer_of(ROWS // 2)
    tables._EXPORT_PART_BYTES = 10_000  # so that there are several parts
    model.save_weights(folder / "weights" / "rows.weights.h5")

    def rewrite_weights(folder: pathlib.Path, name: str, damage: Callable[[dict], None]) -> None:
        path = folder / f"{name}.weights.h5"
        weights.change(path, folder / "changed", arrays=damage)
        (folder / "changed").rename(path)

    return {
        "one": Kind(
            one,
            ["ckpt-1"],
            functools.partial(make_table, 10, 1),
            cases.restore,
            chains.rewrite,
            damage_tensors,
        ),
        "chain": Kind(
            save_chain(folder / "chain"),
            ["ckpt-1", "ckpt-2", "ckpt-3"],
            functools.partial(make_table, 10, 1, chains.SOME_EXPIRE),
            chains.restore,
            chains.rewrite,
            damage_tensors,
        ),
        "weights": Kind(
            model.get_layer("rows").table,
            ["rows"],
            functools.partial(weights.layer_of, 10),
            lambda into, folder: into.load_weights(folder / "rows.weights.h5"),
            rewrite_weights,
            damage_weights,
            lambda into: into.get_layer("rows").table,
        ),
    }


def main(seconds: float, seed: int) -> None:
    logging.disable()  # of values that were not restored
    folder = pathlib.Path(tempfile.mkdtemp())
    kinds = save_kinds(folder)
    saved = {name: cases.sorted_rows(kind.saved) for name, kind in kinds.items()}
    counted = {name: kind.saved.stats()["candidates"] for name, kind in kinds.items()}
    assert counted["chain"] == 20
    subjects = {name: kind.make() for name, kind in kinds.items()}
    before = {
        name: cases.sorted_rows(kind.table_of(subjects[name])) for name, kind in kinds.items()
    }
    end = time.monotonic() + seconds
    runs = dict.fromkeys(kinds, 0)
    refused = 0
    while time.monotonic() < end:
        number = seed + sum(runs.values())
        rng = random.Random(number)
        copy = folder / "copy"
        name = rng.choice(list(kinds))
        kind = kinds[name]
        file = rng.choice(kind.names)
        shutil.copytree(folder / name, copy)
        if by_bytes := rng.random() < 0.6:
            damage_bytes(rng, copy, file)
        else:
            kind.rewrite(copy, file, functools.partial(kind.damage, rng))
        error = cases.error_of(kind.restore, subjects[name], copy)
        table = kind.table_of(subjects[name])
        after = cases.sorted_rows(table)
        try:
            refused += error is not None
            if error is not None and len(after[0]) == len(before[name][0]):
                cases.assert_same_rows(after, before[name])
                assert table.stats()["candidates"] == 0
            else:
                # Bytes without a meaning, or of something else than the table; or another value
                # that is as good.
                if by_bytes:
                    cases.assert_same_rows(after, saved[name])
                    assert table.stats()["candidates"] == counted[name]
                assert by_bytes or error is None
                assert all(np.isfinite(column).all() for column in after)
                if name != "chain":  # what it should have depends on what expired
                    assert len(after[0]) == len(saved[name][0])
                subjects[name] = kind.make()
        except AssertionError:
            print(f"seed {number}, {name}, {file}, bytes {by_bytes}: {error!r}", flush=True)
            raise
        shutil.rmtree(copy)
        runs[name] += 1
    shutil.rmtree(folder)
    print(f"damaged: {runs}; {refused} refused")


if __name__ == "__main__":
    main(*(float(x) for x in sys.argv[1:2] or ["600"]), *(int(x) for x in sys.argv[2:3] or ["0"]))
