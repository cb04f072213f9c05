"""Ids on their way to a layer: none becomes another row's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf import optimizers

LARGE = np.array([[2**24, 2**24 + 1], [2**53 + 1, -(2**62) - 1], [2**31, 5]])


def new_layer(**arguments) -> het_tf.layers.HetEmbedding:
    return het_tf.layers.HetEmbedding(
        1,
        optimizer=optimizers.SGD(1.0),
        embeddings_initializer="zeros",
        name="users",
        **arguments,
    )


def summing(model: keras.Model) -> keras.Model:
    model.compile("sgd", loss=lambda _, predicted: -keras.ops.sum(predicted))
    return model


def sequential(dtype: str | None, **arguments) -> keras.Model:
    begin = [] if dtype is None else [keras.Input((2,), dtype=dtype)]
    return summing(keras.Sequential([*begin, new_layer(**arguments)]))


def test_integers_that_keras_would_make_floats_stay_themselves():
    """No Input, or one without a dtype; in Keras's Embedding 2**24 and 2**24 + 1 are one row."""
    for dtype in ("int64", "float16", None):
        model = sequential(dtype)
        model.fit(LARGE, np.zeros(len(LARGE)), verbose=0)
        layer = model.layers[-1]
        assert sorted(layer.table.export().keys) == sorted(LARGE.ravel())
    predicted = model.predict(LARGE + 0, verbose=0)
    np.testing.assert_array_equal(predicted, np.ones((3, 2, 1)))
    assert model.evaluate(LARGE, np.zeros(len(LARGE)), verbose=0) == -6


def test_whole_floats_are_ids():
    layer = new_layer()
    for dtype in ("float16", "float32", "float64", "bfloat16"):
        ids = tf.cast([[1, 255], [-7, 0]], dtype)
        assert layer(ids).shape == (2, 2, 1)
    model = sequential("float32")
    model.fit(LARGE % 2**24 * 1.0, np.zeros(3), verbose=0)
    assert set(model.layers[-1].table.export().keys) == set((LARGE % 2**24).ravel())


NAN, INF = float("nan"), float("inf")
BAD = [
    (
        "float32",
        2.0**24,
        r"are float, which tells whole numbers apart below 2\*\*24 only, not 16777216",
    ),
    ("float64", -(2.0**53), r"apart below 2\*\*53 only, not -9007199254740992"),
    ("float16", 2048.0, r"apart below 2\*\*11 only, not 2048"),
    ("bfloat16", 256.0, r"apart below 2\*\*8 only, not 256"),
    ("float32", 2.0**100, r"only, not 1267650600228229401496703205376"),
    ("float64", 2.5, r"must be whole numbers, not 2.5 \(double\)"),
    ("float32", NAN, "must be whole numbers, not nan"),
    ("float64", INF, "must be whole numbers, not inf"),
    ("uint64", 2**63 + 5, r"must be at most 2\*\*63 - 1, not 9223372036854775813"),
]


def test_what_is_no_id(subtests):
    layer = new_layer()
    for dtype, value, message in BAD:
        ids = tf.constant([[1, value]], dtype)
        for call in (layer, tf.function(layer)) if dtype == "float32" else (layer,):
            with (
                subtests.test(message),
                pytest.raises(
                    tf.errors.InvalidArgumentError, match="inputs of layer users .*" + message
                ),
            ):
                call(ids)


# What was fed, and the dtype of the model's Input, to which Keras casts it.
CAST = [
    ("int32", np.array([[1, 2**31 + 5]]), "were cast to int32, which does not hold 2147483653"),
    ("int8", np.array([[1, -129]]), "were cast to int8, which does not hold -129"),
    ("int64", np.array([[1, 2**63 + 5]], np.uint64), r"must be at most 2\*\*63 - 1, not 92233720"),
    ("int64", np.array([[1.0, np.nan]]), "must be whole numbers, not nan"),  # pandas
    ("int32", np.array([[1.0, np.nan]]), "must be whole numbers, not nan"),
    ("int64", np.array([[1.0, 2.0**24]]), r"apart below 2\*\*24 only, not 16777216"),
]


