"""Restores damaged checkpoints for as long as one likes.

    python tests/layer/fuzz_checkpoints.py [seconds [seed]]

A checkpoint of one table, or one of three that build on one another, is damaged at random: bytes of
its files, which checksums should notice, or its tensors, written anew with correct checksums. The
table must be as before, or have exactly what the checkpoint says, also where TensorFlow finds its
own part of it damaged. Prints the seed of what went wrong; a crash shows as one.
"""

from __future__ import annotations

import functools
import json
import logging
import pathlib
import random
import shutil
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf
import test_chains as chains
import test_checkpoint as cases

import het_tf
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
    numbers = [-(2**63), -1, 0, 1, 7, ROWS - 1, ROWS + 1, 2**31, 2**62, 2**63 - 1, 10**30, 0.5]
    if name.endswith("config"):
        config = json.loads(tensors[name])
        key = rng.choice(list(config))
        others = ["", "sgd", "ckpt-1", "ckpt-2", "ckpt-3", None, [], {}, *numbers, float("nan")]
        others += [{"checkpoint": rng.choice(others), "cut": rng.choice(others)}]
        config[key] = rng.choice(others)
        if rng.random() < 0.2:
            del config[key]
        text = json.dumps(config).encode()
        tensors[name] = text if rng.random() < 0.9 else text[: rng.randrange(len(text))]
        return
    array = tensors[name]
    kind = rng.randrange(6)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name] = array[: rng.randrange(len(array))]
    elif kind == 2:
        tensors[name] = array.reshape(-1)
    elif kind == 3:
        tensors[name] = array.astype(rng.choice((np.float64, np.int32, np.int64, np.float32)))
    elif kind == 4:
        tensors[name] = np.concatenate([array, array])
    else:
        array = array.copy()
        bad = [np.nan, np.inf, 3e38] if array.dtype == np.float32 else [-1, 2**62 + 1, -(2**63)]
        array[rng.randrange(len(array))] = rng.choice(bad)
        tensors[name] = array


def main(seconds: float, seed: int) -> None:
    logging.disable()  # of values that were not restored
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "one").mkdir()
    one = make_table(ROWS, 0)
    cases.checkpoint_of(one).save(str(folder / "one" / "ckpt"))
    kinds = {"one": (one, ""), "chain": (save_chain(folder / "chain"), chains.SOME_EXPIRE)}
    saved = {kind: cases.sorted_rows(table) for kind, (table, _) in kinds.items()}
    tables = {kind: make_table(10, 1, lifetimes) for kind, (_, lifetimes) in kinds.items()}
    before = cases.sorted_rows(tables["one"])
    counted = kinds["chain"][0].stats()["candidates"]
    assert counted == 20
    end = time.monotonic() + seconds
    runs = refused = 0
    while time.monotonic() < end:
        rng = random.Random(seed + runs)
        copy = folder / "copy"
        kind = rng.choice(["one", "chain"])
        name = "ckpt-1" if kind == "one" else f"ckpt-{rng.randint(1, 3)}"
        shutil.copytree(folder / kind, copy)
        if by_bytes := rng.random() < 0.6:
            damage_bytes(rng, copy, name)
        else:
            chains.rewrite(copy, name, functools.partial(damage_tensors, rng))
        restore = cases.restore if kind == "one" else chains.restore
        error = cases.error_of(restore, tables[kind], copy)
        after = cases.sorted_rows(tables[kind])
        try:
            refused += error is not None
            if error is not None and len(after[0]) == len(before[0]):
                cases.assert_same_rows(after, before)
                assert tables[kind].stats()["candidates"] == 0
            else:
                # Bytes without a meaning, or of something else than the table; or another value
                # that is as good.
                if by_bytes:
                    cases.assert_same_rows(after, saved[kind])
                    assert tables[kind].stats()["candidates"] == counted * (kind == "chain")
                assert by_bytes or error is None
                assert all(np.isfinite(column).all() for column in after)
                tables[kind] = make_table(10, 1, kinds[kind][1])
        except AssertionError:
            print(f"seed {seed + runs}: {error!r}", flush=True)
            raise
        shutil.rmtree(copy)
        runs += 1
    shutil.rmtree(folder)
    print(f"{runs} damaged checkpoints, {refused} refused")


if __name__ == "__main__":
    main(*(float(x) for x in sys.argv[1:2] or ["600"]), *(int(x) for x in sys.argv[2:3] or ["0"]))
