"""Criteo's and Avazu's text formats: what is read, shares of workers, and lines that are wrong."""

from __future__ import annotations

import dataclasses
import gzip

import numpy as np
import pytest
import tensorflow as tf

from het_tf.datasets import clicks


def all_of(dataset):
    features, labels = zip(*dataset.as_numpy_iterator(), strict=True)
    joined = {name: np.concatenate([f[name] for f in features]) for name in features[0]}
    return joined, np.concatenate(labels)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "day_0"
    clicks.generate(path, 300)
    lines = path.read_text().splitlines()
    with gzip.open(tmp_path / "day_1.gz", "wt") as file:
        file.write("\n".join(lines[:50]) + "\n")
    return [path, tmp_path / "day_1.gz"], [line.split("\t") for line in [*lines, *lines[:50]]]


def test_what_is_read_is_what_the_lines_have(written):
    paths, rows = written
    features, labels = all_of(clicks.read(paths, clicks.CRITEO, 64))
    assert labels.tolist() == [float(row[0]) for row in rows]
    expected = [[float(text) if text else np.nan for text in row[1:14]] for row in rows]
    np.testing.assert_array_equal(features["integers"], np.array(expected, np.float32))
    by_text = {}
    for row, keys in zip(rows, features["categories"].tolist(), strict=True):
        for column, (text, key) in enumerate(zip(row[14:], keys, strict=True)):
            assert key >> 40 == column
            assert by_text.setdefault((column, text), key) == key
    assert len(set(by_text.values())) == len(by_text)


@pytest.mark.parametrize("workers", [2, 3], ids=["by file", "by line"])
def test_workers_share_the_lines(written, workers):
    paths, rows = written
    labels = []
    for worker in range(workers):
        context = tf.distribute.InputContext(workers, worker, workers)
        data = clicks.read(paths, clicks.CRITEO, 32, context=context, shuffle=100, seed=1)
        again = clicks.read(paths, clicks.CRITEO, 32, context=context, shuffle=100, seed=1)
        mine, _ = all_of(data)
        np.testing.assert_array_equal(mine["categories"], all_of(again)[0]["categories"])
        plain, _ = all_of(clicks.read(paths, clicks.CRITEO, 32, context=context))
        labels.append(len(plain["categories"]))
        assert len(mine["categories"]) == len(plain["categories"]) // 32 * 32
    assert sum(labels) == len(rows)


@pytest.mark.parametrize(
    ("change", "column"),
    [
        (lambda fields: ["2", *fields[1:]], "label"),
        (lambda fields: [*fields[:3], "1.5", *fields[4:]], "I3"),
        (lambda fields: [*fields[:-1], "xyz"], "C26"),
        (lambda fields: fields[:-1], "C26"),
        (lambda fields: [*fields, "1"], "after the last"),
        (lambda fields: [], "label"),
        (lambda fields: [*fields[:20], "\udcff", *fields[21:]], "C7"),
    ],
)
def test_bad_lines_are_named_or_left_out(written, change, column):
    (path, _), rows = written
    rows = rows[:300]
    changed = [*rows[:7], change(rows[7]), *rows[8:]]
    path.write_text("".join("\t".join(row) + "\n" for row in changed), errors="surrogateescape")
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"day_0, line 8, column {column}: "):
        all_of(clicks.read([path], clicks.CRITEO, 64))
    _, labels = all_of(clicks.read([path], clicks.CRITEO, 64, max_bad_lines=1))
    assert labels.tolist() == [float(row[0]) for i, row in enumerate(rows) if i != 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], clicks.CRITEO, 64), r"paths must be a list of at least one file, not \[\]"),
        (("day_0", clicks.CRITEO, 64), "paths must be a list of at least one file, not 'day_0'"),
        ((["day_0"], "criteo", 64), "form must be a Format, such as clicks.CRITEO, not 'criteo'"),
        ((["day_0"], clicks.CRITEO, 0), "batch_size must be an integer from 1 to "),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        clicks.read(*arguments)


def test_avazu_has_a_header(tmp_path):
    path = tmp_path / "train.csv"
    names = [column.name for column in clicks.AVAZU.columns]
    assert len(names) == 24
    line = ["10001", "1", "14102100", *(f"v{i}" for i in range(21))]
    path.write_text(f"{','.join(names)}\n{','.join(line)}\n")
    features, labels = all_of(clicks.read([path], clicks.AVAZU, 8))
    assert labels.tolist() == [1.0]
    assert features["categories"].shape == (1, 22)
    assert features.keys() == {"categories"}
    path.write_text(f"{','.join(line)}\n{','.join(line)}\n")
    with pytest.raises(tf.errors.InvalidArgumentError, match="line 1: the header is not id,click"):
        all_of(clicks.read([path], clicks.AVAZU, 8))


@pytest.mark.parametrize(
    "form",
    [clicks.CRITEO, clicks.AVAZU, dataclasses.replace(clicks.CRITEO, separator="|")],
    ids=["criteo", "avazu", "separator of expressions"],
)
def test_generated_clicks_have_the_returned_probabilities(tmp_path, form):
    chance = clicks.generate(tmp_path / "clicks", 20_000, 1, form)
    features, labels = all_of(clicks.read([tmp_path / "clicks"], form, 1024))
    assert features["categories"].shape == (20_000, len(form.of_kind("category")))
    # In each tenth of the lines, from rare to frequent clicks.
    tenths = np.argsort(chance).reshape(10, -1)
    deviation = np.sqrt((chance * (1 - chance))[tenths].mean(1) / tenths.shape[1])
    np.testing.assert_array_less(
        np.abs(labels[tenths].mean(1) - chance[tenths].mean(1)), 4 * deviation
    )
    assert chance[tenths[-1]].mean() > 2 * chance[tenths[0]].mean()
