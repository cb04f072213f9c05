"""Reads text files line by line, gzipped or not. Lines that are not as they must be are named."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from het_tf.runtime.validation import INT32_MAX, check_integer

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_NATURAL = re.compile(r"[0-9]{1,18}")
_BLOCK = 1 << 20  # bytes that are parsed at a time


class BadLineError(ValueError):
    """A line is not as it must be. The message has file, line, column and text."""


def _open(path: str | os.PathLike[str]) -> gzip.GzipFile | io.BufferedReader:
    """Opens a file for reading. A file whose name ends with ".gz" is unpacked."""
    return gzip.open(path) if os.fspath(path).endswith(".gz") else open(path, "rb")


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
    with _named_errors(path), _open(path) as file:
        yield from enumerate(io.TextIOWrapper(file, encoding="utf-8", newline="\n"), 1)


@contextlib.contextmanager
def _named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BadLineError(f"{os.fspath(path)}: {error}") from error


def json_object(
    path: str | os.PathLike[str], object_hook: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """Reads a file with one JSON object.

    Args:
      path: the file.
      object_hook: returns what takes the place of an object.

    Raises:
      BadLineError: the file has no JSON, or no object.
    """
    try:
        lines = "".join(line for _, line in numbered(path))
        found = json.loads(lines, object_hook=object_hook)
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
    separators: str,
    columns: Sequence[str],
    *,
    has_header: bool = False,
    limits: Sequence[int] | None = None,
    max_bad_lines: int = 0,
) -> np.ndarray:
    """Reads a table of integers: millions of lines a second, if most blocks of lines are good.

    Args:
      path: the file.
      separators: the character between two columns, or the characters after each but the last.
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
    if len(separators) != len(columns) - 1:
        separators *= len(columns) - 1
    bad = BadLines(max_bad_lines)
    if has_header:
        _, head = next(numbered(path), (1, ""))
        form = _form(columns, separators)
        if head.rstrip("\r\n") != form:
            raise BadLineError(f"{os.fspath(path)}, line 1 is {head.rstrip()!r}, not {form!r}")
    tables = [np.zeros((0, len(columns)), np.int64)]
    for first, block in _blocks(path):
        if has_header and first == 1:
            first, block = 2, block.partition(b"\n")[2]
        table = _good_integers(block, separators)
        if table is None or (limits and ((table < 0) | (table >= limits)).any()):
            rows = []
            lines = block.decode(errors="backslashreplace").split("\n")[:-1]
            for number, line in enumerate(lines, first):
                try:
                    rows.append(_row(line, separators, columns, limits))
                except ValueError as error:
                    bad.note(path, number, str(error))
            table = np.array(rows, np.int64).reshape(-1, len(columns))
        tables.append(table)
    return np.concatenate(tables)


def _blocks(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """Yields the number of a line, and the bytes of this and the next lines, to a line's end."""
    number, rest = 1, b""
    with _named_errors(path), _open(path) as file:
        while piece := file.read(_BLOCK):
            lines, end, rest = (rest + piece).rpartition(b"\n")
            yield number, (lines + end).replace(b"\r\n", b"\n")
            number += lines.count(b"\n") + len(end)
    if rest:
        yield number, rest.removesuffix(b"\r") + b"\n"


def _good_integers(block: bytes, separators: str) -> np.ndarray | None:
    """Returns the integers of a block of lines. None: a line is not only digits and separators."""
    characters = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(characters - ord("0") > 9)
    gaps = np.frombuffer(f"{separators}\n".encode(), np.uint8)
    if len(ends) % len(gaps) or (characters[ends].reshape(-1, len(gaps)) != gaps).any():
        return None
    digits = np.diff(ends, prepend=-1) - 1
    if (digits < 1).any() or (digits > 18).any():
        return None
    spaced = block.translate(bytes.maketrans(separators.encode(), b" " * len(separators)))
    return np.fromstring(spaced, np.int64, sep=" ").reshape(-1, len(gaps))


def _row(
    line: str, separators: str, columns: Sequence[str], limits: Sequence[int] | None
) -> list[int]:
    """Returns the integers of a line. A ValueError says what is wrong with it."""
    if [c for c in line if c in separators] != list(separators):
        raise ValueError(f" is {line!r}, not {_form(columns, separators)!r}")
    fields = re.split(f"[{re.escape(separators)}]", line) if separators else [line]
    for i, (name, text) in enumerate(zip(columns, fields, strict=True)):
        if not _INTEGER.fullmatch(text):
            raise ValueError(f", column {name!r}: {text!r} is no integer")
        if limits and not 0 <= int(text) < limits[i]:
            raise ValueError(f", column {name!r}: {text} is not from 0 to {limits[i] - 1}")
    return [int(text) for text in fields]


def _form(columns: Sequence[str], separators: str) -> str:
    return "".join(map(str.__add__, columns, (*separators, "")))


def integer_lists(path: str | os.PathLike[str], *, max_bad_lines: int = 0) -> list[np.ndarray]:
    """Reads lines of integers from 0 on, with spaces between them, of any number.

    Raises:
      BadLineError: a column is no such integer, or a line is empty.
    """
    bad = BadLines(max_bad_lines)
    lists = []
    for number, line in numbered(path):
        fields = line.split()
        wrong = [i for i, text in enumerate(fields) if not _NATURAL.fullmatch(text)]
        if wrong:
            text = fields[wrong[0]]
            bad.note(path, number, f", column {wrong[0] + 1}: {text!r} is no integer from 0 on")
        elif not fields:
            bad.note(path, number, " is empty")
        else:
            lists.append(np.array(fields, np.int64))
    return lists
