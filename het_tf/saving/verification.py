"""Reading all that versions of a model consist of, to find out what is missing or damaged."""

from __future__ import annotations

import re
import struct
import zlib

import tensorflow as tf

_MANIFEST = re.compile(r"(\d{12})\.([0-9a-f]{16})\.(whole|delta)")
_FOOTER = struct.Struct("<8s6I2Q2I")
_BLOCK = 1 << 20


def verify_versions(folder: str) -> int:
    """Reads what the manifests in a folder name, and compares checksums.

    Args:
      folder: of the versions, into which more may be written meanwhile.

    Returns:
      How many files of rows there are.

    Raises:
      ValueError: there is no whole version, or a file is missing or damaged. The message names it.
    """
    if not tf.io.gfile.isdir(folder):
        raise ValueError(f"{folder} is no folder")
    names = sorted(filter(_MANIFEST.fullmatch, tf.io.gfile.listdir(folder)))
    if not any(name.endswith(".whole") for name in names):
        raise ValueError(f"{folder}: there is no whole version")
    rows: set[str] = set()
    for name in names:
        try:
            rows.update(_verify_version(folder, name))
        except ValueError:
            # Unless its publisher removed it meanwhile.
            if tf.io.gfile.exists(f"{folder}/{name}"):
                raise
    return len(rows)


def _verify_version(folder: str, name: str) -> list[str]:
    """Verifies what a manifest names; returns the files of rows."""
    others, rows = _read_manifest(f"{folder}/{name}", name)
    for file in rows:
        path = f"{folder}/{file}"
        try:
            _verify_rows(path)
        except tf.errors.OpError as error:
            raise ValueError(f"{path} cannot be read: {error.message}") from error
    path = f"{folder}/{others}"
    try:
        reader = tf.compat.v1.train.NewCheckpointReader(path)
        for tensor in reader.get_variable_to_shape_map():
            reader.get_tensor(tensor)
    # The reader's errors have no common class.
    except Exception as error:
        raise ValueError(f"{path} is missing or damaged: {error}") from error
    return rows


def _read_manifest(path: str, name: str) -> tuple[str, list[str]]:
    """What a manifest (ops/core/serving/manifest.h) names: the variables, and the files of rows."""
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            content = file.read()
    except tf.errors.OpError as error:
        raise ValueError(f"{path} cannot be read: {error.message}") from error
    text, _, checksum = content.rpartition(b"crc32 ")
    if checksum != b"%08x\n" % zlib.crc32(text):
        raise ValueError(f"{path} is damaged, or its end is missing")
    version, publisher, kind = _MANIFEST.fullmatch(name).groups()
    begin = f"version {int(version)}\npublisher {publisher}\nwhole {int(kind == 'whole')}\n"
    text = text.decode(errors="replace")
    lines = re.fullmatch(
        rf"het_tf served 1\n{begin}written \d+\nothers (\S+)\ntables \d+\n(?:rows \d+ \S+\n)*", text
    )
    if lines is None:
        raise ValueError(f"{path} is no manifest of that version")
    return lines[1], re.findall(r"^rows \d+ (\S+)$", text, re.MULTILINE)


def _verify_rows(path: str) -> None:
    size = tf.io.gfile.stat(path).length
    with tf.io.gfile.GFile(path, "rb") as file:
        file.seek(max(0, size - _FOOTER.size))
        footer = file.read()
        if len(footer) != _FOOTER.size or not footer.startswith(b"HETROWS\n"):
            raise ValueError(f"{path} is no file of rows, or its end is missing")
        *_, expected = _FOOTER.unpack(footer)
        if zlib.crc32(footer[:-4]) != expected:
            raise ValueError(f"{path}: its footer is damaged")
        # One checksum of four bytes for each block.
        blocks = -(-(size - _FOOTER.size) // (_BLOCK + 4))
        end = size - _FOOTER.size - 4 * blocks
        file.seek(end)
        checksums = struct.unpack(f"<{blocks}I", file.read(4 * blocks))
        file.seek(0)
        for block, expected in enumerate(checksums):
            first = block * _BLOCK
            if zlib.crc32(file.read(min(_BLOCK, end - first))) != expected:
                raise ValueError(f"{path}: damaged between bytes {first} and {first + _BLOCK}")
