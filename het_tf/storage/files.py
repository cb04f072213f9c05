"""Atomic writes of files, on any file system that TensorFlow opens."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

# Size of a slice that is read and written at once.
_SLICE_BYTES = 64 << 20


def check_tensors(prefix: str, ours: Callable[[str], bool]) -> None:
    """Reads tensors of a bundle, one after the other, and verifies their checksums.

    Args:
      prefix: prefix of the bundle.
      ours: returns whether to read the tensor of a name.

    Raises:
      tf.errors.OpError: a tensor cannot be read. The message names the tensor.
    """
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
        if ours(name):
            try:
                with tf.device("/device:CPU:0"):
                    tf.raw_ops.RestoreV2(
                        prefix=prefix, tensor_names=[name], shape_and_slices=[""], dtypes=[dtype]
                    )
            except tf.errors.OpError as error:
                raise type(error)(
                    None, None, f"checkpoint {prefix}, {name}: {error.message}"
                ) from error


def replace_tensors(prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Replaces tensors of a bundle by arrays, slice by slice.

    Args:
      prefix: prefix of the bundle. After an error the bundle may be incomplete.
      arrays: arrays of any shape, by the name of the tensor. They may be mapped from files.

    Raises:
      KeyError: the bundle has no such tensor.
      tf.errors.OpError: a file cannot be read or written.
    """
    # `tf.train.load_checkpoint` would treat a prefix that looks like a folder as a folder.
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    names = list(reader.get_variable_to_shape_map())
    for name in arrays.keys() - set(names):
        raise KeyError(f"{prefix} has no tensor {name}")
    if not arrays:
        return
    folder = f"{prefix}_temp"
    others = [name for name in names if name not in arrays]
    prefixes = [f"{folder}/others"]
    with tf.device("/device:CPU:0"):
        tf.io.gfile.makedirs(folder)
        tensors = [reader.get_tensor(name) for name in others]
        _save(prefixes[0], others, [""] * len(others), tensors)
        for i, (name, array) in enumerate(arrays.items()):
            rows = max(1, _SLICE_BYTES // max(1, array[:1].nbytes))
            for first in range(0, len(array), rows):
                part = np.asarray(array[first : first + rows])
                shape = " ".join(map(str, array.shape))
                rest = ":-" * (array.ndim - 1)
                prefixes.append(f"{folder}/{i}_{first}")
                _save(prefixes[-1], [name], [f"{shape} {first},{len(part)}{rest}"], [part])
        for file in tf.io.gfile.glob(f"{prefix}.*"):
            tf.io.gfile.remove(file)
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes, destination_prefix=prefix, delete_old_dirs=True
        )


def _save(prefix: str, names: list[str], slices: list[str], tensors: list[np.ndarray]) -> None:
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=tensors)


_MODEL = "saved_model.pb"
# Folder of the versions inside a SavedModel whose rows are mapped from files.
VERSIONS = "assets.extra/het_tf"


@contextlib.contextmanager
def reading(path: str) -> Iterator[io.BufferedReader[Any]]:
    """Opens a file for reading.

    Raises:
      OSError: the file cannot be read. The message names the file.
    """
    with io.BufferedReader(_Raw(path, path, "rb")) as file:
        yield file


@contextlib.contextmanager
def replacing(*paths: str) -> Iterator[list[io.BufferedWriter]]:
    """Opens temporary files that replace `paths` at the end of the context.

    After an error in the context, `paths` are unchanged. Before the first replacement, the existing
    file at the last path is removed. The new file at the last path is moved last. It is therefore
    never beside files of another write.

    Raises:
      OSError: a file cannot be written. The message names the file.
    """
    temporary = [_beside(path) for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(io.BufferedWriter(_Raw(*names, "wb")))
                for names in zip(temporary, paths, strict=True)
            ]
        with _os_errors(paths[-1]):
            if len(paths) > 1 and tf.io.gfile.exists(paths[-1]):
                tf.io.gfile.remove(paths[-1])
            for written, path in zip(temporary, paths, strict=True):
                tf.io.gfile.rename(written, path, overwrite=True)
    except BaseException:
        for path in temporary:
            with contextlib.suppress(tf.errors.OpError):
                tf.io.gfile.remove(path)
        raise


