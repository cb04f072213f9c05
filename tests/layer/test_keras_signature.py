"""The arguments of keras.layers.Embedding, on ours."""

import copy
import inspect
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf import optimizers
from het_tf.layers import HetEmbedding

ROWS, DIM = 300, 8


def sgd(rate: float = 1.0) -> optimizers.SGD:
    return optimizers.SGD(rate)


def rows_of(layer: HetEmbedding, keys) -> np.ndarray:
    if not layer.built:
        layer.build()
    return layer.table.lookup(np.asarray(keys))


DIMENSIONS = [
    (lambda: HetEmbedding(64), (None, 64)),
    (lambda: HetEmbedding(output_dim=64), (None, 64)),
    (lambda: HetEmbedding(1000, 64), (1000, 64)),
    (lambda: HetEmbedding(1000, output_dim=64), (1000, 64)),
    (lambda: HetEmbedding(64, input_dim=1000), (1000, 64)),
    (lambda: HetEmbedding(input_dim=1000, output_dim=64), (1000, 64)),
    (lambda: HetEmbedding(1000, 64, "zeros", "l2", "non_neg", True), (1000, 64)),
]


def defaults_of(function, names=None) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {p.name: p.default for p in parameters if p.kind not in kinds}
    return named if names is None else {name: named[name] for name in names if name in named}


def test_defaults_are_kerass():
    """All but those that docs/migration.md lists."""
    for method in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch"):
        theirs = defaults_of(getattr(keras.Model, method))
        assert defaults_of(getattr(het_tf.keras.Model, method), theirs) == theirs
    theirs = defaults_of(keras.Model.compile)
    ours = defaults_of(het_tf.keras.Model.compile, theirs)
    assert ours == theirs | {"steps_per_execution": "auto"}
    theirs = defaults_of(keras.layers.Embedding.__init__)
    ours = defaults_of(HetEmbedding.__init__, theirs)
    assert set(theirs) - set(ours) == {"lora_rank", "lora_alpha", "quantization_config"}
    assert ours == {name: theirs[name] for name in ours} | {"input_dim": None, "output_dim": None}


def test_dimensions():
    for make, dims in DIMENSIONS:
        layer = make()
        assert (layer.input_dim, layer.output_dim) == dims
        again = HetEmbedding.from_config(layer.get_config())
        assert (again.input_dim, again.output_dim) == dims
        assert again.get_config() == layer.get_config()


