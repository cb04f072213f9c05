"""Weights files whose rows do not fit: an error before a weight of the model changes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
import zipfile
import zlib

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf.storage.checkpoints.keras_files import add_checksums
from het_tf.tables.table import TableExport

IDS = np.arange(60).reshape(20, 3)


class Tower(keras.layers.Layer):
    """A layer with a table inside, and a weight of its own."""

    def __init__(self, width: int, **arguments):
        super().__init__(**arguments)
        self.embedding = het_tf.layers.HetEmbedding(width, name="inner", seed=1)

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.embedding.build(shape)

    def call(self, ids):
        return self.embedding(ids) * self.scale


def model_of(width: int, model_class: type[keras.Model] = het_tf.keras.Model) -> keras.Model:
    """A model whose numbers and normalization come before its tables."""
    numbers, ids = keras.Input((3,), name="numbers"), keras.Input((3,), dtype="int64", name="ids")
    normalization = keras.layers.Normalization(name="scaled")
    normalization.adapt(np.arange(width * 30).reshape(-1, 3).astype(np.float32))
    first = het_tf.layers.HetEmbedding(4, name="first", seed=1)
    both = [first(ids), Tower(width, name="tower")(ids)]
    parts = [keras.layers.Dense(2, name="before")(normalization(numbers))]
    parts += [keras.layers.Flatten()(each) for each in both]
    model = model_class([numbers, ids], keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))
    model.compile(het_tf.optimizers.JointOptimizer(keras.optimizers.Adam()), "mse")
    model.optimizer.build(model.trainable_variables)
    for table in tables_of(model):
        table.assign(IDS[:, 0], np.full((len(IDS), table.dim), width, np.float32))
    return model


def tables_of(model: keras.Model) -> list[het_tf.EmbeddingTable]:
    return [model.get_layer("first").table, model.get_layer("tower").embedding.table]


def state_of(model: keras.Model) -> list[np.ndarray]:
    """All of it: predictions are of what normalization made of its variables, too."""
    variables = model.optimizer.variables + model.variables
    state = [each.numpy() for each in variables if each.name != "anchor"]
    for table in tables_of(model):
        rows = table.export()
        order = np.argsort(rows.keys)
        state += [getattr(rows, field.name)[order] for field in dataclasses.fields(rows)]
    return [*state, model([IDS / 60, IDS]).numpy()]


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def remove_rows(path: pathlib.Path) -> None:
    """Of the last table in the file."""
    with h5py.File(path, "r+") as file:
        tables: list[str] = []
        file.visit(lambda name: tables.append(name) if name.endswith("vars/table") else None)
        assert len(tables) == 2
        (inner,) = [name for name in tables if "tower" in name]
        del file[inner]
        add_checksums(file)


@pytest.mark.parametrize(("kind", "beside"), [("weights.h5", False), ("keras", True)])
def test_another_width_changes_nothing(tmp_path, kind, beside):
    model, other = model_of(6), model_of(5)
    path = tmp_path / f"model.{kind}"
    rows_in = het_tf.checkpoint.rows_in(tmp_path / "rows") if beside else contextlib.nullcontext()
    with rows_in:
        model.save(path) if kind == "keras" else model.save_weights(path)
    before = state_of(other)
    with pytest.raises(ValueError, match=r"^[^\n]*inner[^\n]* has rows of 6 columns, the table 5$"):
        other.load_weights(path)
    assert_same(state_of(other), before)
    # And what fits is loaded.
    fitting = model_of(6)
    fitting.load_weights(path)
    assert_same(state_of(fitting), state_of(model))


def test_missing_rows_are_named_before_anything_else_is_wrong(tmp_path):
    model, path = model_of(6), tmp_path / "model.weights.h5"
    model.save_weights(path)
    remove_rows(path)
    model.get_layer("scaled").adapt(IDS.astype(np.float32))
    before = state_of(model)
    with pytest.raises(ValueError, match=r"^the weights file has no rows for the table of layer"):
        model.load_weights(path)
    assert_same(state_of(model), before)


def test_missing_and_damaged_rows_beside_a_file_are_named(tmp_path):
    model, other, path = model_of(6), model_of(6), tmp_path / "model.weights.h5"
    with het_tf.checkpoint.rows_in(tmp_path / "rows"):
        model.save_weights(path)
    before = state_of(other)
    (data,) = (tmp_path / "rows").glob("inner-*.data*")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(tf.errors.OpError, match=data.name.partition(".")[0]):
        other.load_weights(path)
    assert_same(state_of(other), before)
    for file in (tmp_path / "rows").glob("inner-*"):
        file.unlink()
    with pytest.raises(tf.errors.NotFoundError, match=r"^the weights file has no rows of layer"):
        other.load_weights(path)
    assert_same(state_of(other), before)


def test_skip_mismatch_loads_what_fits(tmp_path):
    model, other = model_of(6), model_of(5)
    model.save_weights(tmp_path / "model.weights.h5")
    before = tables_of(other)[1].export().values
    with pytest.warns(UserWarning, match="inner"):
        other.load_weights(tmp_path / "model.weights.h5", skip_mismatch=True)
    one, two = (tables_of(each)[0].export().values for each in (model, other))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(tables_of(other)[1].export().values, before)
    kernels = [each.get_layer("before").kernel for each in (model, other)]
    np.testing.assert_array_equal(*kernels)


def test_a_flipped_bit_of_a_keras_file_changes_nothing(tmp_path):
    """The archive has checksums."""
    model, other, path = model_of(6), model_of(6), tmp_path / "model.keras"
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("model.weights.h5")
    assert member.compress_type == zipfile.ZIP_STORED
    before, content = state_of(other), path.read_bytes()
    for part in range(1, 8):
        flipped = bytearray(content)
        flipped[member.header_offset + part * member.file_size // 8] ^= 1 << part
        path.write_bytes(flipped)
        with pytest.raises(zipfile.BadZipFile, match=r"CRC-32 for file 'model\.weights\.h5'"):
            other.load_weights(path)
        assert_same(state_of(other), before)


def test_what_is_skipped_is_not_looked_at(tmp_path):
    model, other = model_of(6), model_of(5)
    model.save_weights(tmp_path / "model.weights.h5")
    rows = model.get_layer("first").table.export().values
    skip = [other.get_layer("tower"), other.layers[-1], other.optimizer]  # what depends on it, too
    other.load_weights(tmp_path / "model.weights.h5", objects_to_skip=skip)
    np.testing.assert_array_equal(other.get_layer("first").table.export().values, rows)


def test_other_faults_are_keras_own(tmp_path):
    model = model_of(6)
    with pytest.raises(FileNotFoundError):
        model.load_weights(tmp_path / "missing.weights.h5")
    with pytest.raises(FileNotFoundError):
        model.load_weights(tmp_path / "missing.keras")
    with pytest.raises(ValueError, match="not yet been built"):
        het_tf.keras.Sequential([Tower(6)]).load_weights(tmp_path / "missing.weights.h5")


def test_a_plain_model_asks_a_table_when_layers_before_it_are_loaded(tmp_path):
    """Keras gives nobody a word before. `load_weights` of ours is what checks first."""
    model, other = model_of(6), model_of(5, keras.Model)
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match=r"A total of .* objects could not be loaded"):
        other.load_weights(tmp_path / "model.weights.h5")
    one, two = (each.get_layer("before").kernel for each in (model, other))
    np.testing.assert_array_equal(one, two)


# Rows in the file. A layer by itself, whose rows are in several parts.


def layer_of(rows: int, optimizer=None) -> keras.Model:
    ids = keras.Input((3,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(
        4, optimizer=optimizer or het_tf.optimizers.Adagrad(0.1), name="rows", seed=1
    )
    model = het_tf.keras.Model(ids, embedding(ids))
    rng = np.random.default_rng(rows)
    values, slots = (rng.random((rows, 4), np.float32) for _ in range(2))
    if embedding.table.slot_dim:
        exported = TableExport(np.arange(rows) * 3 - 30, values, slots, np.arange(rows))
        embedding.table.import_(exported)
    return model


def rows_of(model: keras.Model) -> list[np.ndarray]:
    rows = model.get_layer("rows").table.export()
    order = np.argsort(rows.keys)
    return [getattr(rows, field.name)[order] for field in dataclasses.fields(rows)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[pathlib.Path, list[np.ndarray]]:
    """A file with the rows of a table in three parts, and the rows."""
    model, path = layer_of(300), tmp_path_factory.mktemp("saved") / "rows.weights.h5"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("het_tf.tables.table._EXPORT_PART_BYTES", 5000)
        model.save_weights(path)
    assert read_config(path)["parts"] == 3
    return path, rows_of(model)


def variables_of(file: h5py.File) -> h5py.Group:
    found: list[str] = []
    file.visit(lambda name: found.append(name) if name.endswith("vars/table") else None)
    return file[found[0]].parent


def read_config(path: pathlib.Path) -> dict:
    with h5py.File(path) as file:
        return json.loads(variables_of(file)["table"][...].tobytes())


def change(path: pathlib.Path, to: pathlib.Path, arrays=None, config=None) -> None:
    """Copies a file, then calls arrays(dict) and config(dict), where given, with what it has.

    What Keras wrote has right checksums again.
    """
    shutil.copy(path, to)
    with h5py.File(to, "r+") as file:
        group = variables_of(file)
        content = {name: group[name][...] for name in group}
        if arrays is not None:
            arrays(content)
        if config is not None:
            said = json.loads(content["table"].tobytes())
            said = config(said) or said
            content["table"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
        for name in list(group):
            del group[name]
        for name, array in content.items():
            group[name] = array
        add_checksums(file)


def with_checksums(content: dict) -> None:
    """Makes the checksums right again."""
    said = json.loads(content["table"].tobytes())
    for column, of_parts in said["crc32"].items():
        for part in range(len(of_parts)):
            of_parts[part] = zlib.crc32(content.get(f"{column}_{part}", b""))
    content["table"] = np.frombuffer(json.dumps(said).encode(), np.uint8)


def assert_refused(path: pathlib.Path, message: str, model: keras.Model | None = None) -> None:
    model = model or layer_of(7)
    before = rows_of(model)
    with pytest.raises(ValueError, match=message) as error:
        model.load_weights(path)
    assert "table of layer rows" in str(error.value)
    assert_same(rows_of(model), before)


@pytest.mark.parametrize("flips", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_flipped_bit_of_a_row_is_noticed(saved, tmp_path, flips):
    path, rows = saved
    content, damaged = path.read_bytes(), tmp_path / "flipped.weights.h5"
    with h5py.File(path) as file:
        group = variables_of(file)
        arrays = {name: group[name] for name in group if name[-1].isdigit() and "_" in name}
        places = {name: (each.id.get_offset(), each.nbytes) for name, each in arrays.items()}
    assert len(places) == 12
    rng = np.random.default_rng(0)
    for name, (offset, size) in places.items():
        for at in rng.integers(offset, offset + size, flips):
            flipped = bytearray(content)
            flipped[at] ^= 1 << rng.integers(8)
            damaged.write_bytes(flipped)
            column, part = name.split("_")
            assert_refused(damaged, rf"part {part}: the checksum of {column} does not agree")
    model = layer_of(7)
    model.load_weights(path)
    assert_same(rows_of(model), rows)


def said(**changes):
    return {"config": lambda config: config.update(changes)}


def without(name):
    return {"config": lambda config: config.pop(name) and None}


def array(name, fn):
    def change(content):
        content[name] = fn(content[name])
        with_checksums(content)

    return {"arrays": change}


def set_to(at, value):
    def set_one(array):
        array[at] = value
        return array

    return set_one


SAID_WRONG = [
    (said(rows="nowhere"), "says rows = 'nowhere'"),
    (said(rows="beside"), "says prefix = None"),
    (said(parts="x"), "says parts = 'x'"),
    (said(parts=10**9), "not one checksum of keys for each of 1000000000 parts"),
    (said(count=299), "says count = 299, and has 300 rows"),
    (said(count="x"), "says count = 'x'"),
    (said(crc32=7), "says crc32 = 7"),
    (said(crc32={"keys": []}), r"says crc32 = \{'keys': \[\]\}"),
    (without("count"), "says count = None"),
    (said(slot_dim="a"), "says slot_dim = 'a'"),
    (said(slot_dim=3), r"part 0: slots is float32 \[\d+, 4\], expected float32 \[\d+, 3\]"),
    (said(dim=4.0), r"says dim = 4\.0"),
    (said(dim=5), "has rows of 5 columns, the table 4"),
    (said(format=2), "has format 2, expected 1"),
    (without("format"), "it has no format"),
    (said(optimizer=5), "says optimizer = 5"),
    (without("seed"), "says seed = None"),
    (said(initializer=[]), r"says initializer = \[\]"),
    ({"config": lambda config: [1]}, r"is damaged: it says \[1\]"),
    ({"arrays": lambda x: x.update(table=x["table"][:-1])}, "is damaged: "),
    ({"arrays": lambda x: x.update(table=np.float32([1.5]))}, "is damaged: "),
    ({"arrays": lambda x: x.pop("clocks_1")}, "clocks_1 of 3 parts is missing"),
    (array("values_1", lambda x: x[:-1]), r"part 1: values is float32 \[\d+, 4\], expected"),
    (array("values_1", lambda x: x.astype(">f4")), "part 1: values is >f4"),
    (array("keys_2", lambda x: x.astype(np.int32)), "part 2: keys is int32"),
    (array("keys_2", lambda x: np.int64(3)), r"part 2: keys is int64 \[\]"),
    (array("slots_0", set_to((3, 1), np.nan)), "part 0: slots holds NaN or infinity"),
    (array("clocks_0", set_to(3, -1)), "part 0: clocks holds -1"),
    (array("clocks_0", set_to(3, 2**62 + 1)), rf"part 0: clocks holds {2**62 + 1}"),
    (array("keys_0", lambda x: np.where(x == x[3], x[4], x)), "has a key twice"),
]


def test_what_a_file_says_wrong_is_named(saved, tmp_path, subtests):
    path, rows = saved
    change(path, tmp_path / "same.weights.h5", lambda content: None, lambda config: None)
    model = layer_of(7)
    model.load_weights(tmp_path / "same.weights.h5")
    assert_same(rows_of(model), rows)  # so what follows is refused for the change alone
    model = layer_of(7)
    for changes, message in SAID_WRONG:
        with subtests.test(message):
            change(path, tmp_path / "changed.weights.h5", **changes)
            assert_refused(tmp_path / "changed.weights.h5", message, model)


def old(**changes):
    """As files were before they had checksums."""

    def remove(config):
        del config["crc32"], config["count"]
        config.update(changes)

    return remove


def test_a_file_without_checksums_loads_if_all_is_there(saved, tmp_path):
    path, rows = saved
    change(path, tmp_path / "old.weights.h5", config=old())
    model = layer_of(7)
    model.load_weights(tmp_path / "old.weights.h5")
    assert_same(rows_of(model), rows)
    for parts, message in ((2, "more than 2 parts"), (10**9, "keys_3 of 1000000000 parts is")):
        change(path, tmp_path / "parts.weights.h5", config=old(parts=parts))
        assert_refused(tmp_path / "parts.weights.h5", message)


def test_checksums_of_slots_are_looked_at_where_they_are_not_taken(saved, tmp_path):
    path, rows = saved
    sgd = layer_of(7, het_tf.optimizers.SGD(0.1))
    sgd.load_weights(path)
    assert_same([*rows_of(sgd)[:2], rows_of(sgd)[3]], [*rows[:2], rows[3]])
    change(path, tmp_path / "x.weights.h5", lambda x: x["slots_0"].__setitem__((1, 1), 5))
    with pytest.raises(ValueError, match="the checksum of slots does not agree"):
        sgd.load_weights(tmp_path / "x.weights.h5")
