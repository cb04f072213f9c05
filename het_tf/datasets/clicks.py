"""Clicks in text files, one example a line: Criteo's and Avazu's formats, read by tf.data.

    data = het_tf.datasets.clicks.read(["day_0.gz", "day_1.gz"], clicks.CRITEO, 1024)

The files may be gzipped. They are read while they are trained, by each worker its part, and need no
preparation. A line that is not in the format is an error with file, line and column.

Criteo: display advertising challenge (Kaggle, 2014) and terabyte click logs, with the same columns.
Avazu: click-through rate prediction (Kaggle, 2014).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from het_tf.runtime.validation import INT32_MAX, check_integer

_LINES = 1024  # that are checked at a time
_HASH_BITS = 40  # of a category's text

_LABEL, _INTEGER, _CATEGORY, _OTHER = "label", "integer", "category", "other"
_PATTERNS = {_LABEL: "[01]", _INTEGER: "(-?[0-9]{1,18})?", _CATEGORY: "[^{s}]*", _OTHER: "[^{s}]*"}


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a format.

    Attributes:
      name: name.
      kind: "label" (0 or 1), "integer" (may be blank), "category" (any text), or "other" (not
        read).
      pattern: regular expression (RE2) that the text matches. Empty: that of the kind.
    """

    name: str
    kind: str
    pattern: str = ""


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of lines.

    Attributes:
      columns: the columns.
      separator: a character between two columns.
      has_header: whether the first line of a file has the names of the columns.
    """

    columns: tuple[Column, ...]
    separator: str
    has_header: bool = False

    def patterns(self) -> list[str]:
        """Regular expressions of the columns' texts."""
        patterns = (column.pattern or _PATTERNS[column.kind] for column in self.columns)
        return [pattern.replace("{s}", re.escape(self.separator)) for pattern in patterns]

    def line_pattern(self, columns: int | None = None) -> str:
        """Regular expression of a line, or of its first columns."""
        return re.escape(self.separator).join(self.patterns()[:columns])

    def of_kind(self, kind: str) -> list[int]:
        """Places of the columns of a kind."""
        return [i for i, column in enumerate(self.columns) if column.kind == kind]