REFUSED = [
    (lambda: HetEmbedding(), "output_dim must be an integer"),
    (lambda: HetEmbedding(0, 4), "input_dim must be an integer from 1 to .*, not 0"),
    (lambda: HetEmbedding(10, 4, input_dim=11), "input_dim is given twice, as 10 and 11"),
    (lambda: HetEmbedding(10, 4, output_dim=5), "output_dim is given twice, as 4 and 5"),
    (lambda: HetEmbedding(10, 4, combine="sum"), "Unrecognized keyword arguments.*combine"),
    (lambda: HetEmbedding(10, 4, lora_rank=3), "lora_rank must be None, not 3: there is no"),
    (
        lambda: HetEmbedding(10, 4, quantization_config=keras.quantizers.Int8QuantizationConfig()),
        "quantization_config must be None, not <.*row_dtype='bfloat16'",
    ),
    (
        lambda: HetEmbedding(9, 4, keras.initializers.Constant(np.zeros((8, 4)))),
        r"weights must have .*\(9, 4\), not \(8, 4\)",
    ),
    (
        lambda: HetEmbedding(
            9, 4, keras.initializers.Constant(np.zeros((9, 4))), weights=np.zeros((9, 4))
        ),
        "weights are given twice",
    ),
    (
        lambda: het_tf.layers.HetEmbeddingCollection(
            het_tf.layers.FeatureConfig(
                "f",
                het_tf.layers.TableConfig(
                    "t", 9, 4, initializer=keras.initializers.Constant(np.zeros((9, 4)))
                ),
            )
        ),
        r"Constant of a number .*, not of shape \(9, 4\)",
    ),
    (
        lambda: HetEmbedding(4, embeddings_initializer="glorot_uniform"),
        "embeddings_initializer GlorotUniform depends on input_dim",
    ),
    (
        lambda: HetEmbedding(2**31, 4, "orthogonal"),
        "Orthogonal takes an input_dim of at most 1073741824, not 2147483648",
    ),
    (
        lambda: HetEmbedding(9, 4, embeddings_constraint=keras.constraints.MaxNorm(2)),
        "embeddings_constraint must be one that holds for each row by itself.*MaxNorm",
    ),
    (
        lambda: HetEmbedding(9, 4, embeddings_constraint=lambda w: w),
        "embeddings_constraint must be one that holds for each row by itself.*function",
    ),
    (
        lambda: HetEmbedding(
            9,
            4,
            optimizer=optimizers.SGD(max_norm=1.0),
            embeddings_constraint=keras.constraints.MaxNorm(2, axis=1),
        ),
        "embeddings_constraint wants max_norm = 2, the optimizer max_norm = 1.0",
    ),
    (
        lambda: HetEmbedding(4, weights=np.zeros(4)),
        r"weights must have the shape \(n, 4\), not",
    ),
    (lambda: HetEmbedding(1, 1, weights=[[[np.nan]]]), "weights must be finite"),
    (
        lambda: HetEmbedding(10, 4, dtype="int8_from_float32"),
        "dtype must not be 'int8_from_float32': rows are not quantized",
    ),
    (
        lambda: HetEmbedding(10, 4, embeddings_regularizer="orthogonal_regularizer"),
        "embeddings_regularizer must be of rows one by one, not OrthogonalRegularizer",
    ),
    (
        lambda: HetEmbedding(10, 4, dtype="int64"),
        "dtype must be a floating type, that of the outputs, not 'int64': ids may be",
    ),
    (
        lambda: het_tf.layers.HetEmbeddingCollection(
            het_tf.layers.FeatureConfig("f", het_tf.layers.TableConfig("t", 9, 4)),
            dtype="int32",
        ),
        "dtype must be a floating type, that of the outputs, not 'int32'",
    ),
]


def test_what_is_refused(subtests):
    for make, message in REFUSED:
        with subtests.test(message), pytest.raises(ValueError, match=message):
            make()


def test_input_dim_is_a_bound():
    layer = HetEmbedding(10, 2, name="users")
    for lookup in (layer, tf.function(layer)):
        assert lookup(tf.constant([0, 9])).shape == (2, 2)
        for bad in (10, -1, 2**40):
            with pytest.raises(
                tf.errors.InvalidArgumentError,
                match=rf"inputs of layer users must be in \[0, input_dim = 10\), not {bad}",
            ):
                lookup(tf.constant([[3, bad]], tf.int64))
    assert layer.table.size() == 0


def test_input_dim_is_a_bound_in_fit_and_nothing_is_trained():
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), HetEmbedding(10, 1, optimizer="sgd")]
    )
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match="input_dim = 10"):
        model.fit(np.array([[1, 2], [3, 10]]), np.zeros((2, 2, 1)), verbose=0)
    assert model.layers[0].table.size() == 0


SCALED = {
    "glorot_uniform": keras.initializers.GlorotUniform(1),
    "glorot_normal": keras.initializers.GlorotNormal(1),
    "he_uniform": keras.initializers.HeUniform(1),
    "he_normal": keras.initializers.HeNormal(1),
    "lecun_uniform": keras.initializers.LecunUniform(1),
    "lecun_normal": keras.initializers.LecunNormal(1),
    "fan out": keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=1),
}


def test_initializers_that_depend_on_the_shape(subtests):
    """The distribution is Keras's: moments and range of 100,000 draws each."""
    rows, dim = 5000, 20
    for name, initializer in SCALED.items():
        with subtests.test(name):
            ours = rows_of(HetEmbedding(rows, dim, initializer, seed=3), np.arange(rows))
            theirs = np.asarray(initializer((rows, dim)))
            np.testing.assert_allclose(ours.mean(), theirs.mean(), atol=0.02 * theirs.std())
            np.testing.assert_allclose(ours.std(), theirs.std(), rtol=0.01)
            np.testing.assert_allclose((ours**4).mean(), (theirs**4).mean(), rtol=0.05)
            if name != "fan out":
                np.testing.assert_allclose(np.abs(ours).max(), np.abs(theirs).max(), rtol=0.01)


