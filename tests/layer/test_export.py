"""SavedModels without het_tf ops."""

import keras
import numpy as np
import program_runner
import pytest
import tensorflow as tf

import het_tf

KNOWN = np.random.default_rng(0).integers(-50, 50, (400, 3))
UNKNOWN = np.array([[1000, -(2**63), 2**63 - 1], [2**53 + 1, 2**31, -1000]])

ASK = """
import sys, numpy as np, tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
ids = np.load(sys.argv[2])
outputs = model.signatures["serving_default"](ids=tf.constant(ids), x=tf.ones([len(ids), 1]))
np.save(sys.argv[3], outputs["output_0"].numpy())
assert "het_tf" not in sys.modules
"""
SERVE = """
import sys, numpy as np, tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
with np.load(sys.argv[2]) as ids:
    np.savez(sys.argv[3], *model.serve(dict(ids)))
assert "het_tf" not in sys.modules
"""


def trained_model() -> keras.Model:
    inputs = {"ids": keras.Input((3,), dtype="int64", name="ids"), "x": keras.Input((1,), name="x")}
    embedding = het_tf.layers.HetEmbedding(6, optimizer=het_tf.optimizers.Adam(0.05), seed=-5)
    vectors = keras.layers.Flatten()(embedding(inputs["ids"]))
    joined = keras.layers.Concatenate()([vectors, inputs["x"]])
    model = het_tf.keras.Model(inputs, keras.layers.Dense(2, activation="tanh")(joined))
    model.compile("adam", "mse")
    model.fit({"ids": KNOWN, "x": np.ones((400, 1))}, KNOWN[:, :2] % 2, verbose=0)
    return model


@pytest.fixture(scope="module")
def model() -> keras.Model:
    """A trained model. Tests may train it on."""
    return trained_model()


