"""Reads text files line by line, gzipped or not. Lines that are not as they must be are named."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
from absl import logging

from het_tf.runtime.validation import INT32_MAX, check_integer

_INTEGER = re.compile(r"-?[0-9]{1,18}")


class BadLineError(ValueError):
    """A line is not as it must be. The message has file, line, column and text."""


def open_text(path: str | os.PathLike[str]) -> IO[str]:
    """Opens a UTF-8 text file for reading. A file whose name ends with ".gz" is unpacked."""
    if os.fspath(path).endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8", newline="\n")
    return open(path, encoding="utf-8", newline="\n")


def find(folder: str | os.PathLike[str], name: str) -> str:
    """Returns the path of a file of a folder, which may be gzipped.

    Raises:
      FileNotFoundError: the folder has neither `name` nor `name` with ".gz".
    """
    for ending in ("", ".gz"):
        path = os.path.join(folder, name + ending)
        if os.path.exists(path):
            return path
    raise FileNotFoundError(f"{os.fspath(folder)} has no file {name} or {name}.gz")


def numbered(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Yields the numbers of a file's lines, from 1 on, and the lines.

    Raises:
      BadLineError: the file is not gzipped or not UTF-8, though it must be.
    """
    with open_text(path) as file:
        try:
            yield from enumerate(file, 1)
        except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise BadLineError(f"{os.fspath(path)}: {error}") from error


def json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a file with one JSON object.

    Raises:
      BadLineError: the file has no JSON, or no object.
    """
    try:
        found = json.loads("".join(line for _, line in numbered(path)))
    except json.JSONDecodeError as error:
        raise BadLineError(f"{os.fspath(path)}: {error}") from error
    if not isinstance(found, dict):
        raise BadLineError(f"{os.fspath(path)} has a {type(found).__name__}, no object")
    return found


@dataclasses.dataclass
class BadLines:
    """Bad lines of a reading: so many are passed over, and the next one is an error.

    Attributes:
      most: number of bad lines that are passed over.
      count: number of bad lines so far.
    """

    most: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        check_integer("max_bad_lines", self.most, 0, INT32_MAX)

    def note(self, path: str | os.PathLike[str], line: int, what: str) -> None:
        """Counts a bad line.

        Raises:
          BadLineError: there are more than `most`.
        """
        error = BadLineError(f"{os.fspath(path)}, line {line}{what}")
        self.count += 1
        if self.count > self.most:
            raise error
        if self.count == 1:
            logging.warning("passed over: %s", error)


def records(
    path: str | os.PathLike[str], separator: str | None, columns: int, bad: BadLines
) -> Iterator[tuple[int, list[str]]]:
    """Yields the lines of a file that have the right number of columns.

    Args:
      path: the file.
      separator: text between columns. None: white space.
      columns: number of columns.
      bad: takes note of other lines.

    Yields:
      The number of the line, from 1 on, and its columns.
    """
    for number, line in numbered(path):
        fields = line.rstrip("\r\n").split(separator)
        if len(fields) == columns:
            yield number, fields
        else:
            bad.note(path, number, f" has {len(fields)} columns, not {columns}")


def integers(
    path: str | os.PathLike[str],
    separator: str | None,
    columns: Sequence[str],
    *,
    has_header: bool = False,
    limits: Sequence[int] | None = None,
    max_bad_lines: int = 0,
) -> np.ndarray:
    """Reads a table of integers.

    Args:
      path: the file.
      separator: text between columns. None: white space.
      columns: names of the columns.
      has_header: whether the first line has the names, which must be these.
      limits: of each column. Its numbers must be from 0 to the limit - 1. None: any numbers.
      max_bad_lines: number of bad lines of the file that are passed over.

    Returns:
      int64 [lines, columns].

    Raises:
      BadLineError: a line has another number of columns, or a column is no integer or not in its
        limits.
    """
    bad = BadLines(max_bad_lines)
    rows = []
    if has_header:
        _, first = next(numbered(path), (1, ""))
        head = first.rstrip("\r\n").split(separator)
        if head != list(columns):
            raise BadLineError(f"{os.fspath(path)}, line 1 is {head}, not {list(columns)}")
    for number, fields in records(path, separator, len(columns), bad):
        if has_header and number == 1:
            continue
        for name, text, limit in zip(columns, fields, limits or [None] * len(columns), strict=True):
            if not _INTEGER.fullmatch(text):
                bad.note(path, number, f", column {name!r}: {text!r} is no integer")
                break
            if limit is not None and not 0 <= int(text) < limit:
                bad.note(path, number, f", column {name!r}: {text} is not from 0 to {limit - 1}")
                break
        else:
            rows.append([int(text) for text in fields])
    return np.array(rows, np.int64).reshape(-1, len(columns))


def integer_lists(path: str | os.PathLike[str], *, max_bad_lines: int = 0) -> list[np.ndarray]:
    """Reads lines of integers between spaces, of any number.

    Raises:
      BadLineError: a column is no integer, or a line is empty.
    """
    bad = BadLines(max_bad_lines)
    lists = []
    for number, line in numbered(path):
        fields = line.split()
        wrong = [i for i, text in enumerate(fields) if not _INTEGER.fullmatch(text)]
        if wrong:
            text = fields[wrong[0]]
            bad.note(path, number, f", column {wrong[0] + 1}: {text!r} is no integer")
        elif not fields:
            bad.note(path, number, " is empty")
        else:
            lists.append(np.array(fields, np.int64))
    return lists
