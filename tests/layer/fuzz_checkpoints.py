"""Restores damaged checkpoints for as long as one likes.

    python tests/layer/fuzz_checkpoints.py [seconds [seed]]

A checkpoint of one table in two shards, one of three that build on one another, one of two of a
model with two tables, variables and an optimizer, or a weights file is damaged at random: bytes of
its files, which checksums should notice; its tensors, written anew with correct checksums; or files
and parts that change places with those of another checkpoint. After an error all must be as
before, variables and optimizer, too. Without one it must be what was saved, or, where tensors were
written anew, what the file says, each key once. Prints the seed of what went wrong; a crash shows
as one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import pathlib
import random
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import test_chains as chains
import test_checkpoint as cases
import test_weights_check as weights

import het_tf
import het_tf.tables.table as tables
from het_tf.tables.table import EmbeddingTable, TableExport

ROWS, WIDTH = 2000, 8


def make_table(rows: int, seed: int, lifetimes: str = "", shards: int = 1) -> EmbeddingTable:
    rng = np.random.default_rng(seed)
    table = EmbeddingTable(
        WIDTH,
        het_tf.optimizers.Adagrad(0.1),
        name="fuzzed",
        lifetimes=lifetimes,
        devices=["/device:CPU:0"] * shards if shards > 1 else (),
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


def save_models(folder: pathlib.Path) -> keras.Model:
    """Checkpoints ckpt-1 and ckpt-2, which builds on it, of a model with all that one has."""
    model = make_model(0)
    manager = het_tf.checkpoint.Manager(tf.train.Checkpoint(model=model), folder, full_every=10)
    manager.save()
    for each in [*model.get_layer("before").weights, *model.optimizer.variables[2:]]:
        each.assign_add(tf.ones(each.shape))
    for table in weights.tables_of(model):
        table.assign(np.arange(5), np.full((5, table.dim), 9, np.float32))
    manager.save()
    manager.wait()
    return model


def make_model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return weights.model_of(WIDTH)


def restore_model(model: keras.Model, folder: pathlib.Path) -> None:
    tf.train.Checkpoint(model=model).restore(str(folder / "ckpt-2")).expect_partial()


def exchange_files(rng: random.Random, folder: pathlib.Path) -> None:
    """Two files of checkpoints change places."""
    one, two = rng.sample(sorted(folder.glob("ckpt-*")), 2)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def exchange_parts(rng: random.Random, others: list[dict], tensors: dict) -> None:
    """A part, or what says which save it is of, takes the place of another one.

    Args:
      rng: says which.
      others: the tensors of all checkpoints of the folder.
      tensors: of the checkpoint that is written anew.
    """
    source = rng.choice([*others, tensors])
    ends = rng.choice((r"/shard_\d+/", r"/shape/"))

    def places(there: dict) -> list[str]:
        found = (re.match(f".*{ends}", name) for name in there)
        return sorted({each[0] for each in found if each is not None})

    one, two = rng.choice(places(source)), rng.choice(places(tensors))
    taken = {name: each for name, each in source.items() if name.startswith(one)}
    given = {name: tensors.pop(name) for name in list(tensors) if name.startswith(two)}
    tensors.update({name.replace(one, two): each for name, each in taken.items()})
    if source is tensors and one != two:
        for name in taken:
            del tensors[name]
        tensors.update({name.replace(two, one): each for name, each in given.items()})


def tensors_of(path: pathlib.Path) -> dict:
    reader = tf.train.load_checkpoint(str(path))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


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
    ours = [name for name in tensors if re.search(r"/shard_\d+/\w+$|/shape/", name)]
    name = rng.choice(sorted(ours))
    if name.endswith("/config") or "/shape/" in name:
        tensors[name] = damage_config(rng, tensors[name])
    else:
        damage_array(rng, tensors, name)


def damage_weights(rng: random.Random, arrays: dict) -> None:
    """Changes an array of rows or an entry of what the file says of them."""
    name = rng.choice(sorted(name for name in arrays if not name.isdigit()))
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
      saved: the table or the model of the undamaged files.
      names: what files are to be damaged.
      make: what the files are read into: a table, or a model.
      state: all of it.
      restore: reads the files of a folder into it.
      rewrite: changes the tensors of the file of a name in a folder.
      damage: of tensors.
      checkpoints: whether it is of them, whose files and parts can change places.
    """

    saved: Any
    names: list[str]
    make: Callable[[], Any]
    state: Callable[[Any], list[np.ndarray]]
    restore: Callable[[Any, pathlib.Path], None]
    rewrite: Callable[[pathlib.Path, str, Callable[[dict], None]], None]
    damage: Callable[[random.Random, dict], None]
    checkpoints: bool = True


def state_of_table(table: EmbeddingTable) -> list[np.ndarray]:
    return [*cases.sorted_rows(table), np.array(table.stats()["candidates"])]


def state_of_layer(model: keras.Model) -> list[np.ndarray]:
    return state_of_table(model.get_layer("rows").table)