def test_a_sequential_model_needs_no_signature(tmp_path):
    layers = [het_tf.layers.HetEmbedding(3, seed=1), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,), dtype="int64"), *layers])
    het_tf.export.export_saved_model(model, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    ids = tf.constant([[1, -2], [2**60, 0]], tf.int64)
    np.testing.assert_allclose(loaded.serve(ids), model(ids), rtol=1e-6)


def make_ragged():
    return {"ragged": True}, lambda ids: ids


def make_sparse():
    return {"sparse": True}, lambda ids: ids.to_sparse()


@pytest.mark.parametrize("kind", [make_ragged, make_sparse])
@pytest.mark.parametrize("combiner", ["mean", None])
def test_inputs_keep_their_kind_without_a_signature(tmp_path, kind, combiner):
    """In a dense tensor what is missing would be id 0, whose row is not zero."""
    arguments, of_kind = kind()
    inputs = keras.Input((None,), dtype="int32", name="pages", **arguments)
    layer = het_tf.layers.HetEmbedding(2, combiner=combiner, optimizer="sgd")
    outputs = layer(inputs)
    model = het_tf.keras.Model({"pages": inputs}, outputs)
    layer.table.assign([0, 1, 2], np.array([[9, 9], [1, 2], [3, 4]], np.float32))
    ids = of_kind(tf.ragged.constant([[1], [2, 1, 2], []], dtype=tf.int32, ragged_rank=1))
    expected = model({"pages": ids})
    exporters = (het_tf.export_saved_model, het_tf.serving.export_mapped, het_tf.keras.Model.export)
    for number, export in enumerate(exporters):
        export(model, tmp_path / str(number))
        loaded = tf.saved_model.load(tmp_path / str(number))
        served = loaded.serve({"pages": ids})
        assert type(served) is type(expected)
        for one, other in zip(*(tf.nest.flatten(x, True) for x in (served, expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_inputs_keep_their_names_and_dtypes_without_a_signature(tmp_path):
    inputs = {
        "ids": keras.Input((2,), dtype="int16", name="ids"),
        "scale": keras.Input((1,), dtype="float16", name="scale"),
    }
    layer = het_tf.layers.HetEmbedding(1, optimizer="sgd", embeddings_initializer="ones")
    rows = keras.layers.Flatten()(layer(inputs["ids"]))
    model = keras.Model(inputs, keras.ops.sum(rows) * inputs["scale"])
    het_tf.export_saved_model(model, tmp_path)
    (specs,) = tf.saved_model.load(tmp_path).serve.input_signature
    assert specs == {
        "ids": tf.TensorSpec([None, 2], tf.int16, "ids"),
        "scale": tf.TensorSpec([None, 1], tf.float16, "scale"),
    }


def test_a_layer_that_nothing_has_called_is_left_out(tmp_path):
    class WithSpare(het_tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.spare = het_tf.layers.HetEmbedding(2, name="spare")
            self.used = het_tf.layers.HetEmbedding(3, seed=1)

        def call(self, inputs):
            return self.used(inputs)

    model, signature = WithSpare(), [tf.TensorSpec((None, 3), tf.int64)]
    with pytest.raises(ValueError, match="layer spare has no table until it is built or called"):
        model.export(tmp_path / "frozen", input_signature=signature)
    expected = model(KNOWN)
    model.export(tmp_path / "frozen", input_signature=signature)
    het_tf.serving.export_mapped(model, tmp_path / "mapped", input_signature=signature)
    for name in ("frozen", "mapped"):
        loaded = tf.saved_model.load(str(tmp_path / name))
        np.testing.assert_allclose(loaded.serve(KNOWN), expected, rtol=1e-6)


@pytest.mark.exhaustive
def test_any_file_system_of_tensorflow_will_do(model):
    for _ in range(2):  # over what is there, too
        model.export("ram://exported/model")
    assert tf.io.gfile.listdir("ram://exported") == ["model"]
    served = tf.saved_model.load("ram://exported/model")
    inputs = {"ids": KNOWN, "x": np.ones((len(KNOWN), 1), np.float32)}
    expected = model.predict(inputs, verbose=0)
    np.testing.assert_allclose(served.serve(inputs), expected, rtol=0, atol=1e-6)


def test_lookup_layers_are_exported_with_it(tmp_path):
    words, numbers = keras.Input((), dtype="string"), keras.Input((), dtype="int64")
    known_words = keras.layers.StringLookup(vocabulary=["a", "b"])(words)
    known_numbers = keras.layers.IntegerLookup(vocabulary=[2**40, 7])(numbers)
    vectors = [
        het_tf.layers.HetEmbedding(4, seed=i)(ids)
        for i, ids in enumerate([known_words, known_numbers])
    ]
    model = het_tf.keras.Model([words, numbers], keras.layers.Add()(vectors))
    model.export(tmp_path)
    inputs = tf.constant(["b", "?"]), tf.constant([7, 2**40])
    loaded = tf.saved_model.load(tmp_path)
    np.testing.assert_array_equal(loaded.serve(*inputs), model(list(inputs)))


@pytest.mark.exhaustive
def test_rows_that_nobody_updated_have_the_initial_values_of_the_model(tmp_path):
    """Of each initializer that is computed with stock ops."""
    ids = keras.Input((3,), dtype="int64", name="ids")
    kinds = keras.initializers
    layers = [
        het_tf.layers.HetEmbedding(6, embeddings_initializer=initializer, seed=-5)
        for initializer in (
            "zeros",
            kinds.Constant(0.25),
            "uniform",
            kinds.RandomNormal(0.1, 0.5),
            kinds.TruncatedNormal(-0.1, 0.5),
        )
    ]
    model = het_tf.keras.Model(ids, [layer(ids) for layer in layers])
    keys = np.unique(KNOWN)
    for layer in layers:
        layer.table.assign(keys, np.ones((len(keys), 6), np.float32))
    model.export(tmp_path / "model")
    served = tf.saved_model.load(str(tmp_path / "model"))
    for ids in (KNOWN, UNKNOWN):
        for actual, expected in zip(served.serve(tf.constant(ids)), model(ids), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_stock_tensorflow_serves_the_model(model, tmp_path):
    model.export(tmp_path / "model")
    ids = np.concatenate([KNOWN, UNKNOWN])
    np.save(tmp_path / "ids.npy", ids)
    (tmp_path / "ask.py").write_text(ASK)
    arguments = [tmp_path / "model", tmp_path / "ids.npy", tmp_path / "answer.npy"]
    ended = program_runner.run(tmp_path / "ask.py", *map(str, arguments), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    expected = model.predict({"ids": ids, "x": np.ones((len(ids), 1))}, verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "answer.npy"), expected, rtol=1e-5, atol=1e-6)


def embedding_of(model) -> het_tf.layers.HetEmbedding:
    (embedding,) = het_tf.layers.embedding.embeddings_of(model)
    return embedding


def lookup_model(rows, **arguments) -> keras.Model:
    """A lookup alone, of keys 0, 1, ... with these values."""
    ids = keras.Input((None,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(len(rows[0]), seed=3, **arguments)
    model = het_tf.keras.Model(ids, embedding(ids))
    embedding.table.assign(np.arange(len(rows)), np.asarray(rows, np.float32))
    return model


def test_stored_rows_are_as_near_as_the_documentation_says(tmp_path, monkeypatch, subtests):
    rng = np.random.default_rng(0)
    # Values of all sizes, a row of zeros among them; in many parts and slices.
    values = rng.normal(size=(3000, 7)) * 10.0 ** rng.integers(-9, 4, (3000, 1))
    values[5] = 0
    monkeypatch.setattr("het_tf.tables.table._EXPORT_PART_BYTES", 5000)
    monkeypatch.setattr("het_tf.storage.files._SLICE_BYTES", 5000)
    model = lookup_model(values)
    values = values.astype(np.float32)
    bounds = {
        "float32": np.zeros_like(values),
        "float16": np.maximum(np.abs(values) * 2.0**-11, 2.0**-25),
        "int8": np.abs(values).max(axis=1, keepdims=True) / 254 * (1 + 1e-6) * np.ones(7),
    }
    for rows, bound in bounds.items():
        model.export(tmp_path / rows, rows=rows)
        served = tf.saved_model.load(str(tmp_path / rows))
        actual = served.serve(np.arange(3000)[np.newaxis]).numpy()[0]
        stored = sum(x.stat().st_size for x in (tmp_path / rows / "variables").iterdir())
        with subtests.test(rows):
            assert (np.abs(actual - values) <= bound).all()
            assert (rows == "float32") == (actual == values).all()
            row_bytes = {"float32": 28, "float16": 14, "int8": 11}[rows]
            assert stored < 3000 * row_bytes + 20_000


def test_rows_of_few_updates_or_small_norm_are_left_out(tmp_path):
    model = lookup_model([[3, 4], [0.3, 0.4], [6, 8]])
    table = embedding_of(model).table
    rows = table.export()
    clocks = np.where(rows.keys == 2, 1, 7)
    table.import_(het_tf.TableExport(rows.keys, rows.values, rows.slots, clocks))
    model.export(tmp_path / "model", min_updates=7, min_norm=0.6)
    ids = np.array([[0, 1, 2]])
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    served = loaded.serve(ids).numpy()[0]
    fresh = lookup_model([[0, 0]])  # the same initial values
    np.testing.assert_array_equal(served[0], [3, 4])
    np.testing.assert_array_equal(served[1:], fresh.predict(ids, verbose=0)[0][1:])


def test_rows_that_were_not_updated_for_long_are_left_out(tmp_path):
    """In both forms; the age may be the very same."""
    ids = keras.Input((None,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(2, seed=1, expiry=het_tf.Expiry(age=9, time="given"))
    model = het_tf.keras.Model(ids, embedding(ids))
    keys = np.arange(4)
    expected = embedding.table.lookup(keys)
    for now in (10, 11, 12, 15):
        embedding.table.expire(now)
        if now < 15:
            embedding.table.assign(keys[now - 10 : now - 9], np.full((1, 2), now, np.float32))
    expected[1:3] = [[11, 11], [12, 12]]
    model.export(tmp_path / "copied", max_age=4)
    het_tf.serving.export_mapped(model, tmp_path / "mapped", max_age=4)
    for name in ("copied", "mapped"):
        loaded = tf.saved_model.load(str(tmp_path / name))
        np.testing.assert_array_equal(loaded.serve(keys[np.newaxis])[0], expected)
    assert embedding.table.size() == 3
    model.export(tmp_path / "none", max_age=2)
    loaded = tf.saved_model.load(str(tmp_path / "none"))
    fresh = het_tf.layers.HetEmbedding(2, seed=1)
    np.testing.assert_array_equal(loaded.serve(keys[np.newaxis]), fresh(keys[np.newaxis]))


def test_bad_arguments_of_an_export_are_named(tmp_path, subtests):
    model = lookup_model([[1.0, 2.0], [3.0, -7e4]])
    for arguments, message in [
        ({"rows": "float64"}, r'rows must be "float32", "float16" or "int8", not \'float64\''),
        ({"min_updates": -1}, r"min_updates must be an integer from 0 .*, not -1"),
        ({"min_norm": float("nan")}, r"min_norm must be a number from 0 to inf, not nan"),
        ({"max_age": 0.5}, r"max_age must be an integer from 0 .*, not 0.5"),
        ({"max_age": 5}, r"max_age = 5 needs tables .* that of het_embedding\S* has no expiry"),
        ({"rows": "float16"}, r'rows = "float16" cannot hold 70000 of key 1'),
    ]:
        with subtests.test(message), pytest.raises(ValueError, match=message):
            model.export(tmp_path / "model", **arguments)
    assert not (tmp_path / "model").exists()


def test_training_goes_on_after_an_export(model, tmp_path):
    embedding = next(x for x in model.layers if isinstance(x, het_tf.layers.HetEmbedding))
    size = embedding.table.size()
    model.export(tmp_path / "model")
    history = model.fit(
        {"ids": KNOWN + 500, "x": np.ones((400, 1))}, KNOWN[:, :2] % 2, verbose=0, epochs=2
    )
    assert history.history["loss"][1] < history.history["loss"][0]
    assert embedding.table.size() > size


def test_a_table_without_rows_is_served(tmp_path):
    embedding = het_tf.layers.HetEmbedding(3, seed=2)
    ids = keras.Input((2,), dtype="int64")
    model = het_tf.keras.Model(ids, embedding(ids))
    model.export(tmp_path / "model")
    served = tf.saved_model.load(str(tmp_path / "model"))
    query = np.array([[0, 1], [2**40, -3]])
    np.testing.assert_array_equal(served.serve(tf.constant(query)), embedding.table.lookup(query))


def test_what_is_no_model_is_refused(tmp_path):
    for what in ("model", het_tf.layers.HetEmbedding(1)):
        for export in (
            het_tf.export_saved_model,
            het_tf.serving.export_mapped,
            het_tf.serving.publish,
        ):
            with pytest.raises(ValueError, match=r"model must be a keras\.Model, not "):
                export(what, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_subclassed_model_needs_a_signature(tmp_path):
    class Sum(het_tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = het_tf.layers.HetEmbedding(3, seed=2)

        def call(self, ids):
            return keras.ops.sum(self.embedding(ids), -1)

    model = Sum()
    query = np.array([[1, 2]])
    expected = model(query)
    with pytest.raises(ValueError, match="input_signature must be given"):
        model.export(tmp_path / "model")
    model.export(tmp_path / "model", input_signature=tf.TensorSpec([None, 2], tf.int64))
    served = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(served.serve(tf.constant(query)), expected)


def plain_model(model_class=keras.Model) -> keras.Model:
    """With a lookup layer and a pooled table beside the embedding; trained."""
    ids = keras.Input((3,), dtype="int64", name="ids")
    known = keras.layers.IntegerLookup(vocabulary=[2**40, 7])(ids)
    users = het_tf.layers.HetEmbedding(4, seed=1, optimizer="adam", name="users")
    vectors = keras.layers.Flatten()(users(ids))
    pooled = het_tf.layers.HetEmbedding(
        2, embeddings_initializer="zeros", optimizer="adam", combiner="mean"
    )(known)
    model = model_class(ids, keras.layers.Dense(2)(keras.layers.Concatenate()([vectors, pooled])))
    model.compile("adam", "mse", run_eagerly=True)
    model.train_on_batch(KNOWN, KNOWN[:, :2] % 2)
    return model


def with_an_archive(model, path):
    archive = keras.export.ExportArchive()
    archive.track(model)
    signature = [tf.TensorSpec(model.input.shape, model.input.dtype)]
    archive.add_endpoint("serve", lambda ids: model(ids, training=False), signature)
    archive.write_out(path, verbose=False)


@pytest.mark.exhaustive
def test_kerass_own_exports_have_the_table(tmp_path):
    model = plain_model()
    model.export(tmp_path / "exported", verbose=False)
    with_an_archive(model, tmp_path / "archived")
    expected = [(ids, model.predict(ids, verbose=0)) for ids in (KNOWN, UNKNOWN)]
    model.train_on_batch(KNOWN, KNOWN[:, :2] % 2)
    assert (model.predict(KNOWN, verbose=0) != expected[0][1]).any()
    for name in ("exported", "archived"):
        loaded = tf.saved_model.load(str(tmp_path / name))
        layer = keras.layers.TFSMLayer(str(tmp_path / name), call_endpoint="serve")
        for ids, of_model in expected:
            for outputs in (loaded.serve(tf.constant(ids)), layer(ids)):
                np.testing.assert_allclose(outputs, of_model, rtol=1e-5, atol=1e-6)


def model_of_every_kind() -> keras.Model:
    """Of each type of ids, and each kind of layer, with rows of the ids 0 to 9."""
    names = ("int64", "int32", "float32", "uint64")
    ids = {name: keras.Input((2,), dtype=name, name=name) for name in names}
    zeros = {"embeddings_initializer": "zeros"}
    layers = {
        "int32": het_tf.layers.HetEmbedding(4, **zeros),
        "float32": het_tf.layers.HetEmbedding(10, 4, **zeros),
        "uint64": het_tf.layers.HetEmbedding(4, combiner="mean", padding_id=3, **zeros),
        "int64": het_tf.layers.HetEmbedding(4, embeddings_regularizer="l2", **zeros),
    }
    tables = [
        het_tf.layers.TableConfig(name, 10, 4, initializer="zeros", combiner=combiner)
        for name, combiner in (("bags", "mean"), ("rows", None))
    ]
    features = [het_tf.layers.FeatureConfig(table.name, table) for table in tables]
    collection = het_tf.layers.HetEmbeddingCollection(features)
    outputs = [layer(ids[name]) for name, layer in layers.items()]
    model = keras.Model(ids, [*outputs, *collection([ids["int32"]] * 2)])
    values = np.random.default_rng(0).normal(size=(6, 10, 4)).astype(np.float32)
    for layer, rows in zip(layers.values(), values, strict=False):
        layer.table.assign(np.arange(10), rows)
    for table, rows in zip(tables, values[4:], strict=True):
        het_tf.interop.load(collection, het_tf.interop.Weights(rows), table=table.name)
    return model


@pytest.mark.exhaustive
def test_stock_tensorflow_loads_what_keras_exports(tmp_path):
    """In a process that has no ops of het_tf."""
    model = model_of_every_kind()
    model.export(str(tmp_path / "model"), verbose=False)
    ids = {name: np.array([[1, 3], [9, 0]], each.dtype) for name, each in model.input.items()}
    np.savez(tmp_path / "ids.npz", **ids)
    (tmp_path / "serve.py").write_text(SERVE)
    paths = [str(tmp_path / name) for name in ("model", "ids.npz", "served.npz")]
    ended = program_runner.run(tmp_path / "serve.py", *paths, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    with np.load(tmp_path / "served.npz") as served:
        expected = model(ids)
        assert len(served) == len(expected) == 6
        for i, values in enumerate(expected):
            np.testing.assert_allclose(served[f"arr_{i}"], values, rtol=1e-5)


def test_tf_saved_model_save_names_what_works(tmp_path):
    for model_class in (keras.Model, het_tf.keras.Model):
        model = plain_model(model_class)
        with pytest.raises(ValueError, match=r"table of layer users: use het_tf\.export"):
            tf.saved_model.save(model, str(tmp_path / "model"))
    module = tf.Module()
    module.users = model.get_layer("users")
    for part in (module, module.users):
        with pytest.raises(ValueError, match=r"leave out the rows of tables: use het_tf\.export"):
            tf.saved_model.save(part, str(tmp_path / "part"))


@pytest.mark.exhaustive
def test_an_archive_takes_a_function_that_was_not_traced_before(tmp_path):
    """As docs/errors.md has it."""
    ids = keras.Input((3,), dtype="int64", name="ids")
    model = keras.Model(ids, het_tf.layers.HetEmbedding(4, seed=1, name="users")(ids))

    @tf.function(input_signature=[tf.TensorSpec(model.input.shape, model.input.dtype)])
    def serve(ids):
        return model(ids, training=False)

    expected = serve(tf.constant(KNOWN)).numpy()
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", serve)
    with pytest.raises(AssertionError, match=r"'untracked' resource.*\n.*\n.*users/.*TableR"):
        archive.write_out(str(tmp_path / "traced"), verbose=False)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", serve.python_function, serve.input_signature)
    archive.write_out(str(tmp_path / "model"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(served.serve(tf.constant(KNOWN)), expected, rtol=1e-5, atol=1e-6)


def test_formats_that_cannot_hold_a_table_say_so_first(tmp_path):
    # Of a plain model onnx and openvino need packages of their own before they begin.
    for model_class, formats in (
        (keras.Model, ["litert"]),
        (het_tf.keras.Model, ["onnx", "openvino", "litert", "torch"]),
    ):
        model = plain_model(model_class)
        for name in formats:
            with pytest.raises(ValueError, match=rf"users .*format='{name}'.*tf_saved_model"):
                model.export(tmp_path / "model.tflite", format=name)
    assert not list(tmp_path.iterdir())
