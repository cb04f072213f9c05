"""Files that are there whole or not at all, on any file system that TensorFlow opens."""

from __future__ import annotations

import contextlib
import io
import os
import uuid
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_MODEL = "saved_model.pb"
# Of a SavedModel whose rows are mapped: the folder of its versions.
VERSIONS = "assets.extra/het_tf"


@contextlib.contextmanager
def reading(path: str) -> Iterator[io.BufferedReader]:
    """The bytes of a file.

    Raises:
      OSError: it cannot be read; the message names it.
    """
    with io.BufferedReader(_Raw(path, path, "rb")) as file:
        yield file


@contextlib.contextmanager
def replacing(*paths: str) -> Iterator[list[io.BufferedWriter]]:
    """Where to write files that then take the place of `paths`, unless there was an error.

    The last of them comes last, and what was there in its place goes first: so it is never beside
    files that it does not belong to.

    Raises:
      OSError: one cannot be written; the message names it.
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
    """Where to write a SavedModel whose files then go into `path`, unless there was an error.

    What makes them a SavedModel goes last. One that was there before is removed first, in the other
    order; what else is in the folder stays.

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
    """A name of its own in the same folder."""
    folder, name = os.path.split(path.rstrip("/"))
    return os.path.join(folder, f".{uuid.uuid4().hex}.{name}")


class _Raw(io.RawIOBase):
    """A file of TensorFlow as one of Python, of which zipfile and pyarrow read and write."""

    def __init__(self, path: str, shown: str, mode: str):
        """Opens a file. shown: what errors call it. mode: "rb" or "wb"."""
        self._path, self._reads = shown, mode == "rb"
        self._file = tf.io.gfile.GFile(path, mode)
        with _os_errors(shown):  # GFile itself opens later
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
    """TensorFlow's errors as Python's."""
    try:
        yield
    except tf.errors.OpError as error:
        kind = FileNotFoundError if isinstance(error, tf.errors.NotFoundError) else OSError
        raise kind(f"{path}: {error.message}") from error
