"""Checksums in weights files of what Keras writes: layers, optimizers, what is said of tables."""

from __future__ import annotations

import json
import pathlib
import shutil

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from test_checkpoint import error_of
from test_weights_check import assert_same, model_of, state_of

import het_tf
from het_tf.storage.checkpoints.keras_files import check_checksums

CHECKSUMS = "het_tf/vars/checksums"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[pathlib.Path, list[np.ndarray]]:
    """A file, and the state of the model in it."""
    path = tmp_path_factory.mktemp("saved") / "model.weights.h5"
    model = model_of(6)
    for each in model.optimizer.variables[2:]:
        each.assign(np.random.default_rng(1).random(each.shape))
    model.save_weights(path)
    return path, state_of(model)


@pytest.fixture(scope="module")
def victim() -> tuple[keras.Model, list[np.ndarray]]:
    """A model that nothing is loaded into, and its state."""
    keras.utils.set_random_seed(2)
    model = model_of(6)
    return model, state_of(model)


def places(path: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Of each dataset the offset and the bytes in the file."""
    found: dict[str, tuple[int, int]] = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = item.id.get_offset(), item.nbytes

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def test_every_flipped_bit_of_a_variable_is_noticed_before_anything_changes(
    saved, victim, tmp_path
):
    (path, _), (model, before) = saved, victim
    content, rng = path.read_bytes(), np.random.default_rng(0)
    seen = set()
    for name, (offset, size) in places(path).items():
        flipped = bytearray(content)
        flipped[offset + rng.integers(size)] ^= 1 << rng.integers(8)
        (tmp_path / "flipped.weights.h5").write_bytes(flipped)
        with pytest.raises(ValueError, match="damaged: ") as error:
            model.load_weights(tmp_path / "flipped.weights.h5")
        if "keys_" in name or "values_" in name or "clocks_" in name or "slots_" in name:
            assert "table of layer" in str(error.value)  # as test_weights_check.py has it
        elif name != CHECKSUMS:
            assert f"the checksum of {name} does not agree" in str(error.value)
            seen.add(name.split("/")[0])
        assert_same(state_of(model), before)
        # Damage is not what is to be skipped.
        if name.startswith("layers/dense/"):
            with pytest.raises(ValueError, match="does not agree"):
                model.load_weights(tmp_path / "flipped.weights.h5", skip_mismatch=True)
            assert_same(state_of(model), before)
    assert seen == {"layers", "optimizer"}


@pytest.mark.parametrize("flips", [20, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_a_flipped_bit_anywhere_is_noticed_or_means_nothing(saved, tmp_path, flips):
    """What HDF5 has between the datasets, mostly zeros."""
    (path, state), model = saved, model_of(6)
    before, flipped = state_of(model), tmp_path / "flipped.weights.h5"
    model.save_weights(tmp_path / "before.weights.h5")
    content, rng = path.read_bytes(), np.random.default_rng(1)
    data = places(path).values()
    others = [
        at
        for at in range(len(content))
        if content[at] and not any(offset <= at < offset + size for offset, size in data)
    ]
    noticed = 0
    for at in rng.choice(others, flips):
        damaged = bytearray(content)
        damaged[at] ^= 1 << rng.integers(8)
        flipped.write_bytes(damaged)
        if error_of(model.load_weights, flipped) is None:
            assert_same(state_of(model), state)
            model.load_weights(tmp_path / "before.weights.h5")
        else:
            noticed += 1
        assert_same(state_of(model), before)
    assert noticed > flips / 12


def edit(path: pathlib.Path, to: pathlib.Path, change) -> pathlib.Path:
    shutil.copy(path, to)
    with h5py.File(to, "r+") as file:
        change(file)
    return to


def said(**changes):
    def change(file):
        of_file = json.loads(file[CHECKSUMS][...].tobytes()) | changes
        text = json.dumps({name: each for name, each in of_file.items() if each is not None})
        del file[CHECKSUMS]
        file[CHECKSUMS] = np.frombuffer(text.encode(), np.uint8)

    return change


def replaced(name, value):
    def change(file):
        del file[name]
        if value is not None:
            file[name] = value

    return change


BIAS = "layers/dense/vars/1"


DISAGREES = [
    (replaced(BIAS, None), f"{BIAS} is missing"),
    (said(**{BIAS: None}), f"{BIAS} is not one of its parts"),
    (said(other=["<f4", "", [2], 7]), "other is missing"),
    (said(**{BIAS: 7}), "damaged: "),
    (said(**{BIAS: ["<f4", "", [2], 7]}), f"the checksum of {BIAS} does not agree"),
    (replaced(BIAS, np.zeros(3, np.float32)), f"{BIAS} is .*3.*, expected .*2"),
    (replaced(BIAS, np.zeros(2, np.float64)), f"{BIAS} is .*f8.*, expected .*f4"),
    (replaced(CHECKSUMS, np.frombuffer(b"[", np.uint8)), "damaged: "),
    (replaced(CHECKSUMS, np.frombuffer(b"7", np.uint8)), "damaged: "),
    (replaced(CHECKSUMS, None), "was written with checksums, and has none"),
    (replaced("het_tf", None), "was written with checksums, and has none"),
]


def test_what_does_not_agree_is_named(saved, victim, tmp_path, subtests):
    (path, _), (model, before) = saved, victim
    for change, message in DISAGREES:
        changed = edit(path, tmp_path / "changed.weights.h5", change)
        with subtests.test(message):
            with pytest.raises(ValueError, match=message):
                model.load_weights(changed)
            assert_same(state_of(model), before)


def test_a_shape_that_no_file_holds_is_refused_unread(saved, victim, tmp_path):
    (path, _), (model, before) = saved, victim
    for name in (BIAS, CHECKSUMS):

        def change(file, name=name):
            dtype = file[name].dtype
            del file[name]
            file.create_dataset(
                name, (1 << 45,), dtype, chunks=(1 << 20,)
            )  # of which none is there

        with pytest.raises(ValueError, match=rf"{name} (is|has) "):
            model.load_weights(edit(path, tmp_path / "huge.weights.h5", change))
        assert_same(state_of(model), before)


def test_plain_keras_loads_it_and_its_files_load(saved, tmp_path):
    path, state = saved
    plain = model_of(6, keras.Model)
    plain.load_weights(path)
    assert_same(state_of(plain), state)
    plain.save_weights(tmp_path / "plain.weights.h5")
    assert not check_checksums(str(tmp_path / "plain.weights.h5"))
    assert "checksums" not in read_config_of_first(tmp_path / "plain.weights.h5")
    model = model_of(6)
    model.load_weights(tmp_path / "plain.weights.h5")
    assert_same(state_of(model), state)


def read_config_of_first(path: pathlib.Path) -> dict:
    with h5py.File(path) as file:
        (name,) = [name for name in places(path) if name.endswith("het_embedding/vars/table")]
        return json.loads(file[name][...].tobytes())


def test_a_file_on_any_file_system_has_them(saved, tmp_path):
    _, state = saved
    model = model_of(6)
    model.load_weights(saved[0])
    for _ in range(2):
        model.save_weights("ram://weights/model.weights.h5")
    assert check_checksums("ram://weights/model.weights.h5")
    other = model_of(6)
    other.load_weights("ram://weights/model.weights.h5")
    assert_same(state_of(other), state)
    with tf.io.gfile.GFile("ram://weights/model.weights.h5", "rb") as file:
        content = bytearray(file.read())
    (tmp_path / "copy").write_bytes(content)
    tf.io.gfile.remove("ram://weights/model.weights.h5")  # a file there is written on
    content[places(tmp_path / "copy")[BIAS][0]] ^= 1
    with tf.io.gfile.GFile("ram://weights/model.weights.h5", "wb") as file:
        file.write(bytes(content))
    before = state_of(other)
    with pytest.raises(ValueError, match="does not agree"):
        other.load_weights("ram://weights/model.weights.h5")
    assert_same(state_of(other), before)


def test_weights_of_any_dtype_and_a_model_without_a_table(tmp_path):
    def make(dtype):
        model = het_tf.keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype=dtype)])
        model.add(keras.layers.BatchNormalization())
        return model

    for dtype in ("bfloat16", "float16", "float64"):
        model, path = make(dtype), tmp_path / f"{dtype}.weights.h5"
        model.save_weights(path)
        assert check_checksums(str(path))
        other = make(dtype)
        other.load_weights(path)
        assert_same(list(map(np.asarray, other.weights)), list(map(np.asarray, model.weights)))
        content = bytearray(path.read_bytes())
        content[places(path)["layers/dense/vars/0"][0] + 1] ^= 1
        path.write_bytes(content)
        with pytest.raises(ValueError, match="checksum of layers/dense/vars/0 does not agree"):
            other.load_weights(path)


def test_what_keras_is_asked_about_has_none(saved, monkeypatch, tmp_path):
    """`overwrite=False` may leave the file as it was: its checksums are not made anew."""
    path = edit(saved[0], tmp_path / "old.weights.h5", lambda file: None)
    content = path.read_bytes()
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    model_of(6).save_weights(path, overwrite=False)
    assert path.read_bytes() == content
