"""Models that are served with our ops: rows in files that are mapped, and versions that follow."""

import logging
import pathlib
import re
import shutil
import struct
import threading
import time

import keras
import numpy as np
import program_runner
import pytest
import tensorflow as tf

import het_tf

ASK = """
import sys, numpy as np, tensorflow as tf
tf.load_op_library(sys.argv[1])
model = tf.saved_model.load(sys.argv[2])
outputs = model.signatures["serving_default"](ids=tf.constant(np.load(sys.argv[3])))
np.save(sys.argv[4], outputs["output_0"].numpy())
assert "het_tf" not in sys.modules
"""

KNOWN = np.random.default_rng(0).integers(-50, 50, (300, 3))
UNKNOWN = np.array([[1000, -(2**63), 2**63 - 1], [2**53 + 1, 2**31, -1000]])


def trained_model() -> keras.Model:
    ids = keras.Input((3,), dtype="int64", name="ids")
    embedding = het_tf.layers.HetEmbedding(6, optimizer=het_tf.optimizers.Adam(0.05), seed=-5)
    pooled = het_tf.layers.HetEmbedding(3, seed=7, combiner="mean", padding_id=0)
    joined = [keras.layers.Flatten()(embedding(ids)), pooled(ids)]
    hidden = keras.layers.Dense(2, activation="tanh")(keras.layers.Concatenate()(joined))
    model = het_tf.keras.Model(ids, hidden)
    model.compile("adam", "mse")
    model.fit(KNOWN, KNOWN[:, :2] % 2, verbose=0)
    return model


@pytest.fixture(scope="module")
def model() -> keras.Model:
    """A trained model. Tests may train it on."""
    return trained_model()


class Counter:
    """A model of two tables and a variable that all say the same number."""

    def __init__(self, rows: int, dim: int = 5):
        self.keys = np.arange(rows)
        self.dim = dim
        ids = keras.Input((None,), dtype="int64", name="ids")
        layers = [het_tf.layers.HetEmbedding(dim, seed=i, name=f"table_{i}") for i in range(2)]
        self.bias = Bias()
        self.model = het_tf.keras.Model(ids, [*(layer(ids) for layer in layers), self.bias(ids)])
        self.tables = [layer.table for layer in layers]
        self.set(0, self.keys)

    def set(self, number: int, keys: np.ndarray) -> None:
        for table in self.tables:
            table.assign(keys, np.full((len(keys), self.dim), number, np.float32))
        self.bias.number.assign([number])


class Bias(keras.layers.Layer):
    def build(self, shape):
        self.number = self.add_weight(shape=(1,), initializer="zeros", name="number")

    def call(self, ids):
        return self.number + 0.0 * keras.ops.cast(ids[:, :1], "float32")


def wait_until(holds) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def version_of(served) -> int:
    return int(served.freshness()["version"])


def test_predictions_are_those_of_the_model_also_after_it_was_moved(model, tmp_path):
    het_tf.serving.export_mapped(model, tmp_path / "model")
    assert het_tf.serving.verify(tmp_path / "model") == 2
    expected = [(tf.constant(ids), model.predict(ids, verbose=0)) for ids in (KNOWN, UNKNOWN)]
    served = tf.saved_model.load(str(tmp_path / "model"))
    (tmp_path / "model").rename(tmp_path / "moved")
    again = tf.saved_model.load(str(tmp_path / "moved"))
    for loaded in (served, again):
        for ids, of_model in expected:
            np.testing.assert_allclose(loaded.serve(ids), of_model, rtol=0, atol=1e-6)
    status = served.freshness()
    assert int(status["version"]) == 0
    assert status["trouble"].numpy() == b""
    assert 0 <= float(status["age_seconds"]) < 600
    del loaded, again
    for ids, of_model in expected:
        np.testing.assert_allclose(served.serve(ids), of_model, rtol=0, atol=1e-6)


@pytest.mark.exhaustive
def test_a_program_that_has_only_the_ops_serves_it(model, tmp_path):
    het_tf.serving.export_mapped(model, tmp_path / "model")
    ids = np.concatenate([KNOWN[:5], UNKNOWN])
    np.save(tmp_path / "ids.npy", ids)
    (tmp_path / "ask.py").write_text(ASK)
    paths = [het_tf.ops.LIBRARY, *(tmp_path / x for x in ("model", "ids.npy", "answer.npy"))]
    ended = program_runner.run(tmp_path / "ask.py", *map(str, paths), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    expected = model.predict(ids, verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "answer.npy"), expected, rtol=0, atol=1e-6)


def test_a_session_of_tensorflow_1_serves_it_as_tensorflow_serving_does(model, tmp_path):
    het_tf.serving.export_mapped(model, tmp_path / "model")
    expected = [(ids, model.predict(ids, verbose=0)) for ids in (KNOWN, UNKNOWN)]
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "model"))
        signature = loaded.signature_def["serving_default"]
        (fed,), (fetched,) = signature.inputs.values(), signature.outputs.values()
        for ids, of_model in expected:
            actual = session.run(fetched.name, {fed.name: ids})
            np.testing.assert_allclose(actual, of_model, rtol=0, atol=1e-6)