def test_orthogonal():
    initializer = keras.initializers.Orthogonal(1.5)
    for shape in ((50, 7), (7, 50), (16, 16)):
        x = rows_of(HetEmbedding(*shape, initializer, seed=3), range(shape[0]))
        product = x.T @ x if shape[0] >= shape[1] else x @ x.T
        np.testing.assert_allclose(product, 1.5**2 * np.eye(min(shape)), atol=1e-5)
        other = rows_of(HetEmbedding(*shape, initializer, seed=4), [0])
        assert np.abs(other - x[:1]).max() > 1e-3


def test_weights_are_the_first_rows():
    given = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    for weights in (given, [given], given.tolist()):
        layer = HetEmbedding(ROWS, DIM, weights=weights, optimizer=optimizers.Adagrad(0.1))
        np.testing.assert_array_equal(rows_of(layer, range(ROWS)), given)
    without_bound = HetEmbedding(DIM, weights=given)
    np.testing.assert_array_equal(without_bound(np.array([5, 1]))[:, :], given[[5, 1]])
    assert without_bound(np.array([-7])).shape == (1, DIM)
    # As a row that was never updated is: Adagrad's accumulator is not zero.
    theirs = keras.layers.Embedding(ROWS, DIM, weights=given)
    ids = np.arange(ROWS)
    of_ours, of_theirs = keras.optimizers.SGD(), keras.optimizers.Adagrad(0.1)
    for each, optimizer in ((layer, of_ours), (theirs, of_theirs)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(each(ids)))
        gradients = tape.gradient(loss, each.trainable_variables)
        optimizer.apply(gradients, each.trainable_variables)
    np.testing.assert_allclose(rows_of(layer, ids), theirs.embeddings.numpy(), rtol=1e-5)


