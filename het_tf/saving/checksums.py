"""Checksums of what Keras writes into a `.weights.h5`, in the file itself.

The dataset `het_tf/vars/checksums` is JSON as bytes: by the path of each dataset of the file its
dtype, its shape and the CRC-32 of its bytes, as zlib has it. Rows of tables have checksums of their
own in `table` beside them (`weights_files.py`), and are not in it.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from het_tf.saving.files import reading

_GROUP, _NAME = "het_tf", "het_tf/vars/checksums"
_COLUMN = re.compile(r"(.*/)?(keys|values|slots|clocks)_\d+")

_announced: contextvars.ContextVar[bool] = contextvars.ContextVar("announced", default=False)


@contextlib.contextmanager
def with_checksums(path: str) -> Iterator[None]:
    """Adds checksums to a file that Keras writes in this context, if there is no error.

    Args:
      path: of the file, on a file system of the operating system.

    Raises:
      OSError: they cannot be written.
    """
    token = _announced.set(True)
    try:
        yield
    finally:
        _announced.reset(token)
    with h5py.File(path, "r+") as file:
        add_checksums(file)


def are_announced() -> bool:
    """Whether the file that is being written will have checksums."""
    return _announced.get()


def add_checksums(file: h5py.File) -> None:
    """Writes the checksums of what a file has, in place of older ones."""
    if _GROUP in file:
        del file[_GROUP]
    of_file = {name: [*_form(each), _crc32(each)] for name, each in _datasets(file).items()}
    file[_NAME] = np.frombuffer(json.dumps(of_file).encode(), np.uint8)


def check_checksums(path: str) -> bool:
    """Reads what a file has checksums of, one dataset after the other.

    Args:
      path: of the file, on any file system that TensorFlow opens.

    Returns:
      Whether it has checksums. False: it is none of het_tf's, or cannot be read at all, which Keras
      says when it opens it.

    Raises:
      ValueError: the file is damaged; the message names the part.
    """
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(reading(path)) if "://" in path else path
            file = stack.enter_context(h5py.File(opened, "r"))
        except OSError:
            return False
        try:
            return _check(file)
        # h5py raises errors of all classes where a file is damaged.
        except Exception as error:
            raise ValueError(f"the weights file {path} is damaged: {error}") from error


def _check(file: h5py.File) -> bool:
    if _NAME not in file:
        return False
    stored = file[_NAME]
    if stored.nbytes > stored.id.get_storage_size():
        raise ValueError(f"{_NAME} has {stored.nbytes} bytes")
    expected = json.loads(stored[...].tobytes())
    datasets = _datasets(file)
    for name in sorted(expected.keys() ^ datasets.keys()):
        raise ValueError(f"{name} is {'missing' if name in expected else 'not one of its parts'}")
    for name, dataset in datasets.items():
        *form, crc32 = expected[name]
        if form != _form(dataset):  # before so many bytes are read
            raise ValueError(f"{name} is {_form(dataset)}, expected {form}")
        if crc32 != _crc32(dataset):
            raise ValueError(f"the checksum of {name} does not agree with it")
    return True


def _datasets(file: h5py.File) -> dict[str, h5py.Dataset]:
    """Those that are to have checksums, by path."""
    found: dict[str, h5py.Dataset] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name != _NAME:
            is_of_rows = _COLUMN.fullmatch(name) and "table" in item.parent
            if not is_of_rows:
                found[name] = item

    file.visititems(visit)
    return found


def _form(dataset: h5py.Dataset) -> list[Any]:
    """What is compared before it is read. Keras notes a dtype that HDF5 does not have."""
    return [dataset.dtype.str, str(dataset.attrs.get("dtype", "")), list(dataset.shape)]


def _crc32(dataset: h5py.Dataset) -> int:
    return zlib.crc32(np.ascontiguousarray(dataset[...]).reshape(-1).view(np.uint8))
