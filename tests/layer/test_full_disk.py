"""Full disks while rows are written for others: an error, and what was there is there still."""

from __future__ import annotations

import contextlib
import pathlib
import resource
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf import interop
from het_tf.export import save_endpoints

ROWS, WIDTH = 20_000, 16
QUERY = np.array([[1, 2, 30_000]])


@contextlib.contextmanager
def full_after(size: int) -> Iterator[None]:
    """No file gets larger."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(scope="module")
def model() -> keras.Model:
    ids = keras.Input((3,), dtype="int64", name="ids")
    rows = het_tf.layers.HetEmbedding(WIDTH, seed=1, name="rows")(ids)
    made = het_tf.keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    fill(made, 1)
    return made


def fill(model: keras.Model, seed: int) -> None:
    values = np.random.default_rng(seed).random((ROWS, WIDTH), np.float32)
    model.get_layer("rows").table.assign(np.arange(ROWS), values)


def files_in(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def publish(model: keras.Model, folder: pathlib.Path) -> None:
    het_tf.serving.publish(model, folder, every="1h").close()


MODELS = {
    "export": lambda model, path: model.export(path),
    "export as int8": lambda model, path: het_tf.export_saved_model(model, path, rows="int8"),
    "publish": publish,
}


@pytest.fixture(params=["at once", "when the graph is there"])
def full(request, monkeypatch) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which the disk is full from its beginning, or when a SavedModel lacks its rows.

    Rows to be exported go through files elsewhere first, which are as large.
    """
    if request.param == "at once":
        return lambda: full_after(200_000)

    @contextlib.contextmanager
    def later() -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)

        def save_and_fill(*arguments: Any) -> None:
            save_endpoints(*arguments)
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))

        with monkeypatch.context() as patch, full_after(limits[0]):
            for module in ("het_tf.export", "het_tf.serving"):
                patch.setattr(f"{module}.save_endpoints", save_and_fill)
            yield

    return later


TOO_LARGE = "too large|requested and .* written"


@pytest.mark.parametrize(
    ("kind", "full"),
    [
        ("export", "when the graph is there"),
        ("export as int8", "at once"),
        ("publish", "at once"),
        ("publish", "when the graph is there"),
    ],
    indirect=["full"],
)
def test_no_saved_model_is_there_of_which_a_part_is_missing(model, tmp_path, kind, full):
    with full(), pytest.raises((OSError, tf.errors.OpError), match=TOO_LARGE):
        MODELS[kind](model, tmp_path / "model")
    assert files_in(tmp_path) == {}
    MODELS[kind](model, tmp_path / "model")
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    assert loaded.serve(tf.constant(QUERY)).shape == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("kind", "full"),
    [("export", "at once"), ("export as int8", "when the graph is there")],
    indirect=["full"],
)
def test_the_saved_model_before_is_served_until_there_is_another(model, tmp_path, kind, full):
    MODELS[kind](model, tmp_path / "model")
    (tmp_path / "model/assets.extra").mkdir()
    (tmp_path / "model/assets.extra/note").write_text("stays")
    before = files_in(tmp_path)
    fill(model, 2)
    with full(), pytest.raises((OSError, tf.errors.OpError), match=TOO_LARGE):
        MODELS[kind](model, tmp_path / "model")
    assert files_in(tmp_path) == before
    MODELS[kind](model, tmp_path / "model")
    after = files_in(tmp_path)
    # No file of the one before is left: that of the keys has another name.
    assert len(after) == len(before)
    assert after["model/assets.extra/note"] == b"stays"
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    expected = model.predict(QUERY, verbose=0)
    np.testing.assert_allclose(loaded.serve(tf.constant(QUERY)), expected, rtol=0, atol=0.02)


FORMATS = {
    "npz": lambda folder: interop.Npz(folder / "rows.npz"),
    "parquet": lambda folder: interop.Parquet(folder / "rows.parquet"),
    "tfra": lambda folder: interop.Tfra(folder, "rows", WIDTH),
}


def test_files_of_others_are_as_they_were(model, tmp_path, subtests):
    layer = model.get_layer("rows")
    for name, make in FORMATS.items():
        folder = tmp_path / name
        folder.mkdir()
        fill(model, 3)
        with subtests.test(name):
            with full_after(200_000), pytest.raises(OSError, match="too large"):
                interop.save(layer, make(folder))
            assert files_in(folder) == {}
            interop.save(layer, make(folder))
            before = files_in(folder)
            fill(model, 4)
            with full_after(200_000), pytest.raises(OSError, match="too large"):
                interop.save(layer, make(folder))
            assert files_in(folder) == before
            interop.save(layer, make(folder))
            assert files_in(folder) != before


def test_values_of_tfra_are_never_beside_keys_of_others(model, tmp_path, monkeypatch):
    """Whatever a process had renamed when it was killed."""
    layer = model.get_layer("rows")
    interop.save(layer, FORMATS["tfra"](tmp_path))
    rename = tf.io.gfile.rename

    def die(source: str, target: str, overwrite: bool = False) -> None:
        if target.endswith("-keys"):
            raise KeyboardInterrupt
        rename(source, target, overwrite)

    monkeypatch.setattr(tf.io.gfile, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        interop.save(layer, FORMATS["tfra"](tmp_path))
    assert list(files_in(tmp_path)) == ["rows_mht_1of1_rank0_size1-values"]
    with pytest.raises(FileNotFoundError, match="rows has no files rows_mht_"):
        interop.load(layer, FORMATS["tfra"](tmp_path))