@contextlib.contextmanager
def saving_model(path: str) -> Iterator[str]:
    """Returns a temporary folder for a SavedModel whose files move to `path` at the end.

    After an error in the context, `path` is unchanged. An existing SavedModel at `path` is removed
    first, beginning with `saved_model.pb`. The new `saved_model.pb` is moved last. Other files in
    the folder stay.

    Raises:
      tf.errors.OpError: a file cannot be written.
    """
    temporary = _beside(path)
    try:
        yield temporary
        files = [
            os.path.join(folder, name).removeprefix(temporary).lstrip("/")
            for folder, _, names in tf.io.gfile.walk(temporary)
            for name in names
        ]
        if tf.io.gfile.exists(f"{path}/{_MODEL}"):
            tf.io.gfile.remove(f"{path}/{_MODEL}")
            for folder in ("variables", "assets"):
                if tf.io.gfile.exists(f"{path}/{folder}"):
                    tf.io.gfile.rmtree(f"{path}/{folder}")
        for file in sorted(files, key=lambda file: file == _MODEL):
            tf.io.gfile.makedirs(os.path.dirname(f"{path}/{file}"))
            tf.io.gfile.rename(f"{temporary}/{file}", f"{path}/{file}", overwrite=True)
    finally:
        if tf.io.gfile.exists(temporary):
            tf.io.gfile.rmtree(temporary)


def _beside(path: str) -> str:
    """Returns a unique name in the folder of `path`."""
    folder, name = os.path.split(path.rstrip("/"))
    return os.path.join(folder, f".{uuid.uuid4().hex}.{name}")


class _Raw(io.RawIOBase):
    """Adapter from TensorFlow's file class to Python's, for zipfile and pyarrow."""

    def __init__(self, path: str, shown: str, mode: str):
        """Opens a file.

        Args:
          path: path of the file.
          shown: path in error messages.
          mode: "rb" or "wb".
        """
        self._path, self._reads = shown, mode == "rb"
        self._file = tf.io.gfile.GFile(path, mode)
        with _os_errors(shown):  # GFile opens the file at the first access.
            self._file.read(0) if self._reads else self._file.write(b"")

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return not self._reads

    def seekable(self) -> bool:
        return self._reads

    def readinto(self, buffer: Any) -> int:
        with _os_errors(self._path):
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def write(self, content: Any) -> int:
        with _os_errors(self._path):
            self._file.write(bytes(content))
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if not self._reads:
            raise io.UnsupportedOperation(f"{self._path} is written from its beginning to its end")
        with _os_errors(self._path):
            self._file.seek(offset, whence)
            return self._file.tell()

    def tell(self) -> int:
        return self.seek(0, io.SEEK_CUR)

    def close(self) -> None:
        if self.closed:
            return
        try:
            super().close()
        finally:
            with _os_errors(self._path):
                self._file.close()


@contextlib.contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """Raises errors of TensorFlow as OSErrors that name the path."""
    try:
        yield
    except tf.errors.OpError as error:
        kind = FileNotFoundError if isinstance(error, tf.errors.NotFoundError) else OSError
        raise kind(f"{path}: {error.message}") from error


@contextlib.contextmanager
def whole_file(
    filepath: Any, arguments: dict[str, Any], endings: tuple[str, ...] = (".keras", ".h5")
) -> Iterator[Any]:
    """Returns a path for Keras to write to. The file replaces `filepath` at the end of the context.

    After an error in the context, `filepath` is unchanged. The context returns `filepath` itself,
    and the write is not atomic, if `filepath` is a folder, if Keras writes several files
    (`max_shard_size`), or if Keras has to ask before it overwrites (`overwrite=False`).

    Args:
      filepath: path of the file that Keras writes.
      arguments: other arguments of Keras's save function.
      endings: file name endings that Keras accepts. For other names, Keras raises an error that
        shows `filepath`.
    """
    path = os.fspath(filepath)
    is_file = path.endswith(endings) and not os.path.isdir(path)
    asks = os.path.exists(path) and not arguments.get("overwrite", True)
    if not is_file or arguments.get("max_shard_size") or asks:
        yield filepath
        return
    folder, name = os.path.split(path)
    if "://" in path:
        with tempfile.TemporaryDirectory() as folder:
            temporary = os.path.join(folder, name)
            yield temporary
            with open(temporary, "rb") as file, replacing(path) as (target,):
                shutil.copyfileobj(file, target)
        return
    # Keras selects the format by the ending.
    temporary = os.path.join(folder, f".{uuid.uuid4().hex}.{name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