def test_what_keras_casts_is_checked_as_it_was_fed(subtests):
    """By `predict` for each kind, whose function is made anew for another dtype; by the others."""
    models = {dtype: sequential(dtype) for dtype, _, _ in CAST}
    calls = [("predict", *each) for each in CAST]
    calls += [(verb, *each) for verb in ("fit", "evaluate") for each in CAST[:1]]
    for verb, dtype, ids, message in calls:
        arguments = (ids,) if verb == "predict" else (ids, np.zeros(1))
        named = "inputs of layer users .*" + message
        with (
            subtests.test(f"{verb}: {message}"),
            pytest.raises(tf.errors.InvalidArgumentError, match=named),
        ):
            getattr(models[dtype], verb)(*arguments, verbose=0)
    assert not any(model.layers[-1].table.size() for model in models.values())


def called(model, ids):
    model(ids)


def fitted(model, ids):
    model.run_eagerly = True
    model.fit(ids, np.zeros(1), verbose=0)


def predicted(model, ids):
    model.run_eagerly = True
    model.predict(ids, verbose=0)


def test_what_keras_casts_eagerly_is_checked_as_it_was_given(subtests):
    for dtype, ids, message in CAST:
        layer = new_layer()
        begin = keras.Input((2,), dtype=dtype, name="ids")
        model = summing(het_tf.keras.Sequential([begin, layer]))
        for use in (called, predicted, fitted):
            if ids.dtype == np.float64 and use is called:
                ids = ids.astype(np.float32)  # as of Keras's data adapters
            with subtests.test(f"{use.__name__}: {message}"):
                with pytest.raises(
                    tf.errors.InvalidArgumentError, match="input ids of model .*" + message
                ):
                    use(model, ids)
                assert layer.table.size() == 0
        use(model, np.array([[1, 2]], ids.dtype))


def test_each_input_that_is_given_eagerly_is_checked_for_its_own_type():
    inputs = [keras.Input((1,), dtype="int64", name="a"), keras.Input((1,), dtype="int8", name="b")]
    model = het_tf.keras.Model(inputs, new_layer()(keras.layers.Concatenate()(inputs)))
    small, large = np.array([[3]]), np.array([[2**40 + 5]])
    for given in (
        lambda a, b: [a, b],
        lambda a, b: (tf.constant(a), tf.constant(b)),
        lambda a, b: {"b": b, "more": a, "a": a},
    ):
        model(given(large, small))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"input b .* hold 1099511627781"):
            model(given(small, large))


def test_ragged_and_sparse_inputs_that_are_given_eagerly():
    for kind in ("ragged", "sparse"):
        inputs = keras.Input((None,), dtype="int32", name="ids", **{kind: True})
        model = het_tf.keras.Model(inputs, new_layer(combiner="sum")(inputs))
        ids = tf.ragged.constant([[1], [2, 2**40 + 5]], tf.int64)
        given = ids if kind == "ragged" else ids.to_sparse()
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"input ids .* hold 1099511627781"
        ):
            model(given)


def test_numbers_that_no_embedding_of_ours_may_see_are_keras_s():
    inputs = keras.Input((1,), dtype="int8")
    model = het_tf.keras.Model(inputs, keras.ops.cast(inputs, "int64") + 1)
    assert model(np.array([[258]])).numpy().tolist() == [[3]]


def model_of(model_class, inputs, ids) -> keras.Model:
    """Whose outputs are of any shape: one number for each example is made of them."""
    return summing(model_class(inputs, keras.ops.sum(new_layer()(ids)) + inputs_sum(inputs)))


def inputs_sum(inputs):
    return 0 * keras.ops.cast(keras.ops.sum(keras.tree.flatten(inputs)[0]), "float32")