CRITEO = Format(
    (
        Column("label", _LABEL),
        *(Column(f"I{i}", _INTEGER) for i in range(1, 14)),
        *(Column(f"C{i}", _CATEGORY, "([0-9a-f]{1,8})?") for i in range(1, 27)),
    ),
    "\t",
)
AVAZU = Format(
    (
        Column("id", _OTHER, "[0-9]+"),
        Column("click", _LABEL),
        Column("hour", _CATEGORY, "[0-9]{8}"),
        *(
            Column(name, _CATEGORY)
            for name in (
                *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id"),
                *("app_domain", "app_category", "device_id", "device_ip", "device_model"),
                *("device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22))),
            )
        ),
    ),
    ",",
    has_header=True,
)


def read(
    paths: Sequence[str | os.PathLike[str]],
    form: Format,
    batch_size: int,
    *,
    context: tf.distribute.InputContext | None = None,
    shuffle: int = 0,
    seed: int | None = None,
    max_bad_lines: int = 0,
) -> tf.data.Dataset:
    """Returns batches of the examples in text files, in one pass.

    Args:
      paths: the files. Names that end with ".gz" are of gzipped files.
      form: their format.
      batch_size: examples of a batch. A last, smaller batch is left out with `shuffle`.
      context: the worker that reads. It reads every n-th file, or every n-th line if there are
        fewer files than workers. None: all lines.
      shuffle: examples among which the next one is drawn. 0: the order of the files.
      seed: seed of the order. None: another order in every run.
      max_bad_lines: lines of a worker and pass that may not be in the format. They are left out.

    Returns:
      Dataset of (features, labels). Features are "integers", float32 [batch, integer columns], NaN
      where blank, and "categories", int64 [batch, category columns]. A category is a number of the
      column and a hash of the text, so that one table can have all columns. Labels are float32
      [batch]. A bad line is a tf.errors.InvalidArgumentError of the iterator.

    Raises:
      ValueError: an argument is out of range. The message names it.
    """
    if isinstance(paths, (str, bytes, os.PathLike)) or not paths:
        raise ValueError(f"paths must be a list of at least one file, not {paths!r}")
    if not isinstance(form, Format):
        raise ValueError(f"form must be a Format, such as clicks.CRITEO, not {form!r}")
    batch_size = check_integer("batch_size", batch_size, 1, INT32_MAX)
    shuffle = check_integer("shuffle", shuffle, 0, INT32_MAX)
    max_bad_lines = check_integer("max_bad_lines", max_bad_lines, 0, INT32_MAX)
    names = [os.fspath(path) for path in paths]
    files = tf.data.Dataset.from_tensor_slices(names)
    parts, part = (context.num_input_pipelines, context.input_pipeline_id) if context else (1, 0)
    by_file = len(names) >= parts
    if by_file:
        files = files.shard(parts, part)
    blocks = files.flat_map(lambda path: _blocks(path, form))
    pattern = form.line_pattern()

    def marked(
        path: tf.Tensor, number: tf.Tensor, lines: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        numbers = number + tf.range(tf.size(lines, tf.int64), dtype=tf.int64)
        if not by_file:
            mine = numbers % parts == part
            numbers, lines = numbers[mine], lines[mine]
        return path, numbers, lines, tf.strings.regex_full_match(lines, pattern)

    def check(count: tf.Tensor, block: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, tf.Tensor]:
        path, numbers, lines, is_good = block
        count += tf.math.count_nonzero(~is_good)

        def refuse() -> tf.Tensor:
            first = tf.argmin(tf.cast(is_good, tf.int32))
            return _refuse(path, numbers[first], lines[first], form)

        passed = tf.cond(count > max_bad_lines, refuse, lambda: tf.constant(True))
        with tf.control_dependencies([passed]):
            return count, tf.cond(
                tf.reduce_all(is_good), lambda: lines, lambda: tf.boolean_mask(lines, is_good)
            )

    lines = blocks.map(marked, tf.data.AUTOTUNE).scan(tf.constant(0, tf.int64), check)
    if shuffle:
        lines = lines.unbatch().shuffle(shuffle, seed).batch(batch_size, drop_remainder=True)
    else:
        lines = lines.rebatch(batch_size)
    return lines.map(lambda batch: _parsed(batch, form), tf.data.AUTOTUNE).prefetch(2)


def _blocks(path: tf.Tensor, form: Format) -> tf.data.Dataset:
    """Returns a dataset of a file's path, the number of a line, and this and the next lines."""
    is_packed = tf.strings.regex_full_match(path, r".*\.gz")
    lines = tf.data.TextLineDataset(path, tf.where(is_packed, "GZIP", ""))
    first = 1
    if form.has_header:
        header = form.separator.join(column.name for column in form.columns)

        def is_example(line: tf.Tensor) -> tf.Tensor:
            message = [path, ", line 1: the header is not ", header, ": ", line]
            with tf.control_dependencies(
                [tf.debugging.Assert(line == header, [tf.strings.join(message)])]
            ):
                return tf.constant(False)

        lines, first = lines.take(1).filter(is_example).concatenate(lines.skip(1)), 2
    blocks = lines.batch(_LINES).enumerate()
    return blocks.map(lambda block, texts: (path, first + block * _LINES, texts))


def _refuse(path: tf.Tensor, number: tf.Tensor, line: tf.Tensor, form: Format) -> tf.Tensor:
    """Fails, and names the first column that is not in the format."""
    rest = f"({re.escape(form.separator)}\\C*)?"  # \C: any byte, UTF-8 or not.
    good = [
        tf.strings.regex_full_match(line, form.line_pattern(n + 1) + rest)
        for n in range(len(form.columns))
    ]
    column = tf.argmin(tf.cast(tf.stack([*good, tf.constant(False)]), tf.int32))
    names = tf.constant([*(c.name for c in form.columns), "after the last"])
    line = tf.strings.unicode_transcode(line, "UTF-8", "UTF-8")  # Of any bytes makes a text.
    where = [path, ", line ", tf.strings.as_string(number), ", column ", names[column], ": "]
    with tf.control_dependencies([tf.debugging.Assert(False, [tf.strings.join([*where, line])])]):
        return tf.constant(False)


def _parsed(lines: tf.Tensor, form: Format) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Returns the features and labels of lines that are in the format."""
    defaults = {
        _LABEL: tf.constant(0.0),
        _INTEGER: tf.constant(np.nan, tf.float32),
        _CATEGORY: tf.constant(""),
        _OTHER: tf.constant(""),
    }
    fields = tf.io.decode_csv(
        lines,
        [defaults[column.kind] for column in form.columns],
        field_delim=form.separator,
        use_quote_delim=False,
    )
    (label,) = (fields[i] for i in form.of_kind(_LABEL))
    texts = tf.stack([fields[i] for i in form.of_kind(_CATEGORY)], axis=1)
    first_keys = np.arange(len(form.of_kind(_CATEGORY)), dtype=np.int64) << _HASH_BITS
    categories = tf.strings.to_hash_bucket_fast(texts, 1 << _HASH_BITS) + first_keys
    features = {"categories": categories}
    if form.of_kind(_INTEGER):
        integers = tf.stack([fields[i] for i in form.of_kind(_INTEGER)], axis=1)
        features["integers"] = integers
    return features, label


def generate(
    path: str | os.PathLike[str], examples: int, seed: int = 0, form: Format = CRITEO
) -> np.ndarray:
    """Writes clicks with frequent and rare categories, and a planted signal.

    Args:
      path: of the file.
      examples: number of lines.
      seed: equal seeds write equal files.
      form: format of the file, CRITEO or AVAZU.

    Returns:
      The probability of each click, float64 [examples]. No model can have a better log loss.
    """
    rng = np.random.default_rng(seed)
    integers, categories = form.of_kind(_INTEGER), form.of_kind(_CATEGORY)
    weights = np.random.default_rng(1).normal(0, 1, (len(categories), 1000))
    category = rng.zipf(1.2, (examples, len(categories))) % 1_000_000
    count = rng.geometric(0.1, (examples, len(integers))) - 1
    patterns = form.patterns()
    may_be_blank = [bool(re.fullmatch(patterns[i], "")) for i in [*integers, *categories]]
    blank = (rng.random((examples, len(may_be_blank))) < 0.05) & may_be_blank
    known = np.log1p(count) * ~blank[:, : len(integers)]
    effect = weights[np.arange(len(categories)), category % 1000] * ~blank[:, len(integers) :]
    logit = effect.sum(1) / 4 + 0.1 * known[:, :4].sum(1) - 1.5
    chance = 1 / (1 + np.exp(-logit))
    label = (rng.random(examples) < chance).astype(int)
    # Of a column of digits, and of one that may have letters.
    bases = ["08x" if re.fullmatch(patterns[i], 8 * "f") else "08d" for i in categories]
    with open(path, "w", encoding="utf-8") as file:
        if form.has_header:
            file.write(form.separator.join(column.name for column in form.columns) + "\n")
        for i in range(examples):
            line = len(patterns) * [str(i)]
            line[form.of_kind(_LABEL)[0]] = str(label[i])
            texts = [str(each) for each in count[i]]
            texts += [format(each, base) for each, base in zip(category[i], bases, strict=True)]
            for place, text, hidden in zip([*integers, *categories], texts, blank[i], strict=True):
                line[place] = "" if hidden else text
            file.write(form.separator.join(line) + "\n")
    return chance
