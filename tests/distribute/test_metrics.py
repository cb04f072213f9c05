"""What a user sees of caches and network while training runs."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
import het_tf.keras
from het_tf import top

KEYS, BATCH = 40, 16


def make_model(strategy, cache):
    with strategy.scope():
        ids = keras.Input((3,), dtype="int64")
        embedding = het_tf.layers.HetEmbedding(4, cache=cache, name="items")
        hidden = keras.layers.Flatten()(embedding(ids))
        model = het_tf.keras.Model(ids, keras.layers.Dense(1)(hidden))
        model.compile("sgd", "mse", steps_per_execution=4)
    return model, embedding


def batches(steps):
    """Only key 1 in the half of each batch."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, KEYS, (steps * BATCH, 3))
    ids[::2] = 1
    return ids, np.ones((steps * BATCH, 1), np.float32)


def scalars(folder):
    """Tag -> values in the order of their steps, and tag -> buckets of all histograms."""
    values, buckets = {}, {}
    for path in sorted(pathlib.Path(folder).glob("events.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                tensor = tf.make_ndarray(value.tensor)
                if tensor.ndim:
                    buckets[value.tag] = np.concatenate(
                        [buckets.get(value.tag, tensor[:0]), tensor]
                    )
                else:
                    values.setdefault(value.tag, []).append((event.step, float(tensor)))
    return values, buckets


def test_cache_metrics_in_tensorboard_and_log(strategy, tmp_path, caplog):
    cache = het_tf.CacheConfig(KEYS, staleness=2)
    model, embedding = make_model(strategy, cache)
    metrics = het_tf.keras.callbacks.CacheMetrics(str(tmp_path))
    with caplog.at_level(logging.INFO, logger="absl"):
        model.fit(*batches(40), batch_size=BATCH, epochs=2, verbose=0, callbacks=[metrics])
    values, buckets = scalars(tmp_path)
    stats = embedding.cache_stats()
    totals = {tag: sum(v for _, v in pairs) for tag, pairs in values.items()}
    assert [step for step, _ in values["items/hit_rate"]] == [40, 80]
    # Key 1 is half of the ids, and one key of a batch.
    assert stats["hit_rate"] > stats["key_hit_rate"] > 0
    assert values["items/hit_rate"][0][1] > values["items/key_hit_rate"][0][1]
    # What was counted up to the last report, which comes with the end of a closure.
    for tag, counter in (("misses", "misses"), ("refreshes", "refreshes")):
        assert 0 < totals[f"items/{tag}"] <= stats[counter]
    assert totals["items/bytes_pushes"] + totals["items/bytes_requests"] <= stats["bytes_up"]
    assert totals["items/bytes_pushes"] > 0
    missing = buckets["items/reads_missing"]
    # Each worker may miss two updates of the row, and holds two of its own back.
    assert missing[:, 0].max() <= 2
    assert 0 < missing[:, 2].sum() <= stats["hits"]
    lines = [r.getMessage() for r in caplog.records if "items: hit_rate" in r.getMessage()]
    assert len(lines) == 2
    assert lines[0].startswith("step 40,")


@pytest.mark.exhaustive
def test_cache_metrics_count_all_that_caches_count(strategy, tmp_path):
    cache = het_tf.CacheConfig(KEYS // 4, read_bound=1, write_bound=3)
    model, embedding = make_model(strategy, cache)
    metrics = het_tf.keras.callbacks.CacheMetrics(str(tmp_path))
    model.fit(*batches(60), batch_size=BATCH, epochs=3, verbose=0, callbacks=[metrics])
    values, buckets = scalars(tmp_path)
    stats = embedding.cache_stats()
    # What an epoch has not sent goes out at its end, before callbacks: it is in the report.
    totals = {tag: sum(v for _, v in pairs) for tag, pairs in values.items()}
    for tag in ("misses", "rows_pushed", "evictions", "bytes_down"):
        assert totals[f"items/{tag}"] == stats[tag] > 0, tag
    assert totals["items/refreshes"] == stats["refreshes"]
    assert totals["items/bytes_pushes"] == stats["bytes_up_push"]
    assert totals["items/bytes_requests"] == stats["bytes_up"] - stats["bytes_up_push"] > 0
    assert [v for _, v in values["items/unsent_updates"]] == [0, 0, 0]
    missing = collections.Counter()
    for least, _, reads in buckets["items/reads_missing"]:
        missing[f"reads_missing_{least:.0f}"] += reads
    table = embedding.table.stats()
    assert missing == {n: v for n, v in table.items() if n.startswith("reads_missing_") and v}
    # Every hit is checked, but for those of rows that their servers watch; and rows that nobody
    # has updated yet are no reads of anything.
    checked = stats["hits"] - stats["checks_spared"]
    assert checked / 2 < missing.total() <= checked
    assert missing.keys() <= {"reads_missing_0", "reads_missing_1"}  # the read bound is 1


@pytest.mark.exhaustive
def test_cache_metrics_count_nothing_of_what_was_before(strategy, tmp_path):
    model, embedding = make_model(strategy, het_tf.CacheConfig(KEYS, staleness=2))
    model.fit(*batches(40), batch_size=BATCH, verbose=0)
    before, asked = embedding.cache_stats(), embedding.table.stats()
    assert before["misses"] > 0
    metrics = het_tf.keras.callbacks.CacheMetrics(str(tmp_path))
    model.fit(*batches(8), batch_size=BATCH, verbose=0, callbacks=[metrics])
    values, buckets = scalars(tmp_path)
    after, asked_after = embedding.cache_stats(), embedding.table.stats()
    for tag, counter in (("misses", "misses"), ("bytes_down", "bytes_down")):
        assert values[f"items/{tag}"] == [(8, after[counter] - before[counter])]
    reads = sum(asked_after[n] - asked[n] for n in asked if n.startswith("reads_missing_"))
    assert buckets["items/reads_missing"][:, 2].sum() == reads


@pytest.mark.exhaustive
def test_layers_of_one_name_are_told_apart(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def tower(name):
        ids = keras.Input((3,), dtype="int64")
        layer = het_tf.layers.HetEmbedding(4, cache=het_tf.CacheConfig(KEYS), name="items")
        return keras.Model(ids, keras.layers.Flatten()(layer(ids)), name=name), layer

    with strategy.scope():
        (one, first), (other, second) = tower("one"), tower("other")
        ids = keras.Input((3,), dtype="int64")
        product = keras.layers.Dot(1)([one(ids), other(ids // 8)])
        model = het_tf.keras.Model(ids, product)
        model.compile("sgd", "mse")
    said = []

    class Said(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            said.extend(top.read_all())

    metrics = het_tf.keras.callbacks.CacheMetrics(str(tmp_path))
    model.fit(*batches(20), batch_size=BATCH, epochs=2, verbose=0, callbacks=[metrics, Said()])
    values, _ = scalars(tmp_path)
    for tag, layer in (("items", first), ("items_2", second)):
        misses = values[f"{tag}/misses"]
        assert [step for step, _ in misses] == [20, 40]
        assert sum(value for _, value in misses) == layer.cache_stats()["misses"] > 0
        assert all(tag in status["caches"] and tag in status["shards"] for status in said)
    assert said
    assert first.cache_stats()["misses"] != second.cache_stats()["misses"]


@pytest.mark.exhaustive
def test_cache_metrics_have_what_is_unsent(strategy, tmp_path):
    model, embedding = make_model(strategy, het_tf.CacheConfig(KEYS, staleness=10**6))
    metrics = het_tf.keras.callbacks.CacheMetrics(str(tmp_path), update_freq=8)
    model.fit(*batches(32), batch_size=BATCH, verbose=0, callbacks=[metrics])
    unsent = [v for _, v in scalars(tmp_path)[0]["items/unsent_updates"]]
    # Nothing is sent before the end of the epoch, after the last batches were told.
    assert len(unsent) == 4
    assert 0 < unsent[0] < unsent[-1] == embedding.cache_stats()["updates"]


def test_every_counter_is_in_the_documentation(strategy):
    _, embedding = make_model(strategy, het_tf.CacheConfig(KEYS))
    documented = re.findall(r'"(\w+)"', het_tf.layers.HetEmbedding.cache_stats.__doc__)
    assert {*embedding.cache_stats()} == {*documented}


@pytest.mark.exhaustive
def test_cache_metrics_every_few_batches(strategy, tmp_path):
    model, _ = make_model(strategy, het_tf.CacheConfig(KEYS))
    strategy.dense_staleness = 4
    try:
        metrics = het_tf.keras.callbacks.CacheMetrics(str(tmp_path), update_freq=8)
        for _ in range(2):  # The second one has replicas of its own.
            model.fit(*batches(32), batch_size=BATCH, verbose=0, callbacks=[metrics])
    finally:
        strategy.dense_staleness = None
    values, _ = scalars(tmp_path)
    assert [step for step, _ in values["items/hit_rate"]] == [8, 16, 24, 32, 40, 48, 56, 64]
    first, second = (
        [value for step, value in values["dense/bytes_up"] if (step > 32) is later]
        for later in (False, True)
    )
    assert 0 < sum(first) < 2 * sum(second) < 4 * sum(first)


def test_cache_metrics_refuse_what_they_cannot_watch():
    with pytest.raises(ValueError, match="update_freq must be an integer"):
        het_tf.keras.callbacks.CacheMetrics(update_freq=0)
    model = het_tf.keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="CacheMetrics looks at the caches of HetEmbedding"):
        model.fit(
            np.ones((4, 2)), np.ones((4, 1)), callbacks=[het_tf.keras.callbacks.CacheMetrics()]
        )


@pytest.mark.exhaustive
def test_progress_bar_shows_hits_and_bytes_and_nothing_of_what_was_before(strategy, capsys):
    model, embedding = make_model(strategy, het_tf.CacheConfig(KEYS))
    history = model.fit(*batches(100), batch_size=BATCH, verbose=1).history
    out = capsys.readouterr().out
    assert "kB_per_step: " in out
    assert "hit_rate: " in out
    assert "kB_per_step" not in history
    figures = {"examples_per_s", "hit_rate", "MB_up_per_s", "MB_down_per_s", "waiting"}
    assert set(history) == {"loss"} | figures
    before = embedding.cache_stats()
    data = batches(4)
    model.fit(*data, batch_size=BATCH, verbose=1, validation_data=batches(50), epochs=2)
    shown = re.findall(r"kB_per_step: ([0-9.]+)", capsys.readouterr().out)
    of_a_step = (before["bytes_up"] + before["bytes_down"]) / 100 / 1000
    assert 0 < max(map(float, shown)) < 10 * of_a_step


class Top(keras.callbacks.Callback):
    """Runs `python -m het_tf.top --once` once all workers have trained, and ends training then."""

    def __init__(self, num_workers):
        super().__init__()
        self.num_workers = num_workers

    def on_train_batch_end(self, batch, logs=None):
        statuses = top.read_all()
        everyone = any(len(each["caches"]["items"]) == self.num_workers for each in statuses)
        if everyone and not self.model.stop_training:
            command = [sys.executable, "-m", "het_tf.top", "--once"]
            self.output = subprocess.check_output(command, text=True)
            self.model.stop_training = True


@pytest.mark.exhaustive
def test_top_shows_a_running_training(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model, _ = make_model(strategy, het_tf.CacheConfig(KEYS))
    model.compile("sgd", "mse", steps_per_execution=8)
    data = tf.data.Dataset.from_tensor_slices(batches(24)).batch(BATCH).repeat()
    top = Top(strategy.num_workers)
    model.fit(lambda: data, steps_per_epoch=10**6, verbose=0, callbacks=[top])
    lines = [line.split() for line in top.output.splitlines()]
    tasks = [line for line in lines if line[:1] in (["worker"], ["ps"])]
    assert len(tasks) == strategy.num_workers + strategy.num_ps
    assert all(line[-1] == "up" for line in tasks)
    items = [line for line in lines if line[:1] == ["items"]]
    workers = [line for line in items if len(line) == 12]
    assert {int(line[1]) for line in workers} == set(range(strategy.num_workers))
    assert all(int(line[2]) <= KEYS for line in workers)
    shards = [line for line in items if len(line) == 8]
    assert sum(int(line[2]) for line in shards) == KEYS
    assert all(float(line[6].replace(",", "")) > 0 for line in shards)  # checked a second
    assert not list((tmp_path / "het_tf").glob("*.json"))
    again = subprocess.run(
        [sys.executable, "-m", "het_tf.top", "--once"], capture_output=True, text=True
    )
    assert again.returncode == 1
    assert "Nothing is training" in again.stdout
    assert "waiting" not in again.stdout


class LiveTop(keras.callbacks.Callback):
    """Runs `python -m het_tf.top` on a terminal; training ends when three of its steps were shown.

    Use as a context manager.
    """

    def __init__(self):
        super().__init__()
        self.shown = ""

    def __enter__(self):
        self.terminal, top = pty.openpty()
        command = [sys.executable, "-m", "het_tf.top", "--interval", "0.2"]
        # In the background a shell has its jobs ignore SIGINT, and what they start would, too.
        heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        self.process = subprocess.Popen(
            command, stdout=top, stderr=subprocess.DEVNULL, preexec_fn=heed
        )
        os.close(top)
        os.set_blocking(self.terminal, False)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)

    def on_train_batch_end(self, batch, logs=None):
        steps = re.findall(r" step (\d+)/", self.read())
        if len({*steps}) >= 3 or self.process.poll() is not None:
            self.model.stop_training = True

    def read(self):
        with contextlib.suppress(BlockingIOError):
            self.shown += os.read(self.terminal, 1 << 20).decode()
        return self.shown


@pytest.mark.exhaustive
def test_top_draws_its_screen_anew(strategy, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model, _ = make_model(strategy, het_tf.CacheConfig(KEYS))
    data = tf.data.Dataset.from_tensor_slices(batches(24)).batch(BATCH).repeat()
    with LiveTop() as top:
        model.fit(lambda: data, steps_per_epoch=10**6, verbose=0, callbacks=[top])
        while "waiting" not in top.read():
            select.select([top.terminal], [], [])
        top.process.send_signal(signal.SIGINT)
        assert top.process.wait() == 0
    first, *screens = top.shown.split("\x1b[H\x1b[2J")
    assert first == ""
    training = [screen for screen in screens if model.name in screen]
    steps = [int(re.search(r" step (\d+)/1000000 ", screen)[1]) for screen in training]
    assert steps == sorted(steps)
    # Counts since the start; once training has said something else, what is counted in a second.
    rates = ["misses/s" in screen for screen in training]
    assert rates == [step != steps[0] for step in steps]
    for screen in training:
        assert len(re.findall(r"^(?:worker|ps) \d .* up\r?$", screen, re.MULTILINE)) == 5
    assert all("Nothing is training" in screen for screen in screens if screen not in training)