def test_what_a_model_moves_after_keras_cast_it_is_checked_at_its_inputs():
    inputs = [keras.Input((2,), dtype="int32", name="a"), keras.Input((1,), dtype="int32")]
    ids = keras.layers.Concatenate()([inputs[0][:, 1:], inputs[1]])
    model = model_of(het_tf.keras.Model, inputs, ids)
    for given, message in (
        (np.array([[1, 2**40 + 5]]), "input a .* were cast to int32, .* not hold 1099511627781"),
        (np.array([[1.0, np.nan]]), "input a .* must be whole numbers, not nan"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            model.fit([given, np.array([[1]])], np.zeros(1), verbose=0)
    model.fit([np.array([[3, 4]]), np.array([[5.0]])], np.zeros(1), verbose=0)
    (layer,) = (layer for layer in model.layers if layer.name == "users")
    assert sorted(layer.table.export().keys) == [4, 5]


def test_integers_that_keras_made_floats_and_the_model_moved_are_named():
    inputs = keras.Input((2,))
    model = model_of(keras.Model, inputs, inputs[:, 1])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r'keras\.Input\(\.\.\., dtype="int64"\)'
    ):
        model.fit(np.array([[1, 2**53 + 1]]), np.zeros(1), verbose=0)


def test_a_column_of_ids_beside_one_of_other_numbers():
    """Joined and parted again, as in a model of a table's columns."""
    inputs = [keras.Input((1,)), keras.Input((1,))]
    ids = keras.layers.Concatenate()(inputs)[:, 0]
    model = model_of(keras.Model, inputs, ids)
    model.fit([np.array([[3]]), np.array([[0.5]])], np.zeros(1), verbose=0)
    (layer,) = (layer for layer in model.layers if layer.name == "users")
    assert list(layer.table.export().keys) == [3]


def test_a_cast_of_what_was_computed_rounds_as_it_always_did():
    inputs = keras.Input((2,))
    model = summing(keras.Model(inputs, new_layer()(keras.ops.cast(inputs / 10, "int64"))))
    model.fit(np.array([[25.0, 39.0]]), np.zeros(1), verbose=0)
    assert sorted(model.layers[-1].table.export().keys) == [2, 3]


def test_a_narrow_input_of_small_ids_is_as_good():
    ids = np.array([[1, 120]])
    for dtype in ("int8", "uint64"):
        model = sequential(dtype)
        model.fit(ids, np.zeros(1), verbose=0)
        assert sorted(model.layers[-1].table.export().keys) == [1, 120]


def test_an_exported_model_checks_its_ids(tmp_path):
    inputs = keras.Input((2,), dtype="float32", name="ids")
    layer = het_tf.layers.HetEmbedding(100, 2, name="users")
    het_tf.export_saved_model(keras.Model(inputs, layer(inputs)), tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    assert loaded.serve(tf.constant([[1.0, 99.0]])).shape == (1, 2, 2)
    for bad in (2.5, 100.0, NAN):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"must be whole numbers below .*, not"
        ):
            loaded.serve(tf.constant([[1.0, bad]]))


def test_ids_that_are_pooled():
    layer = het_tf.layers.HetEmbedding(10, 1, weights=np.ones((10, 1)), combiner="sum", name="bags")
    ragged = tf.RaggedTensor.from_row_lengths(tf.constant([1.0, 2.0, 9.0]), [2, 0, 1])
    sparse = tf.SparseTensor([[0, 1], [2, 0]], tf.constant([3, 4], tf.uint64), [3, 2])
    np.testing.assert_array_equal(layer(ragged), [[2], [0], [1]])
    np.testing.assert_array_equal(layer(sparse), [[1], [0], [1]])
    for values in (ragged, sparse):
        bad = values.with_values(values.values * 0 + 10)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"layer bags .*input_dim = 10\)"):
            layer(bad)


def test_padding_is_in_no_bound():
    layer = het_tf.layers.HetEmbedding(
        10, 1, weights=np.ones((10, 1)), combiner="sum", padding_id=-1, name="bags"
    )
    np.testing.assert_array_equal(layer(np.array([[1, -1], [-1, -1], [2, 3]])), [[1], [0], [2]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="not -2"):
        layer(np.array([[1, -2]]))
