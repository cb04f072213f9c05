"""SavedModels without het_tf ops."""

import subprocess
import sys

import keras
import numpy as np
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


def trained_model(initializer) -> keras.Model:
    inputs = {"ids": keras.Input((3,), dtype="int64", name="ids"), "x": keras.Input((1,), name="x")}
    embedding = het_tf.layers.HetEmbedding(
        6, embeddings_initializer=initializer, optimizer=het_tf.optimizers.Adam(0.05), seed=-5
    )
    vectors = keras.layers.Flatten()(embedding(inputs["ids"]))
    joined = keras.layers.Concatenate()([vectors, inputs["x"]])
    model = het_tf.keras.Model(inputs, keras.layers.Dense(2, activation="tanh")(joined))
    model.compile("adam", "mse")
    model.fit({"ids": KNOWN, "x": np.ones((400, 1))}, KNOWN[:, :2] % 2, verbose=0)
    return model


@pytest.mark.parametrize("sequential", [keras.Sequential, het_tf.keras.Sequential])
def test_a_sequential_model_needs_no_signature(tmp_path, sequential):
    layers = [het_tf.layers.HetEmbedding(3, seed=1), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = sequential([keras.Input((2,), dtype="int64"), *layers])
    het_tf.export.export_saved_model(model, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    ids = tf.constant([[1, -2], [2**60, 0]], tf.int64)
    np.testing.assert_allclose(loaded.serve(ids), model(ids), rtol=1e-6)


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


@pytest.mark.parametrize(
    "initializer",
    [
        "zeros",
        keras.initializers.Constant(0.25),
        "uniform",
        keras.initializers.RandomNormal(0.1, 0.5),
        keras.initializers.TruncatedNormal(-0.1, 0.5),
    ],
    ids=["zeros", "constant", "uniform", "normal", "truncated_normal"],
)
def test_served_predictions_are_those_of_the_model(initializer, tmp_path):
    model = trained_model(initializer)
    model.export(tmp_path / "model")
    served = tf.saved_model.load(str(tmp_path / "model"))
    for ids in (KNOWN, UNKNOWN):
        inputs = {"ids": ids, "x": np.ones((len(ids), 1), np.float32)}
        expected = model.predict(inputs, verbose=0)
        actual = served.serve({name: tf.constant(value) for name, value in inputs.items()})
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_stock_tensorflow_serves_the_model(tmp_path):
    model = trained_model("uniform")
    model.export(tmp_path / "model")
    ids = np.concatenate([KNOWN[:5], UNKNOWN])
    np.save(tmp_path / "ids.npy", ids)
    arguments = [tmp_path / "model", tmp_path / "ids.npy", tmp_path / "answer.npy"]
    subprocess.run([sys.executable, "-c", ASK, *map(str, arguments)], check=True, cwd=tmp_path)
    expected = model.predict({"ids": ids, "x": np.ones((len(ids), 1))}, verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "answer.npy"), expected, rtol=1e-5, atol=1e-6)


def test_training_goes_on_after_an_export(tmp_path):
    model = trained_model("uniform")
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
    vectors = keras.layers.Flatten()(het_tf.layers.HetEmbedding(4, seed=1, name="users")(ids))
    pooled = het_tf.layers.HetEmbedding(2, seed=2, combiner="mean")(known)
    model = model_class(ids, keras.layers.Dense(2)(keras.layers.Concatenate()([vectors, pooled])))
    model.compile("adam", "mse")
    model.fit(KNOWN, KNOWN[:, :2] % 2, verbose=0)
    return model


def with_an_archive(model, path):
    archive = keras.export.ExportArchive()
    archive.track(model)
    signature = [tf.TensorSpec((None, 3), tf.int64)]
    archive.add_endpoint("serve", lambda ids: model(ids, training=False), signature)
    archive.write_out(path, verbose=False)


@pytest.mark.parametrize(
    "export", [lambda model, path: model.export(path, verbose=False), with_an_archive]
)
def test_kerass_own_exports_have_the_table(export, tmp_path):
    model = plain_model()
    export(model, tmp_path / "model")
    expected = {ids.tobytes(): model.predict(ids, verbose=0) for ids in (KNOWN, UNKNOWN)}
    model.fit(KNOWN, KNOWN[:, :2] % 2, verbose=0)
    assert (model.predict(KNOWN, verbose=0) != expected[KNOWN.tobytes()]).any()
    served = tf.saved_model.load(str(tmp_path / "model"))
    for ids in (KNOWN, UNKNOWN):
        np.testing.assert_allclose(
            served.serve(tf.constant(ids)), expected[ids.tobytes()], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("model_class", [keras.Model, het_tf.keras.Model])
def test_tf_saved_model_save_names_what_works(model_class, tmp_path):
    model = plain_model(model_class)
    with pytest.raises(ValueError, match=r"table of layer users: use het_tf\.export"):
        tf.saved_model.save(model, str(tmp_path / "model"))


@pytest.mark.parametrize("format", ["onnx", "openvino", "litert", "torch"])
def test_formats_that_cannot_hold_a_table_say_so_first(format, tmp_path):
    model = plain_model(het_tf.keras.Model)
    with pytest.raises(ValueError, match=rf"users .*format='{format}'.*tf_saved_model"):
        model.export(tmp_path / "model.onnx", format=format)
    assert not list(tmp_path.iterdir())
