"""A folder that cannot be written: an error, the model as it was, what was there is there still."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator

import keras
import pytest
import tensorflow as tf
from test_full_disk import files_in, publish
from test_weights_check import assert_same, model_of, state_of

import het_tf
from het_tf import interop


class Folder:
    """A folder that can be made read-only, for root as well, who may write what others may not."""

    def __init__(self, path: pathlib.Path):
        """path: of the folder, which is empty."""
        self.path = path
        self._is_root = os.geteuid() == 0
        if self._is_root:
            mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "het_tf_tests", str(path)]
            done = subprocess.run(mount, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"root writes into any folder, and may mount none: {done.stderr}")

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        self._allow(False)
        try:
            yield
        finally:
            self._allow(True)

    def _allow(self, writing: bool) -> None:
        if self._is_root:
            option = f"remount,{'rw' if writing else 'ro'}"
            subprocess.run(["mount", "-o", option, str(self.path)], check=True)
        else:
            for each in (self.path, *(path for path in self.path.rglob("*") if path.is_dir())):
                each.chmod(0o755 if writing else 0o555)

    def close(self) -> None:
        if self._is_root:
            subprocess.run(["umount", "-l", str(self.path)], check=True)


@pytest.fixture
def folder(tmp_path) -> Iterator[Folder]:
    (tmp_path / "folder").mkdir()
    made = Folder(tmp_path / "folder")
    yield made
    made.close()


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return model_of(6)


def save_with_manager(model: keras.Model, folder: pathlib.Path) -> None:
    manager = het_tf.checkpoint.Manager(tf.train.Checkpoint(model=model), folder)
    manager.save()
    manager.wait()


def save_beside(model: keras.Model, folder: pathlib.Path) -> None:
    """The rows: the file with the pointer is elsewhere."""
    with het_tf.checkpoint.rows_in(folder):
        model.save_weights(folder.parent / "pointer.weights.h5")


def export_rows(model: keras.Model, file: interop.Npz) -> None:
    interop.save(model.get_layer("first"), file)


WRITERS: dict[str, Callable[[keras.Model, pathlib.Path], object]] = {
    "checkpoint": lambda model, path: tf.train.Checkpoint(model=model).save(str(path / "ckpt")),
    "manager": save_with_manager,
    "rows beside": save_beside,
    "export": lambda model, path: model.export(path, verbose=False),
    "publish": publish,
    "weights": lambda model, path: model.save_weights(path / "model.weights.h5"),
    "keras": lambda model, path: model.save(path / "model.keras"),
    "npz": lambda model, path: export_rows(model, interop.Npz(path / "rows.npz")),
}


def test_nothing_changes(model, folder, subtests):
    """With and without a folder that was written into before."""
    makers = ("manager", "export")  # of their folder
    cases = [*((name, True) for name in WRITERS), *((name, False) for name in makers)]
    for name, there in cases:
        with subtests.test(f"{name}, {there=}"):
            path = folder.path / f"{name}-{there}"
            if there:
                path.mkdir()
                (path / "note").write_text("stays")
            before, files = state_of(model), files_in(folder.path)
            with (
                folder.read_only(),
                pytest.raises(
                    (OSError, tf.errors.OpError), match=r"Read-only file|Permission denied"
                ),
            ):
                WRITERS[name](model, path)
            assert files_in(folder.path) == files
            assert not list(folder.path.rglob("*temp*"))
            assert_same(state_of(model), before)
            # And the next one is written: the failed one holds nothing.
            path.mkdir(exist_ok=True)
            WRITERS[name](model, path)
            assert files_in(folder.path).keys() > files.keys()


def test_checkpoints_of_a_read_only_folder_restore(model, folder):
    checkpoint = tf.train.Checkpoint(model=model)
    save_with_manager(model, folder.path)
    checkpoint.write(str(folder.path / "whole"))
    before, other = state_of(model), model_of(6)
    for each in other.trainable_variables:
        if each.name != "anchor":
            each.assign(each.numpy() + 1)
    with folder.read_only():
        restored = tf.train.Checkpoint(model=other)
        het_tf.checkpoint.Manager(restored, folder.path).restore_or_initialize()
        assert_same(state_of(other), before)
        restored.read(str(folder.path / "whole"))
    assert_same(state_of(other), before)