def rewrite_weights(folder: pathlib.Path, name: str, damage: Callable[[dict], None]) -> None:
    path = folder / f"{name}.weights.h5"
    weights.change(path, folder / "changed", arrays=damage)
    (folder / "changed").rename(path)


def load_weights(model: keras.Model, folder: pathlib.Path) -> None:
    (path,) = folder.glob("*.weights.h5")
    model.load_weights(path)


def save_kinds(folder: pathlib.Path) -> dict[str, Kind]:
    """Writes what is to be damaged, each kind into a folder of its name."""
    for name in ("one", "weights", "model_weights"):
        (folder / name).mkdir()
    one = make_table(ROWS // 2, 2, shards=2)
    checkpoint = cases.checkpoint_of(one)
    for _ in range(2):
        checkpoint.save(str(folder / "one" / "ckpt"))
    one.assign(np.arange(100) * 3, np.full((100, WIDTH), 7, np.float32))
    checkpoint.save(str(folder / "one" / "ckpt"))
    tables._EXPORT_PART_BYTES = 10_000  # so that there are several parts
    layer, model = weights.layer_of(ROWS // 2), make_model(0)
    layer.save_weights(folder / "weights" / "rows.weights.h5")
    model.save_weights(folder / "model_weights" / "all.weights.h5")
    of_checkpoint = {"rewrite": chains.rewrite, "damage": damage_tensors}
    of_weights = {"rewrite": rewrite_weights, "damage": damage_weights, "checkpoints": False}
    return {
        "one": Kind(
            one,
            ["ckpt-3"],
            functools.partial(make_table, 10, 1, shards=2),
            state_of_table,
            chains.restore,
            **of_checkpoint,
        ),
        "chain": Kind(
            save_chain(folder / "chain"),
            ["ckpt-1", "ckpt-2", "ckpt-3"],
            functools.partial(make_table, 10, 1, chains.SOME_EXPIRE),
            state_of_table,
            chains.restore,
            **of_checkpoint,
        ),
        "model": Kind(
            save_models(folder / "model"),
            ["ckpt-1", "ckpt-2"],
            functools.partial(make_model, 1),
            weights.state_of,
            restore_model,
            **of_checkpoint,
        ),
        "weights": Kind(
            layer,
            ["rows"],
            functools.partial(weights.layer_of, 10),
            state_of_layer,
            load_weights,
            **of_weights,
        ),
        "model_weights": Kind(
            model,
            ["all"],
            functools.partial(make_model, 1),
            weights.state_of,
            load_weights,
            **of_weights,
        ),
    }


def damage_somehow(rng: random.Random, kind: Kind, folder: pathlib.Path, file: str) -> str:
    """Damages the files of a folder; how."""
    how = rng.choice(("bytes", "bytes", "bytes", "tensors", "tensors", "exchange"))
    if how == "bytes":
        damage_bytes(rng, folder, file)
    elif how == "tensors":
        kind.rewrite(folder, file, functools.partial(kind.damage, rng))
    elif not kind.checkpoints:
        return damage_somehow(rng, kind, folder, file)
    elif rng.random() < 0.5:
        exchange_files(rng, folder)
    else:
        names = sorted(path.stem for path in folder.glob("*.index"))
        others = [tensors_of(folder / name) for name in names if name != file]
        kind.rewrite(folder, file, functools.partial(exchange_parts, rng, others))
    return how


def main(seconds: float, seed: int) -> None:
    logging.disable()  # of values that were not restored
    warnings.simplefilter("ignore")
    folder = pathlib.Path(tempfile.mkdtemp())
    kinds = save_kinds(folder)
    saved = {name: kind.state(kind.saved) for name, kind in kinds.items()}
    assert saved["chain"][-1] == 20
    subjects = {name: kind.make() for name, kind in kinds.items()}
    before = {name: kind.state(subjects[name]) for name, kind in kinds.items()}
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
        how = damage_somehow(rng, kind, copy, file)
        error = cases.error_of(kind.restore, subjects[name], copy)
        after = kind.state(subjects[name])
        try:
            if error is not None:
                refused += 1
                cases.assert_same_rows(after, before[name])
            else:
                # Bytes without a meaning, or of something else than what is restored; parts that
                # are found where they are; or another value that is as good.
                if how != "tensors":
                    cases.assert_same_rows(after, saved[name])
                assert all(np.isfinite(column).all() for column in after)
                # Of a chain it depends on what expired, and on which keys come twice.
                if name not in ("chain", "model"):
                    assert [len(x) for x in after if x.ndim] == [
                        len(x) for x in saved[name] if x.ndim
                    ]
                subjects[name] = kind.make()
                cases.assert_same_rows(kind.state(subjects[name]), before[name])
        except AssertionError:
            print(f"seed {number}, {name}, {file}, {how}: {error!r}", flush=True)
            raise
        shutil.rmtree(copy)
        runs[name] += 1
    shutil.rmtree(folder)
    print(f"damaged: {runs}; {refused} refused")


if __name__ == "__main__":
    main(*(float(x) for x in sys.argv[1:2] or ["600"]), *(int(x) for x in sys.argv[2:3] or ["0"]))
