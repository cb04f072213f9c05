"""Publishing while `fit` trains, in this process and on parameter servers."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import re
import struct
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from exactly_once_program import Minus
from small_models import id_dataset
from test_backup import Steps

import het_tf

BATCH, IDS = 8, 200


class Counted(keras.layers.Layer):
    """Counts the steps that train it."""

    def build(self, shape):
        self.number = self.add_weight(
            shape=(1,), dtype="int64", initializer="zeros", trainable=False, name="number"
        )

    def call(self, x, training=False):
        if training:
            self.number.assign_add([1])
        return x


def make_model(staleness: int | None) -> keras.Model:
    """Every example adds 1 to its row, every step 1 to a count."""
    ids = keras.Input((1,), dtype="int64")
    layer = het_tf.layers.HetEmbedding(
        1,
        embeddings_initializer="zeros",
        optimizer=het_tf.optimizers.SGD(1.0),
        cache=None if staleness is None else het_tf.CacheConfig(100, staleness=staleness),
    )
    model = het_tf.keras.Model(ids, Counted()(keras.layers.Flatten()(layer(ids))))
    model.compile(keras.optimizers.SGD(1 / BATCH), Minus(), steps_per_execution=2)
    return model


def examples(steps: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).zipf(1.2, (steps * BATCH, 1)) % IDS
    return x, np.zeros(len(x))


def wait_until(holds) -> None:
    waited = threading.Event()
    for _ in range(6000):
        if holds() or waited.wait(0.01):
            break
    assert holds()


class Files:
    """What the versions in a folder hold, read as they are written.

    Attributes:
      steps: of each version after the first, the steps that its variable counts, and its rows.
    """

    def __init__(self, publisher: het_tf.serving.Publisher, monkeypatch: pytest.MonkeyPatch):
        self.steps: list[tuple[float, float]] = []
        self._rows: dict[int, float] = {}
        finish = publisher._versions._finish
        variables = publisher._published_model.variables
        (self._number,) = [str(i) for i, v in enumerate(variables) if v.name == "number"]

        def finish_and_read(text: str, path: str) -> None:
            finish(text, path)
            self._read(pathlib.Path(path), text)

        monkeypatch.setattr(publisher._versions, "_finish", finish_and_read)

    def _read(self, manifest: pathlib.Path, text: str) -> None:
        if manifest.suffix == ".whole":
            self._rows.clear()
        for name in re.findall(r"rows \d+ (.*)", text):
            data = (manifest.parent / name).read_bytes()
            *_, count, _, _, _ = struct.unpack("<8s6I2Q2I", data[-56:])
            rows = np.frombuffer(data, [("key", "<i8"), ("value", "<f4")], count)
            self._rows.update(zip(rows["key"].tolist(), rows["value"].tolist(), strict=True))
        others = tf.train.load_checkpoint(str(manifest.with_suffix(".others")))
        self.steps.append(
            (float(others.get_tensor(self._number)[0]), sum(self._rows.values()) / BATCH)
        )


class AlwaysDue(keras.callbacks.Callback):
    """Has the callback publish after every step, and the thread not: timing makes no difference."""

    def __init__(self, publisher: het_tf.serving.Publisher):
        super().__init__()
        self._publisher = publisher

    def on_train_batch_end(self, batch, logs=None):
        self._publisher._next = 0.0

    def on_train_end(self, logs=None):
        self._publisher._next = time.monotonic() + 3600


class Paced(AlwaysDue):
    """Has at most about 10 steps made while a version is written."""

    def __init__(self, publisher: het_tf.serving.Publisher, steps: Steps):
        super().__init__(publisher)
        self._steps = steps

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if self._steps.made >= self._steps.cut + 10:
            wait_until(lambda: not self._publisher._writing.busy)


@pytest.fixture
def slow(monkeypatch) -> tuple[Steps, list[int]]:
    """Counts steps; rows are written when 7 more were made since they were cut, or fit ended.

    The second says how many they were.
    """
    steps, between = Steps(), []
    cut, save = het_tf.ops.table_cut_changed, het_tf.ops.table_save_rows

    def noted(*args, **kwargs):
        steps.cut = steps.made
        return cut(*args, **kwargs)

    def held(*args, **kwargs):
        if steps.made:  # the first version is there before fit
            between.append(steps.wait_for(7))
        return save(*args, **kwargs)

    monkeypatch.setattr(het_tf.ops, "table_cut_changed", noted)
    monkeypatch.setattr(het_tf.ops, "table_save_rows", held)
    return steps, between


@pytest.mark.parametrize("where", ["in one process", "on workers"])
def test_each_version_is_a_state_that_the_model_had(request, tmp_path, monkeypatch, slow, where):
    """Of which `fit` waits for the cut, and not for the files."""
    steps, between = slow
    scope, shards = contextlib.nullcontext(), 1
    if where != "in one process":
        strategy = request.getfixturevalue("strategy")
        monkeypatch.setattr(strategy, "dense_staleness", 4)
        scope, shards = strategy.scope(), strategy.num_ps
    with scope:
        model = make_model(3)
    with het_tf.serving.publish(model, tmp_path / "model", every="1h") as publisher:
        files = Files(publisher, monkeypatch)
        x, y = examples(80)
        callbacks = [steps, Paced(publisher, steps), publisher]
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        # The last one is there, too.
        assert publisher.version == len(files.steps)
        in_fit = list(files.steps)
        assert len(between) == shards * len(in_fit)
    # The last one was written when the only epoch had ended.
    assert len(in_fit) >= 5
    assert min(between[: shards * (len(in_fit) - 1)]) >= 7
    assert in_fit == [(n, n) for n, _ in in_fit]
    counted = [n for n, _ in in_fit]
    assert counted == sorted(set(counted))
    assert files.steps[-1] == (80, 80)


@pytest.mark.exhaustive
def test_what_is_published_in_fit_is_served(strategy, tmp_path):
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        embedding = het_tf.layers.HetEmbedding(
            4,
            optimizer=het_tf.optimizers.SGD(0.001),
            cache=het_tf.CacheConfig(capacity=1000, staleness=50),
            seed=3,
        )
        hidden = keras.layers.Flatten()(embedding(ids))
        model = het_tf.keras.Model(ids, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.001), "mse")
    numbers = np.arange(512) % 97
    dataset = id_dataset(numbers, 8).repeat()
    # A worker reads every third batch of 64, over and over: in 64 steps of its own it meets them
    # all, and one of the three makes that many of these.
    with het_tf.serving.publish(model, tmp_path / "model", every=0.001) as publisher:
        served = tf.saved_model.load(str(tmp_path / "model"))
        model.fit(dataset, epochs=1, steps_per_epoch=190, callbacks=[publisher], verbose=0)
        in_fit = publisher.version
    assert in_fit >= 1
    late = tf.saved_model.load(str(tmp_path / "model"))
    query = np.arange(200)[:, np.newaxis]
    expected = model.predict(query, verbose=0)
    for each in (served, late):
        wait_until(lambda each=each: int(each.freshness()["version"]) == publisher.version)
        assert each.freshness()["trouble"].numpy() == b""
        np.testing.assert_allclose(each.serve(query), expected, rtol=0, atol=1e-6)
    assert embedding.table.size() == 97


class After(keras.callbacks.Callback):
    """Calls something after the first step, once it holds."""

    def __init__(self, holds, call):
        super().__init__()
        self._holds, self._call = holds, call

    def on_train_batch_end(self, batch, logs=None):
        if self._call is not None:
            wait_until(self._holds)
            self._call()
            self._call = None


@pytest.mark.parametrize("removed", [True, False])
def test_what_keeps_a_version_from_being_written_is_logged_and_raised_at_the_end(
    tmp_path, monkeypatch, caplog, removed
):
    model = make_model(None)
    with het_tf.serving.publish(model, tmp_path / "model", every="1h") as publisher:
        files = Files(publisher, monkeypatch)
        name = f"000000000001.{publisher._versions.publisher}.0.0.rows"
        in_the_way = tmp_path / "model/assets.extra/het_tf" / name
        in_the_way.mkdir()
        begin = sorted(in_the_way.parent.iterdir())
        logged = After(
            lambda: "a version was not published" in caplog.text and str(in_the_way) in caplog.text,
            in_the_way.rmdir if removed else lambda: None,
        )
        x, y = examples(30)
        arguments = {"batch_size": BATCH, "verbose": 0}
        arguments |= {"callbacks": [AlwaysDue(publisher), publisher, logged]}
        with caplog.at_level(logging.WARNING, logger="absl"):
            if removed:
                model.fit(x, y, **arguments)
                assert publisher.version == len(files.steps) >= 1
            else:
                with pytest.raises(tf.errors.OpError, match=re.escape(str(in_the_way))):
                    model.fit(x, y, **arguments)
                assert publisher.version == 0
                assert sorted(in_the_way.parent.iterdir()) == begin
                in_the_way.rmdir()
    assert [n for n, _ in files.steps] == [n for _, n in files.steps]
    assert files.steps[-1] == (30, 30)


def test_fit_does_not_wait_for_a_checkpoint_to_publish(tmp_path, monkeypatch):
    """Whose rows a version would wait for."""
    written, save = threading.Event(), het_tf.ops.table_save

    def held(*args, **kwargs):
        assert written.wait(60)
        return save(*args, **kwargs)

    monkeypatch.setattr(het_tf.ops, "table_save", held)
    model = make_model(None)
    with het_tf.serving.publish(model, tmp_path / "model", every="1h") as publisher:
        files = Files(publisher, monkeypatch)
        manager = het_tf.checkpoint.Manager(tf.train.Checkpoint(model=model), tmp_path / "managed")
        manager.save()
        x, y = examples(20)
        callbacks = [AlwaysDue(publisher), publisher]
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
        assert publisher.version == 0
        written.set()
        manager.wait()
    assert files.steps[-1] == (20, 20)
