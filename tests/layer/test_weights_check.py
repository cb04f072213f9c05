"""Weights files whose rows do not fit: an error before a weight of the model changes."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf

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
    model.compile(keras.optimizers.Adam(), "mse")
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


@pytest.mark.parametrize("kind", ["weights.h5", "keras"])
@pytest.mark.parametrize("beside", [False, True])
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
