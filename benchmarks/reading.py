"""Rate of het_tf.datasets.clicks.read, beside the fastest public way to parse the same file.

    python benchmarks/reading.py

The fastest way found: tf.data.TextLineDataset in batches, with tf.io.decode_csv and a hash of the
categories. It names no bad line, and its map runs in as many threads. CsvDataset parses single
lines. The ways take turns, and rates are
medians of --repeats passes.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import tempfile
import time

import tensorflow as tf
from absl import app, flags

from het_tf.datasets import clicks

_LINES = flags.DEFINE_integer("lines", 200_000, "lines of the file")
_BATCH = flags.DEFINE_integer("batch", 1024, "lines of a batch")
_REPEATS = flags.DEFINE_integer("repeats", 9, "passes")
_JSON = flags.DEFINE_string("json", None, "file to write the rates to")

_DEFAULTS = [
    tf.constant(0.0),
    *[tf.constant(float("nan"))] * 13,
    *[tf.constant("")] * 26,
]


def parsed(lines: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Label, integers and hashed categories."""
    fields = tf.io.decode_csv(lines, _DEFAULTS, field_delim="\t", use_quote_delim=False)
    texts = tf.stack(fields[14:], axis=1)
    return fields[0], tf.stack(fields[1:14], axis=1), tf.strings.to_hash_bucket_fast(texts, 1 << 40)


def rate(dataset: tf.data.Dataset) -> float:
    """Lines in a second of a pass."""
    batches = iter(dataset)
    began = time.perf_counter()
    for _ in batches:
        pass
    # The destructor of an iterator waits for a thread of tf.data's, up to as long as the pass.
    return _LINES.value / (time.perf_counter() - began)


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "clicks.txt"
        clicks.generate(path, _LINES.value)
        lines = tf.data.TextLineDataset(str(path)).batch(_BATCH.value)
        csv = tf.data.experimental.CsvDataset(str(path), _DEFAULTS, field_delim="\t")
        datasets = {
            "decode_csv": lines.map(parsed, tf.data.AUTOTUNE).prefetch(2),
            "CsvDataset": csv.batch(_BATCH.value),
            "clicks.read": clicks.read([path], clicks.CRITEO, _BATCH.value),
        }
        passes = [
            {name: rate(each) for name, each in datasets.items()} for _ in range(_REPEATS.value)
        ]
    rates = {name: statistics.median(each[name] for each in passes) for name in datasets}
    for name, found in rates.items():
        print(f"{name:12} {found:10,.0f} lines/s {found / rates['decode_csv']:6.2f}")
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    app.run(main)