def test_pretrained_rows_as_keras_takes_them():
    given = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    theirs = keras.layers.Embedding(ROWS, DIM, weights=given)
    by_constant = HetEmbedding(ROWS, DIM, keras.initializers.Constant(given))
    np.testing.assert_array_equal(rows_of(by_constant, range(ROWS)), given)
    layer = HetEmbedding(ROWS, DIM, name="users", optimizer=sgd())
    with pytest.raises(ValueError, match="users has no table until it is built"):
        layer.set_weights(theirs.get_weights())
    layer.build()
    layer.set_weights(theirs.get_weights())
    np.testing.assert_array_equal(layer.table.lookup(np.arange(ROWS)), given)
    for wrong, message in (
        ([], r"set_weights of layer users takes \[matrix\].*, not 0 of them"),
        (given, r"set_weights of layer users takes \[matrix\]"),
        ([given[1:]], r"weights must have the shape \(300, 8\), not \(299, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.set_weights(wrong)
    np.testing.assert_array_equal(layer.table.lookup(np.arange(ROWS)), given)
    with pytest.raises(AttributeError, match=r"users has no matrix of embeddings.*table\.lookup"):
        _ = layer.embeddings


def clone(model):
    return keras.models.clone_model(model)


def reloaded(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        return keras.models.load_model(f"{folder}/model.keras")


COPIES = [
    ("embeddings_initializer", True, clone),
    ("embeddings_initializer", True, reloaded),
    ("embeddings_initializer", False, copy.deepcopy),
    ("weights", True, reloaded),
    ("weights", False, copy.deepcopy),
    ("weights", False, reloaded),
]


def test_copies_have_the_pretrained_rows(subtests):
    given = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    for argument, built, copied in COPIES:
        value = given if argument == "weights" else keras.initializers.Constant(given)
        layer = HetEmbedding(ROWS, DIM, optimizer=sgd(), **{argument: value})
        begin = [keras.Input((1,), dtype="int64")] if built else []
        with subtests.test(f"{argument}, {built=}, {copied.__name__}"):
            model = copied(keras.Sequential([*begin, layer]))
            np.testing.assert_array_equal(model(np.arange(ROWS)[:, None])[:, 0], given)


def test_trained_rows_come_back_in_the_place_of_those_given():
    layer = HetEmbedding(4, 2, keras.initializers.Constant(np.ones((4, 2))), optimizer=sgd())
    model = keras.Sequential([keras.Input((1,), dtype="int64"), layer])
    layer.table.assign([1, 2], np.full((2, 2), 5.0))
    again = reloaded(model)
    np.testing.assert_array_equal(rows_of(again.layers[0], range(4))[:, 0], [1, 5, 5, 1])


def test_a_weights_file_of_kerass_layer_says_what_to_do(tmp_path):
    begin = keras.Input((2,), dtype="int64")
    theirs = keras.Sequential([begin, keras.layers.Embedding(10, 4, name="users")])
    theirs.save_weights(tmp_path / "theirs.weights.h5")
    for sequential in (keras.Sequential, het_tf.keras.Sequential):
        ours = sequential([begin, HetEmbedding(10, 4, name="users")])
        message = r"no rows for the table of layer users.*set_weights\("
        with pytest.raises(ValueError, match=message):
            ours.load_weights(tmp_path / "theirs.weights.h5")


def test_what_keras_gives_its_own_layer():
    none = HetEmbedding(10, 4, lora_rank=None, lora_alpha=None, quantization_config=None)
    assert (none.input_dim, none.output_dim) == (10, 4)
    with pytest.warns(UserWarning, match="input_length has no use"):
        HetEmbedding(10, 4, input_length=3)
    theirs = keras.layers.Embedding(10, 4, "ones", "l2", "non_neg", True, name="users")
    ours = HetEmbedding.from_config(theirs.get_config())
    assert (ours.name, ours.mask_zero) == ("users", True)
    assert ours.embeddings_regularizer.l2 == theirs.embeddings_regularizer.l2
    np.testing.assert_array_equal(ours(np.array([[3]])), theirs(np.array([[3]])))


def test_what_keras_does_to_a_finished_matrix_is_refused():
    layer = HetEmbedding(10, 4, name="users")
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Dense(2)])
    with pytest.raises(NotImplementedError, match="layer users: there is no LoRA"):
        layer.enable_lora(4)
    with pytest.warns(UserWarning, match="layer users: rows are not quantized"):
        model.quantize("int8")
    assert model.layers[1].dtype_policy.quantization_mode == "int8"
    assert model(np.array([[1, 2]])).shape == (1, 2, 2)


def test_the_shape_of_the_output():
    for layer in (HetEmbedding(10, 4), HetEmbedding(10, 4, combiner="sum")):
        for shape in ((None,), (2, 3), (None, 5, None)):
            expected = layer(keras.Input(batch_shape=shape, dtype="int64")).shape
            assert layer.compute_output_shape(shape) == expected


def test_time_distributed():
    layer = HetEmbedding(10, 4, combiner="mean", optimizer=sgd())
    inputs = keras.Input((3, 2), dtype="int64")
    model = keras.Model(inputs, keras.layers.TimeDistributed(layer)(inputs))
    assert model.output_shape == (None, 3, 4)
    ids = np.array([[[1, 2], [3, 3], [1, 1]]])
    np.testing.assert_allclose(model.predict(ids, verbose=0), layer(ids), rtol=1e-6)


def fitted(make, ids, epochs=3) -> np.ndarray:
    """All rows after training, and the losses."""
    inputs = keras.Input((ids.shape[1],), dtype="int64")
    layer = make()
    outputs = keras.ops.sum(layer(inputs), axis=(1, 2))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    target = np.random.default_rng(5).normal(size=len(ids))
    losses = model.fit(ids, target, len(ids), epochs, shuffle=False, verbose=0).history["loss"]
    evaluated = model.evaluate(ids, target, batch_size=len(ids), verbose=0)
    rows = layer.table.lookup(np.arange(ROWS)) if hasattr(layer, "table") else layer.embeddings
    return np.asarray(rows), [*losses, evaluated]


# Every id is in every batch, so that Keras's layer, which regularizes all rows, is the same.
EVERY_ID = np.concatenate([np.arange(ROWS), np.arange(ROWS)[:60]]).reshape(-1, 4)
START = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype(np.float32)


def assert_trains_as_keras(**arguments) -> np.ndarray:
    """Compares rows and losses of the layer with those of Keras's; returns the rows."""
    arguments["weights"] = START
    ours, losses = fitted(
        lambda: HetEmbedding(ROWS, DIM, optimizer=sgd(0.1), **arguments), EVERY_ID
    )
    theirs, their_losses = fitted(lambda: keras.layers.Embedding(ROWS, DIM, **arguments), EVERY_ID)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(losses, their_losses, rtol=1e-4)
    return ours


def test_a_regularizer_is_that_of_keras_on_the_rows_of_the_step():
    for regularizer in ("l2", lambda x: keras.ops.sum(x**4) * 0.01):
        rows = assert_trains_as_keras(embeddings_regularizer=regularizer)
        assert np.abs(rows - START).max() > 0.01


def test_a_frozen_layer_has_no_penalty():
    losses = []
    for make in (HetEmbedding, keras.layers.Embedding):
        layer = make(ROWS, DIM, embeddings_regularizer="l2", weights=START, trainable=False)
        ids = keras.Input((4,), dtype="int64")
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Model(ids, dense(keras.layers.Flatten()(layer(ids))))
        model.compile("sgd", "mse")
        losses.append(model.evaluate(EVERY_ID, np.ones((len(EVERY_ID), 1)), verbose=0))
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_a_regularizer_is_of_rows_before_they_are_cast():
    """In float16 its gradient would be 0."""
    for policy in ("float16", "mixed_bfloat16", "float64"):
        layer = HetEmbedding(
            ROWS,
            DIM,
            embeddings_regularizer=keras.regularizers.L2(1e-8),
            weights=START,
            optimizer=sgd(1e6),
            dtype=policy,
        )
        with tf.GradientTape() as tape:
            layer(np.arange(ROWS))
            (loss,) = layer.losses
        np.testing.assert_allclose(loss, 1e-8 * (START**2).sum(), rtol=1e-5)
        train_rows(tape, loss, layer)
        np.testing.assert_allclose(rows_of(layer, range(ROWS)), START * 0.98, rtol=1e-5)


def test_rows_that_a_step_does_not_look_up_are_not_regularized():
    for combiner in (None, "sum"):
        layer = HetEmbedding(
            ROWS,
            DIM,
            embeddings_regularizer="l2",
            weights=START,
            optimizer=sgd(0.1),
            combiner=combiner,
        )
        with tf.GradientTape() as tape:
            layer(np.array([[4, 4, 7]]))
            loss = tf.add_n(layer.losses)
        np.testing.assert_allclose(loss, 0.01 * (START[[4, 7]] ** 2).sum(), rtol=1e-5)
        train_rows(tape, loss, layer)
        wanted = START.copy()
        wanted[[4, 7]] *= 1 - 0.1 * 2 * 0.01
        np.testing.assert_allclose(rows_of(layer, range(ROWS)), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "constraint",
    [
        keras.constraints.NonNeg(),
        pytest.param(keras.constraints.MaxNorm(1.5, axis=1), marks=pytest.mark.exhaustive),
        pytest.param(keras.constraints.UnitNorm(axis=-1), marks=pytest.mark.exhaustive),
        keras.constraints.MinMaxNorm(1.2, 1.5, axis=[1]),
    ],
    ids=lambda constraint: type(constraint).__name__,
)
def test_a_constraint_is_that_of_keras(constraint):
    assert_trains_as_keras(embeddings_constraint=constraint)


def test_a_model_with_all_of_them_is_saved_and_loaded(tmp_path):
    layer = HetEmbedding(
        ROWS,
        DIM,
        "glorot_uniform",
        keras.regularizers.L2(0.1),
        keras.constraints.MaxNorm(2, axis=1),
        True,
        START,
        optimizer=sgd(),
    )
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    ids = np.array([[1, 299]])
    np.testing.assert_array_equal(loaded.predict(ids, verbose=0), model.predict(ids, verbose=0))
    assert loaded.layers[0].embeddings_constraint.max_value == 2