def test_stored_rows_are_as_near_as_the_documentation_says(tmp_path, subtests):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2000, 7)) * 10.0 ** rng.integers(-9, 4, (2000, 1))
    values = np.vstack([np.zeros((1, 7)), values]).astype(np.float32)
    ids = keras.Input((None,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(7, seed=3)
    model = het_tf.keras.Model(ids, embedding(ids))
    embedding.table.assign(np.arange(2001), values)
    bounds = {
        "float16": np.maximum(np.abs(values) * 2.0**-11, 2.0**-25),
        "int8": np.abs(values).max(axis=1, keepdims=True) / 254 * (1 + 1e-6) * np.ones(7),
    }
    for rows, bound in bounds.items():
        het_tf.serving.export_mapped(model, tmp_path / rows, rows=rows)
        served = tf.saved_model.load(str(tmp_path / rows))
        actual = served.serve(np.arange(2001)[np.newaxis]).numpy()[0]
        with subtests.test(rows):
            assert (np.abs(actual - values) <= bound).all()
            assert (actual != values).any()


def test_what_changes_is_served_without_loading_again(model, tmp_path):
    with het_tf.serving.publish(model, tmp_path / "model", every="1h") as publisher:
        served = tf.saved_model.load(str(tmp_path / "model"))
        before = model.predict(KNOWN, verbose=0)
        np.testing.assert_allclose(served.serve(tf.constant(KNOWN)), before, rtol=0, atol=1e-6)
        for step in range(1, 4):
            model.fit(KNOWN[:20] + 100 * step, KNOWN[:20, :2] % 2, verbose=0)  # new rows, too
            assert publisher.publish() == step
            wait_until(lambda step=step: version_of(served) == step)
            for ids in (KNOWN, KNOWN + 100 * step):
                expected = model.predict(ids, verbose=0)
                np.testing.assert_allclose(
                    served.serve(tf.constant(ids)), expected, rtol=0, atol=1e-6
                )
    assert publisher.version == 4
    # Whoever loads it now has all of it.
    late = tf.saved_model.load(str(tmp_path / "model"))
    wait_until(lambda: version_of(late) == 4)
    expected = model.predict(KNOWN, verbose=0)
    np.testing.assert_allclose(late.serve(tf.constant(KNOWN)), expected, rtol=0, atol=1e-6)


def test_a_delta_takes_the_bytes_of_the_rows_that_changed(tmp_path):
    counter = Counter(20_000, dim=32)
    with het_tf.serving.publish(counter.model, tmp_path / "model", every="1h") as publisher:
        counter.set(1, counter.keys[:200])
        publisher.publish()
        files = sorted((tmp_path / "model/assets.extra/het_tf").glob("*.0.0.rows"))
        whole, delta = [file.stat().st_size for file in files]
    assert delta < 0.02 * whole


@pytest.mark.parametrize("deltas", [40, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_deltas_are_never_torn_nor_go_back(tmp_path, deltas):
    counter = Counter(400)
    with het_tf.serving.publish(counter.model, tmp_path / "model", every="1h") as publisher:
        served = tf.saved_model.load(str(tmp_path / "model"))
        done = threading.Event()
        troubles: list[str] = []
        seen: set[float] = set()
        # Each key is in every version; what is asked is whole batches of them.
        query = tf.constant(counter.keys[np.newaxis, :8])

        def read() -> None:
            last = -1.0
            while not done.is_set():
                values = np.concatenate([x.numpy().ravel() for x in served.serve(query)])
                if (values != values[0]).any() or values[0] < last:
                    troubles.append(f"{values} after {last}")
                    return
                last = values[0]
                seen.add(float(last))
                time.sleep(0.001)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for number in range(1, deltas + 1):
            counter.set(number, counter.keys[:8])
            publisher.publish()
            if number % 10 == 0:
                wait_until(lambda number=number: float(number) in seen or troubles)
        assert version_of(served) == deltas
        done.set()
        for reader in readers:
            reader.join()
        assert troubles == []


def test_damage_is_named_and_what_is_served_goes_on(tmp_path):
    counter = Counter(1000)
    written, folder = (tmp_path / x / "assets.extra/het_tf" for x in ("written", "model"))
    with het_tf.serving.publish(counter.model, tmp_path / "written", every="1h") as publisher:
        shutil.copytree(tmp_path / "written", tmp_path / "model")
        served = tf.saved_model.load(str(tmp_path / "model"))
        counter.set(1, counter.keys[:10])
        publisher.publish()
        # The manifest comes last, when a file that it names is damaged already.
        files = sorted(written.glob("000000000001.*"), key=lambda file: file.suffix == ".delta")
        for file in files[:-1]:
            shutil.copy(file, folder)
        (rows,) = folder.glob("000000000001.*.1.0.rows")
        good = rows.read_bytes()
        bad = bytearray(good)
        bad[20] ^= 1
        rows.write_bytes(bad)
        shutil.copy(files[-1], folder / "copy")
        (folder / "copy").rename(folder / files[-1].name)
        wait_until(lambda: served.freshness()["trouble"].numpy())
        trouble = served.freshness()["trouble"].numpy().decode()
        assert f"{rows}: damaged between bytes 0 and" in trouble
        with pytest.raises(ValueError, match=rf"{rows}: damaged between bytes 0 and"):
            het_tf.serving.verify(tmp_path / "model")
        assert version_of(served) == 0
        assert (served.serve(counter.keys[np.newaxis, :8])[0].numpy() == 0).all()
        rows.unlink()
        rows.write_bytes(good)
        wait_until(lambda: version_of(served) == 1)
        assert served.freshness()["trouble"].numpy() == b""


def _cut_off(file: pathlib.Path) -> None:
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[: len(content) // 2])


def _lie(file: pathlib.Path) -> None:
    content = bytearray(file.read_bytes())
    content[-24:-16] = struct.pack("<Q", 10**9)
    file.unlink()
    file.write_bytes(content)


def test_a_damaged_model_is_not_loaded(tmp_path, subtests):
    het_tf.serving.export_mapped(Counter(100).model, tmp_path / "model")
    for number, (pattern, damage, message) in enumerate(
        [
            ("*.rows", _cut_off, r"0\.0\.rows: is no file of rows, or its end is missing"),
            ("*.rows", _lie, r"0\.0\.rows: its footer is damaged"),
            ("*.rows", pathlib.Path.unlink, r"0\.0\.rows: cannot be opened"),
            ("*.whole", _cut_off, r"000000000000\.\w+\.whole: has no checksum"),
            ("*.whole", pathlib.Path.unlink, r"het_tf: there is no whole version"),
            ("*.others.index", _cut_off, r"000000000000\.\w+\.others: "),
        ]
    ):
        copy = shutil.copytree(tmp_path / "model", tmp_path / str(number))
        damage(min((copy / "assets.extra/het_tf").glob(pattern)))
        with subtests.test(message), pytest.raises(tf.errors.OpError, match=message):
            tf.saved_model.load(str(copy))


def test_a_program_that_comes_back_goes_on_with_a_whole_version(tmp_path):
    counter = Counter(1000)
    with het_tf.serving.publish(counter.model, tmp_path / "model", every="1h"):
        served = tf.saved_model.load(str(tmp_path / "model"))
    again = Counter(1000)
    again.set(5, again.keys[:10])
    with pytest.raises(ValueError, match="holds another model"):
        het_tf.serving.publish(Counter(10, dim=3).model, tmp_path / "model")
    with het_tf.serving.publish(again.model, tmp_path / "model", every="1h") as publisher:
        assert publisher.version == 2  # closing published one
        wait_until(lambda: version_of(served) == 2)
        again.set(6, again.keys[:10])
        publisher.publish()
        wait_until(lambda: version_of(served) == 3)
        np.testing.assert_array_equal(served.serve(again.keys[np.newaxis, :1])[0][0, 0], [6] * 5)


RETURNING = """
import sys, keras, het_tf

def make(activation="tanh", words=("a", "b"), input_dim=50, seed=1, sizes=(10, 10), second=True):
    text = keras.Input((1,), dtype="string")
    ids = keras.Input((3,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(input_dim, 4, seed=seed)
    other = het_tf.layers.HetEmbedding(4, seed=2, combiner="sum")
    tables = [
        het_tf.layers.TableConfig(name, size, 4, "normal", "sgd", "sum")
        for name, size in zip(("item", "user"), sizes)
    ]
    features = [het_tf.layers.FeatureConfig(table.name, table) for table in tables]
    collection = het_tf.layers.HetEmbeddingCollection(features, seed=3)([ids, ids])
    looked_up = other(keras.layers.StringLookup(vocabulary=list(words))(text))
    flat = keras.layers.Flatten()(embedding(ids))
    outputs = keras.layers.Dense(1, activation)(keras.layers.Concatenate()([flat, looked_up]))
    return keras.Model([text, ids], [outputs, collection[0], collection[1]])

def publish(model, path):
    het_tf.serving.publish(model, path, every="1h").close()

if __name__ == "__main__":
    make()
    publish(make(), sys.argv[1])
"""


@pytest.mark.exhaustive
def test_a_folder_is_continued_by_its_model_and_others_are_told_what_differs(tmp_path):
    program: dict = {"__name__": "returning"}
    exec(RETURNING, program)
    make, publish, path = program["make"], program["publish"], str(tmp_path / "model")
    model = make()
    publish(model, path)
    publish(make(), path)
    model.save(tmp_path / "saved.keras")
    publish(keras.models.load_model(tmp_path / "saved.keras"), path)
    (tmp_path / "returning.py").write_text(RETURNING)
    ended = program_runner.run(tmp_path / "returning.py", path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    served = tf.saved_model.load(path)
    assert version_of(served) == 7
    for arguments, message in (
        ({"activation": "sigmoid"}, "what it computes, in .*dense"),
        ({"words": ("b", "a")}, "its lookup tables"),
        ({"input_dim": 60}, "what it computes, in .*het_embedding"),
        ({"sizes": (20, 10)}, "what it computes, in .*het_embedding_collection"),
        ({"seed": None}, r"seeds of layer het_embedding\w* = 1 there, \d+ here; give the layer"),
    ):
        with pytest.raises(ValueError, match="holds another model: " + message):
            publish(make(**arguments), path)
    assert version_of(tf.saved_model.load(path)) == 7


class Scaled(keras.Model):
    """A model whose config says nothing."""

    def __init__(self, factor, power):
        super().__init__()
        self.embedding = het_tf.layers.HetEmbedding(4, seed=1)
        self.factor, self.power = tf.constant(factor), power

    def call(self, ids):
        return self.factor * self.embedding(ids) ** self.power


def test_a_subclassed_model_is_known_by_what_it_computes(tmp_path):
    def publish(*arguments):
        model = Scaled(*arguments)
        model(KNOWN)
        signature = [tf.TensorSpec([None, 3], tf.int64, name="ids")]
        het_tf.serving.publish(model, tmp_path / "model", "1h", signature).close()

    publish(2.0, 2)
    publish(2.0, 2)
    with pytest.raises(ValueError, match="another model: what it computes"):
        publish(2.0, 3)
    with pytest.raises(ValueError, match=r"another model: (its constants|what it computes)"):
        publish(3.0, 2)


def test_a_text_that_ends_with_a_number_is_no_drawn_name(tmp_path):
    class Segment(het_tf.keras.Model):
        def __init__(self, text):
            super().__init__()
            self.text, self.rows = text, het_tf.layers.HetEmbedding(1, seed=1)

        def call(self, texts):
            ids = tf.cast(tf.equal(texts, self.text), tf.int64)
            return self.rows(ids)

    def publish(text):
        model = Segment(text)
        model(tf.constant(["seg_1"]))
        signature = [tf.TensorSpec([None], tf.string, name="texts")]
        het_tf.serving.publish(model, tmp_path / "model", "1h", signature).close()

    publish("seg_1")
    publish("seg_1")
    with pytest.raises(ValueError, match="another model: what it computes"):
        publish("seg_2")


def test_what_is_replaced_is_published_whole_and_old_files_go(tmp_path):
    counter = Counter(100)
    folder = tmp_path / "model/assets.extra/het_tf"
    with het_tf.serving.publish(counter.model, tmp_path / "model", every="1h") as publisher:
        served = tf.saved_model.load(str(tmp_path / "model"))
        for number in range(1, 8):
            for table in counter.tables:
                table.clear()
            counter.set(number, counter.keys[:10])
            publisher.publish()
        wait_until(lambda: version_of(served) == 7)
        answer = served.serve(counter.keys[np.newaxis])[0][0].numpy()
        expected = counter.tables[0].lookup(counter.keys)
        np.testing.assert_array_equal(answer, expected)
        assert (answer[:10] == 7).all()
        assert (answer[10:] != 7).all()
        names = sorted(file.name for file in folder.glob("*.whole"))
        assert [name[:12] for name in names] == ["000000000006", "000000000007"]


@pytest.mark.exhaustive
def test_old_files_go_however_little_changes(tmp_path):
    counter = Counter(1000)
    folder = tmp_path / "model/assets.extra/het_tf"
    with het_tf.serving.publish(
        counter.model, tmp_path / "model", every="1h", full_every=5
    ) as publisher:
        served = tf.saved_model.load(str(tmp_path / "model"))
        files = []
        for number in range(1, 23):
            counter.set(number, counter.keys[:1])
            publisher.publish()
            files.append(len(list(folder.iterdir())))
        assert max(files[11:]) == max(files[:11])
        wholes = sorted(int(file.name[:12]) for file in folder.glob("*.whole"))
        assert wholes == [15, 20]
        wait_until(lambda: version_of(served) == 22)
        assert served.serve(counter.keys[np.newaxis, :1])[0].numpy().ravel()[0] == 22
        late = tf.saved_model.load(str(tmp_path / "model"))
        wait_until(lambda: version_of(late) == 22)
    with pytest.raises(ValueError, match=r"full_every must be an integer from 1 .* not 0"):
        het_tf.serving.publish(counter.model, tmp_path / "model", full_every=0)


def test_bad_intervals_are_named(tmp_path):
    model = Counter(3).model
    for every in ("soon", "60", 0, float("nan"), "-1s", None):
        with pytest.raises(ValueError, match="every must be a number"):
            het_tf.serving.publish(model, tmp_path / "model", every=every)


def test_rows_are_mapped_from_no_url(model):
    """Which is said before anything is written."""
    for path in ("ram://mapped", "file:///tmp/mapped"):
        for write in (het_tf.serving.export_mapped, het_tf.serving.publish):
            message = f"of the operating system: '{path}' must be a folder of it"
            with pytest.raises(ValueError, match=message):
                write(model, path)
        assert not tf.io.gfile.exists(path)


@pytest.mark.exhaustive
def test_checkpoints_and_versions_wait_for_one_another(tmp_path):
    counter = Counter(20_000)
    with het_tf.serving.publish(counter.model, tmp_path / "model", every=0.001) as publisher:
        for number in range(1, 11):
            counter.set(number, counter.keys[:50])
            tf.train.Checkpoint(model=counter.model).write(str(tmp_path / "checkpoint"))
            publisher.publish()


def expiring() -> tuple[keras.Model, het_tf.layers.HetEmbedding]:
    """A model whose rows, 4 wide, expire at the age of 2, and its layer."""
    ids = keras.Input((None,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(
        4, seed=3, expiry=het_tf.Expiry(age=2, time="given"), optimizer=het_tf.optimizers.SGD(0.1)
    )
    return het_tf.keras.Model(ids, embedding(ids)), embedding


class During(keras.callbacks.Callback):
    """Calls something once, where a validation or a step is under way."""

    def __init__(self, validation: bool, call):
        super().__init__()
        self._validation, self._call = validation, call
        self.calls = 0

    def _once(self, here: bool) -> None:
        if here and self.calls == 0:
            self.calls = 1
            self._call()

    def on_test_batch_end(self, batch, logs=None):
        self._once(self._validation)

    def on_train_batch_end(self, batch, logs=None):
        self._once(not self._validation)


@pytest.mark.exhaustive
def test_versions_come_while_fit_validates(model, tmp_path):
    with het_tf.serving.publish(model, tmp_path / "model", every=0.01) as publisher:

        def wait_for_two() -> None:
            before = publisher.version
            wait_until(lambda: publisher.version >= before + 2)

        during = During(True, wait_for_two)
        data = (KNOWN, KNOWN[:, :2] % 2)
        model.fit(*data, validation_data=data, callbacks=[publisher, during], verbose=0)
        assert during.calls == 1


def test_versions_come_after_a_fit_that_ended_by_an_exception(model, tmp_path):

    def interrupt() -> None:
        raise KeyboardInterrupt

    with het_tf.serving.publish(model, tmp_path / "model", every=0.01) as publisher:
        callbacks = [publisher, During(False, interrupt)]
        with pytest.raises(KeyboardInterrupt):
            model.fit(KNOWN, KNOWN[:, :2] % 2, callbacks=callbacks, verbose=0)
        before = publisher.version
        wait_until(lambda: publisher.version >= before + 2)


def test_rows_that_expire_are_served_as_their_initial_value(tmp_path):
    model, embedding = expiring()
    keys = np.arange(100)
    initial = embedding.table.lookup(keys)
    embedding.table.expire(10)
    embedding.table.assign(keys, np.ones((100, 4), np.float32))
    with het_tf.serving.publish(model, tmp_path / "model", every="1h") as publisher:
        served = tf.saved_model.load(str(tmp_path / "model"))
        embedding.table.expire(11)
        embedding.table.assign(keys[:60], np.full((60, 4), 2, np.float32))
        assert embedding.table.expire(12) == 40
        embedding.table.assign(keys[95:], np.full((5, 4), 3, np.float32))  # have one again
        publisher.publish()
        wait_until(lambda: version_of(served) == 1)
        answer = served.serve(keys[np.newaxis]).numpy()[0]
    np.testing.assert_array_equal(answer[:60], np.full((60, 4), 2))
    np.testing.assert_array_equal(answer[60:95], initial[60:95])
    np.testing.assert_array_equal(answer[95:], np.full((5, 4), 3))


def test_a_row_that_falls_under_the_filter_is_served_as_its_initial_value(tmp_path):
    model, embedding = expiring()
    keys = np.arange(100)
    initial = embedding.table.lookup(keys)

    def set_rows(keys, value, clock):
        clocks = np.full(len(keys), clock)
        values, slots = np.full((len(keys), 4), value, np.float32), np.zeros((len(keys), 0))
        embedding.table.import_(het_tf.TableExport(keys, values, slots.astype("f4"), clocks))

    embedding.table.expire(10)
    set_rows(keys, 1, clock=3)
    with het_tf.serving.publish(model, tmp_path / "model", every="1h", min_updates=3) as publisher:
        served = tf.saved_model.load(str(tmp_path / "model"))
        embedding.table.expire(11)
        set_rows(keys[:60], 2, clock=4)
        assert embedding.table.expire(12) == 40
        # These have a row again, of fewer updates: never published, as well as published.
        set_rows(keys[90:], 3, clock=1)
        embedding.table.assign(keys[:5], np.full((5, 4), 3, np.float32))
        publisher.publish()
        wait_until(lambda: version_of(served) == 1)
        answer = served.serve(keys[np.newaxis]).numpy()[0]
        np.testing.assert_array_equal(answer[5:60], np.full((55, 4), 2))
        np.testing.assert_array_equal(answer[60:], initial[60:])
        np.testing.assert_array_equal(answer[:5], initial[:5])
        set_rows(keys[:5], 4, clock=5)
        publisher.publish()
        wait_until(lambda: version_of(served) == 2)
        np.testing.assert_array_equal(served.serve(keys[np.newaxis]).numpy()[0, :5], 4)


def test_rows_that_were_not_updated_for_long_leave_with_the_next_whole_version(tmp_path):
    ids = keras.Input((None,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(
        4, seed=3, expiry=het_tf.Expiry(age=9, time="given"), optimizer=het_tf.optimizers.SGD(0.1)
    )
    model = het_tf.keras.Model(ids, embedding(ids))
    keys = np.arange(100)
    expected = embedding.table.lookup(keys)

    def set_rows(keys, value, now):
        embedding.table.expire(now)
        embedding.table.assign(keys, np.full((len(keys), 4), value, np.float32))

    set_rows(keys[:10], 1, now=10)
    set_rows(keys[10:], 2, now=13)
    with het_tf.serving.publish(model, tmp_path / "model", every="1h", max_age=2) as publisher:
        served = tf.saved_model.load(str(tmp_path / "model"))
        expected[10:] = 2
        np.testing.assert_array_equal(served.serve(keys[np.newaxis])[0], expected)
        # These change, and are old before they are published.
        set_rows(keys[5:15], 3, now=14)
        embedding.table.expire(17)
        publisher.publish()
        wait_until(lambda: version_of(served) == 1)
        expected[5:15] = 3
        np.testing.assert_array_equal(served.serve(keys[np.newaxis])[0], expected)
        assert int(served.freshness()["changed_rows"]) == 10
        # Half of the rows change: a whole version, without the others.
        set_rows(keys[50:], 4, now=17)
        publisher.publish()
        set_rows(keys[:1], 5, now=17)
        publisher.publish()
        wait_until(lambda: version_of(served) == 3)
        expected[:50] = het_tf.layers.HetEmbedding(4, seed=3)(keys[:50])
        expected[50:], expected[0] = 4, 5
        np.testing.assert_array_equal(served.serve(keys[np.newaxis])[0], expected)


def test_a_version_that_cannot_be_written_leaves_no_file_and_comes_with_the_next(tmp_path):
    counter = Counter(1000)
    folder = tmp_path / "model/assets.extra/het_tf"
    with het_tf.serving.publish(counter.model, tmp_path / "model", every="1h") as publisher:
        served = tf.saved_model.load(str(tmp_path / "model"))
        before = sorted(folder.iterdir())
        counter.set(1, counter.keys[:10])
        in_the_way = folder / f"000000000001.{publisher_in(folder)}.1.0.rows"
        in_the_way.mkdir()
        for _ in range(2):
            with pytest.raises(tf.errors.OpError, match=re.escape(str(in_the_way))):
                publisher.publish()
        in_the_way.rmdir()
        assert sorted(folder.iterdir()) == before
        counter.set(1, counter.keys[10:20])
        assert publisher.publish() == 1
        wait_until(lambda: version_of(served) == 1)
        for answer in served.serve(counter.keys[np.newaxis, :20])[:2]:
            assert (answer.numpy() == 1).all()
        assert int(served.freshness()["changed_rows"]) == 40


def publisher_in(folder: pathlib.Path) -> str:
    """What the names of files have of the publisher that wrote version 0."""
    (whole,) = folder.glob("000000000000.*.whole")
    return whole.name.split(".")[1]


def contents_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def values_of(served, counter: Counter) -> list[float]:
    """The first column of the first table."""
    return served.serve(counter.keys[np.newaxis])[0][0, :, 0].numpy().tolist()


def test_the_last_of_two_publishers_goes_on_and_the_other_says_so(tmp_path):
    counter = Counter(100)
    folder = tmp_path / "model/assets.extra/het_tf"
    first = het_tf.serving.publish(counter.model, tmp_path / "model", every="1h")
    served = tf.saved_model.load(str(tmp_path / "model"))
    counter.set(1, counter.keys[:10])
    second = het_tf.serving.publish(counter.model, tmp_path / "model", every="1h")
    wait_until(lambda: version_of(served) == 1)
    (whole,) = folder.glob("000000000001.*.whole")
    before = contents_of(folder)
    counter.set(2, counter.keys[:5])
    message = f"{folder}: another publisher writes into it: {whole.name}"
    for call in (first.publish, first.publish, first.close):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            call()
    first.close()
    assert contents_of(folder) == before
    assert values_of(served, counter) == [1] * 10 + [0] * 90
    assert second.publish() == 2
    second.close()
    late = tf.saved_model.load(str(tmp_path / "model"))
    for each in (served, late):
        wait_until(lambda each=each: version_of(each) == 3)
        assert each.freshness()["trouble"].numpy() == b""
        assert values_of(each, counter) == [2] * 5 + [1] * 5 + [0] * 90


def test_the_thread_of_a_publisher_that_is_not_the_last_logs_it_and_ends(model, tmp_path, caplog):
    with caplog.at_level(logging.ERROR, logger="absl"):
        first = het_tf.serving.publish(model, tmp_path / "model", every=0.01)
        second = het_tf.serving.publish(model, tmp_path / "model", every="1h")
        wait_until(lambda: "publishing has ended" in caplog.text)
        # What trains goes on, whichever of them it has.
        model.fit(KNOWN[:20], KNOWN[:20, :2] % 2, callbacks=[first, second], verbose=0)
        with pytest.raises(RuntimeError, match="another publisher"):
            first.close()
    assert caplog.text.count("publishing has ended") == 1
    second.close()


def test_a_publisher_that_comes_while_another_writes_is_the_last(tmp_path, monkeypatch):
    counter = Counter(100)
    folder = tmp_path / "model/assets.extra/het_tf"
    first = het_tf.serving.publish(counter.model, tmp_path / "model", every="1h")
    served = tf.saved_model.load(str(tmp_path / "model"))
    second: list = []
    save = tf.raw_ops.SaveV2

    def come(**arguments) -> None:
        save(**arguments)
        monkeypatch.undo()
        second.append(het_tf.serving.publish(counter.model, tmp_path / "model", every="1h"))

    monkeypatch.setattr(tf.raw_ops, "SaveV2", come)
    counter.set(1, counter.keys[:10])
    with pytest.raises(RuntimeError, match="another publisher"):
        first.publish()
    assert second[0].version == 2  # the files of 1 were there
    assert not list(folder.glob("000000000001.*"))
    wait_until(lambda: version_of(served) == 2)
    assert values_of(served, counter) == [1] * 10 + [0] * 90
    second[0].close()
    with pytest.raises(RuntimeError, match="another publisher"):
        first.close()


def test_a_publisher_that_cannot_begin_leaves_the_folder_to_the_other(tmp_path, monkeypatch):
    counter = Counter(100)
    folder = tmp_path / "model/assets.extra/het_tf"
    with het_tf.serving.publish(counter.model, tmp_path / "model", every="1h") as publisher:
        before = contents_of(folder)
        begun = []

        def fail(*args, **kwargs):
            begun.extend(folder.glob("000000000001.*.begun"))
            raise tf.errors.ResourceExhaustedError(None, None, "full")

        with monkeypatch.context() as patch:
            patch.setattr(het_tf.ops, "table_save_rows", fail)
            with pytest.raises(tf.errors.ResourceExhaustedError, match="full"):
                het_tf.serving.publish(counter.model, tmp_path / "model", every="1h")
        assert begun  # had the other one written now, it would have ended
        assert contents_of(folder) == before
        counter.set(1, counter.keys[:10])
        assert publisher.publish() == 1
    assert not list(folder.glob("*.begun"))


def test_a_version_is_never_written_over_another(tmp_path):
    counter = Counter(100)
    folder = tmp_path / "model/assets.extra/het_tf"
    with het_tf.serving.publish(counter.model, tmp_path / "model", every="1h") as publisher:
        counter.set(1, counter.keys[:10])
        there = folder / f"000000000001.{publisher_in(folder)}.delta"
        there.write_text("is there")
        with pytest.raises(tf.errors.AlreadyExistsError, match=there.name):
            publisher.publish()
        assert publisher.publish() == 1


@pytest.mark.exhaustive
def test_a_folder_that_is_begun_anew_is_served_from_its_first_version(tmp_path):
    counter = Counter(100)
    folder = tmp_path / "model/assets.extra/het_tf"
    old = het_tf.serving.publish(counter.model, tmp_path / "model", every="1h")
    served = tf.saved_model.load(str(tmp_path / "model"))
    for number in range(1, 4):
        counter.set(number, counter.keys[:10])
        old.publish()
    wait_until(lambda: version_of(served) == 3)
    shutil.rmtree(tmp_path / "model")
    wait_until(lambda: served.freshness()["trouble"].numpy())
    again = Counter(100)
    again.set(9, again.keys[5:8])
    with het_tf.serving.publish(again.model, tmp_path / "model", every="1h") as publisher:
        wait_until(lambda: version_of(served) == 0)
        assert served.freshness()["trouble"].numpy() == b""
        assert values_of(served, counter) == [0] * 5 + [9] * 3 + [0] * 92
        counter.set(4, counter.keys[:10])
        with pytest.raises(RuntimeError, match=rf"{folder}: it was begun anew, or emptied: "):
            old.publish()
        for number in range(1, 6):  # beyond the old ones
            again.set(10 + number, again.keys[:1])
            assert publisher.publish() == number
            wait_until(lambda number=number: version_of(served) == number)
            assert values_of(served, counter) == [10 + number] + [0] * 4 + [9] * 3 + [0] * 92
    with pytest.raises(RuntimeError, match="begun anew"):
        old.close()


def test_versions_that_are_gone_are_named(tmp_path):
    """While nothing is there that could be served instead."""
    counter = Counter(100)
    folder = tmp_path / "model/assets.extra/het_tf"
    with het_tf.serving.publish(counter.model, tmp_path / "model", every="1h"):
        served = tf.saved_model.load(str(tmp_path / "model"))
    wait_until(lambda: version_of(served) == 1)
    (newest,) = folder.glob("*.delta")
    newest.unlink()
    wait_until(lambda: served.freshness()["trouble"].numpy())
    trouble = served.freshness()["trouble"].numpy().decode()
    assert f"{folder}: {newest.name}, which is served, is not there any longer" in trouble
    assert version_of(served) == 1


def test_verifying_finds_what_is_damaged_or_missing(tmp_path, subtests):
    het_tf.serving.publish(Counter(100).model, tmp_path / "model", every="1h").close()
    assert het_tf.serving.verify(tmp_path / "model") == 4
    for number, (pattern, damage, message) in enumerate(
        [
            ("*.1.0.rows", pathlib.Path.unlink, r"1\.0\.rows cannot be read"),
            ("*.1.0.rows", _cut_off, r"1\.0\.rows is no file of rows, or its end is missing"),
            ("*.whole", _cut_off, r"000000000000\.\w+\.whole is damaged, or its end is missing"),
            ("*.delta", _cut_off, r"000000000001\.\w+\.delta is damaged, or its end is missing"),
            ("*.whole", pathlib.Path.unlink, r"assets.extra/het_tf: there is no whole version"),
            ("*.others.index", pathlib.Path.unlink, r"0\.\w+\.others is missing or damaged"),
            ("*.others.data*", pathlib.Path.unlink, r"0\.\w+\.others is missing or damaged"),
            ("*.others.data*", _cut_off, r"0\.\w+\.others is missing or damaged"),
        ]
    ):
        copy = shutil.copytree(tmp_path / "model", tmp_path / str(number))
        damage(min((copy / "assets.extra/het_tf").glob(pattern)))
        with subtests.test(message), pytest.raises(ValueError, match=message):
            het_tf.serving.verify(copy)


def test_verifying_a_manifest_of_another_version_names_it(tmp_path):
    counter = Counter(100)
    het_tf.serving.export_mapped(counter.model, tmp_path / "model")
    (whole,) = (tmp_path / "model/assets.extra/het_tf").glob("*.whole")
    renamed = whole.with_name(whole.name.replace("000000000000", "000000000007"))
    whole.rename(renamed)
    with pytest.raises(ValueError, match=f"{renamed} is no manifest of that version"):
        het_tf.serving.verify(tmp_path / "model")


def test_verifying_no_model_is_an_error(model, tmp_path):
    with pytest.raises(ValueError, match=f"path = {tmp_path}/none holds no SavedModel"):
        het_tf.serving.verify(tmp_path / "none")
    model.export(str(tmp_path / "exported"))
    with pytest.raises(ValueError, match=f"{tmp_path}/exported/assets.extra/het_tf is no folder"):
        het_tf.serving.verify(tmp_path / "exported")


def test_versions_may_be_published_while_others_are_verified(tmp_path):
    counter = Counter(100)
    with het_tf.serving.publish(counter.model, tmp_path / "model", every="1h") as publisher:
        done = threading.Event()
        failed: list[BaseException] = []

        def verify() -> None:
            try:
                while not done.is_set():
                    het_tf.serving.verify(tmp_path / "model")
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=verify)
        thread.start()
        for number in range(1, 15):  # many of them whole
            counter.set(number, counter.keys[:60])
            publisher.publish()
        done.set()
        thread.join()
    assert failed == []


def test_a_model_that_is_published_is_not_exported_over(model, tmp_path):
    with het_tf.serving.publish(model, tmp_path / "model", every="1h") as publisher:
        before = contents_of(tmp_path / "model/assets.extra/het_tf")
        for export in (model.export, lambda path: het_tf.export_saved_model(model, path)):
            with pytest.raises(ValueError, match=r"model holds a model of het_tf\.serving"):
                export(str(tmp_path / "model"))
        assert contents_of(tmp_path / "model/assets.extra/het_tf") == before
        assert publisher.publish() == 1
    served = tf.saved_model.load(str(tmp_path / "model"))
    assert served.freshness()["trouble"].numpy() == b""


def test_of_two_programs_that_make_a_folder_one_does(model, tmp_path, monkeypatch):
    flush = het_tf.serving.flush_model
    first = []

    def make(made) -> None:
        flush(made)
        if not first:
            first.append(None)
            first[0] = het_tf.serving.publish(model, tmp_path / "model", every="1h")

    monkeypatch.setattr(het_tf.serving, "flush_model", make)
    with pytest.raises(RuntimeError, match=r"model: another publisher wrote a SavedModel there"):
        het_tf.serving.publish(model, tmp_path / "model", every="1h")
    assert first[0].publish() == 1
    first[0].close()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
