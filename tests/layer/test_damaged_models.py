"""Damaged checkpoints of a model with two tables, other variables and an optimizer.

Whichever part is damaged, and whoever restores it: an error, and no variable or row has changed.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_chains import rewrite
from test_checkpoint import error_of
from test_weights_check import IDS, assert_same, model_of, state_of, tables_of

import het_tf
from het_tf.checkpoint import TableState
from het_tf.tables.table import EmbeddingTable

WIDTH = 6


def train(model: keras.Model, **arguments) -> None:
    targets = np.ones((len(IDS), 1), np.float32)
    model.fit([IDS.astype(np.float32), IDS], targets, verbose=0, **arguments)


def trained(steps: int = 1) -> keras.Model:
    keras.utils.set_random_seed(steps)
    model = model_of(WIDTH)
    train(model, epochs=steps)
    return model


@dataclasses.dataclass(frozen=True)
class Victim:
    """A model that is never restored, and its state."""

    model: keras.Model
    before: list[np.ndarray]


@pytest.fixture(scope="module")
def victim() -> Victim:
    model = trained(2)
    return Victim(model, state_of(model))


def checkpoint_of(model: keras.Model) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(model=model)


def backup_of(folder: pathlib.Path) -> het_tf.keras.callbacks.BackupAndRestore:
    return het_tf.keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False, max_to_keep=2)


# Each writes two checkpoints of a model into a folder, ckpt-1 and ckpt-2.


def save_whole(model: keras.Model, folder: pathlib.Path) -> None:
    manager = tf.train.CheckpointManager(checkpoint_of(model), folder, max_to_keep=2)
    manager.save()
    train(model)
    manager.save()


def save_chain(model: keras.Model, folder: pathlib.Path) -> None:
    manager = het_tf.checkpoint.Manager(checkpoint_of(model), folder, full_every=10)
    manager.save()
    # Few rows of a table, so that the next one does not have all of them.
    tables_of(model)[1].assign(IDS[:2, 0], np.full((2, WIDTH), 9, np.float32))
    model.get_layer("before").kernel.assign_add(tf.ones([3, 2]))
    manager.save()
    manager.wait()


def save_backups(model: keras.Model, folder: pathlib.Path) -> None:
    train(model, epochs=2, callbacks=[backup_of(folder)])


def fit_with_backup(model: keras.Model, folder: pathlib.Path) -> None:
    train(model, epochs=3, initial_epoch=2, callbacks=[backup_of(folder)])


RESTORES: dict[str, tuple[Callable, Callable]] = {
    # By way of `Checkpoint.restore`, which has the checks of `read`.
    "tensorflow_manager": (
        save_whole,
        lambda model, folder: tf.train.CheckpointManager(
            checkpoint_of(model), folder, max_to_keep=2
        ).restore_or_initialize(),
    ),
    "chain": (
        save_chain,
        lambda model, folder: het_tf.checkpoint.Manager(
            checkpoint_of(model), folder
        ).restore_or_initialize(),
    ),
    "backup": (save_backups, fit_with_backup),
}


@pytest.fixture(scope="module")
def saved_model() -> keras.Model:
    """A model of which checkpoints are written."""
    return trained()


@pytest.fixture(scope="module")
def other_model() -> keras.Model:
    """A model into which checkpoints are read."""
    return trained(3)


@dataclasses.dataclass(frozen=True)
class Written:
    """Two checkpoints in a folder, the model's state after the second, and what restores that."""

    folder: pathlib.Path
    state: list[np.ndarray]
    restore: Callable[[keras.Model, pathlib.Path], object]


@pytest.fixture(scope="module", params=RESTORES)
def written(request, saved_model, tmp_path_factory) -> Written:
    save, restore = RESTORES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save(saved_model, folder)
    return Written(folder, state_of(saved_model), restore)


def configs_of(path: pathlib.Path) -> dict[str, dict]:
    reader = tf.train.load_checkpoint(str(path))
    names = [name for name in reader.get_variable_to_shape_map() if name.endswith("/config")]
    return {name: json.loads(reader.get_tensor(name)) for name in names}


def test_they_restore_while_they_are_whole(written, other_model, tmp_path):
    train(other_model)
    written.restore(other_model, shutil.copytree(written.folder, tmp_path / "copy"))
    if written.restore is not fit_with_backup:  # which trains on
        assert_same(state_of(other_model), written.state)
    builds = any("since" in config for config in configs_of(written.folder / "ckpt-2").values())
    assert builds == (written.restore is RESTORES["chain"][1])


def test_a_flipped_bit_anywhere_changes_nothing(written, victim, tmp_path):
    # Of the variables and of each table; and the rows on which they build.
    files = [*written.folder.glob("ckpt-2.data*")]
    if any("since" in config for config in configs_of(written.folder / "ckpt-2").values()):
        files += written.folder.glob("ckpt-1.data-0000[12]*")
        assert len(files) == 5
    else:
        assert len(files) == 3
    rng = np.random.default_rng(0)
    for file in files:
        content = file.read_bytes()
        # Where the variables are, and the object graph, and the rows.
        for at in {*np.linspace(0, len(content) - 1, 3).astype(int).tolist(), 8}:
            copy = tmp_path / "copy"
            shutil.copytree(written.folder, copy)
            flipped = bytearray(content)
            flipped[at] ^= 1 << rng.integers(8)
            (copy / file.name).write_bytes(flipped)
            error = error_of(written.restore, victim.model, copy)
            assert isinstance(error, tf.errors.OpError), (file.name, at)
            assert_same(state_of(victim.model), victim.before)
            shutil.rmtree(copy)


def test_a_missing_file_changes_nothing(written, victim, tmp_path):
    for file in written.folder.glob("ckpt-2.data*"):
        copy = tmp_path / file.name
        shutil.copytree(written.folder, copy)
        (copy / file.name).unlink()
        with pytest.raises(tf.errors.OpError, match=file.name.partition(".")[0]):
            written.restore(victim.model, copy)
        assert_same(state_of(victim.model), victim.before)


def test_files_of_another_checkpoint_change_nothing(written, victim, tmp_path):
    exchanged = 0
    for file in [*written.folder.glob("ckpt-2.*")]:
        other = written.folder / file.name.replace("ckpt-2", "ckpt-1")
        if other.read_bytes() == file.read_bytes():
            continue
        copy = tmp_path / file.name
        shutil.copytree(written.folder, copy)
        shutil.copy(other, copy / file.name), shutil.copy(file, copy / other.name)
        assert isinstance(error_of(written.restore, victim.model, copy), tf.errors.OpError), file
        assert_same(state_of(victim.model), victim.before)
        exchanged += 1
    assert exchanged >= 3


def parts_of(tensors: dict, suffix: str) -> list[str]:
    (found,) = {name.rpartition("/")[0] for name in tensors if name.endswith(f"{suffix}/config")}
    return [name for name in tensors if name.startswith(f"{found}/")]


@pytest.fixture(scope="module")
def two_saves(saved_model, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("two_saves")
    save_whole(saved_model, folder)
    return folder


def tensors_of(path: pathlib.Path) -> dict:
    reader = tf.train.load_checkpoint(str(path))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_parts_of_another_save_with_right_checksums_change_nothing(two_saves, victim, tmp_path):
    """Of one table; all that is no part; or what says which save it is."""
    older = tensors_of(two_saves / "ckpt-1")
    names = {
        "table": parts_of(older, "embedding/_table_state/shard_0"),
        "variables": [name for name in older if "/shard_0/" not in name],
        "shapes": [name for name in older if "/shape/" in name],
    }
    for kind, moved in names.items():
        assert moved
        folder = shutil.copytree(two_saves, tmp_path / kind)
        rewrite(
            folder,
            "ckpt-2",
            lambda tensors, moved=moved: tensors.update({n: older[n] for n in moved}),
        )
        with pytest.raises(tf.errors.DataLossError, match="ckpt-2 has no part of snapshot"):
            checkpoint_of(victim.model).restore(str(folder / "ckpt-2"))
        assert_same(state_of(victim.model), victim.before)


def test_tables_of_a_checkpoint_that_were_exchanged_are_told_apart(tmp_path):
    """Also where they are of one width: each table gets the rows that were its own."""

    def model_with_two(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        ids = keras.Input((3,), dtype="int64")
        layers = [het_tf.layers.HetEmbedding(4, name=name, seed=seed) for name in "ab"]
        parts = [keras.layers.Flatten()(layer(ids)) for layer in layers]
        model = het_tf.keras.Model(ids, keras.layers.Add()(parts))
        for layer in layers:
            layer.table.assign(np.arange(5), np.full((5, 4), ord(layer.name), np.float32))
        return model

    model = model_with_two(1)
    checkpoint_of(model).write(str(tmp_path / "ckpt-1"))

    def exchange(tensors: dict) -> None:
        one, two = sorted(name for name in tensors if name.endswith("shard_0/config"))
        names = [(one.replace("config", x), two.replace("config", x)) for x in ("keys", "values")]
        for a, b in [*names, (one, two)]:
            tensors[a], tensors[b] = tensors[b], tensors[a]

    rewrite(tmp_path, "ckpt-1", exchange)
    other = model_with_two(2)
    for layer in other.layers[1:3]:
        layer.table.assign(np.arange(5), np.zeros((5, 4), np.float32))
    checkpoint_of(other).read(str(tmp_path / "ckpt-1"))
    for name in "ab":
        values = other.get_layer(name).table.lookup(np.arange(5))
        np.testing.assert_array_equal(values, np.full((5, 4), ord(name)))


def test_a_part_more_than_there_should_be_is_named(tmp_path):
    def table_of(rows: int) -> EmbeddingTable:
        table = EmbeddingTable(2, het_tf.optimizers.SGD(0.1), devices=["/device:CPU:0"] * 2)
        table.assign(np.arange(rows), np.ones((rows, 2), np.float32))
        return table

    table, other = table_of(10), table_of(3)
    tf.train.Checkpoint(table=TableState(table, lambda: None)).write(str(tmp_path / "ckpt-1"))

    def say_one(tensors: dict) -> None:
        said = json.loads(tensors["table/shard_0/config"]) | {"num_shards": 1}
        tensors["table/shard_0/config"] = json.dumps(said).encode()

    rewrite(tmp_path, "ckpt-1", say_one)
    with pytest.raises(tf.errors.DataLossError, match="ckpt-1, table has more than 1 parts"):
        tf.train.Checkpoint(table=TableState(other, lambda: None)).read(str(tmp_path / "ckpt-1"))
    assert other.size() == 3


def test_a_checkpoint_without_names_of_its_saves_restores(two_saves, other_model, tmp_path):
    """As het_tf wrote it before."""

    def remove(tensors: dict) -> None:
        for name in [x for x in tensors if x.endswith("/config") or "/shape/" in x]:
            said = json.loads(tensors[name])
            del said["snapshot"]
            tensors[name] = json.dumps(said).encode()

    checkpoint_of(other_model).restore(str(two_saves / "ckpt-2"))
    saved = state_of(other_model)
    train(other_model)
    folder = shutil.copytree(two_saves, tmp_path / "copy")
    rewrite(folder, "ckpt-2", remove)
    checkpoint_of(other_model).restore(str(folder / "ckpt-2"))
    assert_same(state_of(other_model), saved)
