"""What compile's optimizer does with the gradients of a whole step: rows are a part of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf import optimizers
from het_tf.optimizers.joint_optimizer import scaler_of

IDS = np.random.default_rng(0).integers(0, 9, (40, 3))
X = np.random.default_rng(1).normal(size=(40, 2)).astype(np.float32)
Y = np.random.default_rng(2).normal(size=(40, 1)).astype(np.float32)


class DenseEmbedding(keras.layers.Layer):
    """The reference. The gradient of Keras's own is sparse, which its optimizers clip wrongly."""

    def __init__(self, combiner=None, **arguments):
        super().__init__(**arguments)
        self.combiner = combiner
        self.rows = self.add_weight(shape=(9, 4), initializer=keras.initializers.Constant(0.25))

    def call(self, ids):
        rows = keras.ops.one_hot(ids, 9, dtype=self.compute_dtype) @ self.rows
        return rows if self.combiner is None else keras.ops.mean(rows, axis=-2)

    def lookup(self, ids) -> np.ndarray:
        return self.rows.numpy()[ids]


class OurEmbedding(het_tf.layers.HetEmbedding):
    def lookup(self, ids) -> np.ndarray:
        return self.table.lookup(ids)


def make_model(embedding, dtype=None, **arguments) -> keras.Model:
    ids, x = keras.Input((3,), dtype="int64", name="ids"), keras.Input((2,), name="x")
    hidden = keras.layers.Concatenate(dtype=dtype)([keras.layers.Flatten()(embedding(ids)), x])
    constant = keras.initializers.Constant(0.5)
    outputs = keras.layers.Dense(1, kernel_initializer=constant, dtype=dtype)(hidden)
    outputs = keras.layers.Activation("linear", dtype="float32")(outputs)
    model = het_tf.keras.Model({"ids": ids, "x": x}, outputs)
    if arguments:
        model.compile(**arguments)
    return model


def both(make_optimizer, x=X, dtype=None, combiner=None, **arguments):
    """Trains with Keras's layer and with ours; returns both models and rows."""
    models, rows = [], []
    initializer = keras.initializers.Constant(0.25)
    for layer in (
        DenseEmbedding(combiner, dtype=dtype),
        OurEmbedding(
            4,
            optimizer="same",
            embeddings_initializer=initializer,
            combiner=combiner,
            dtype=dtype,
        ),
    ):
        model = make_model(layer, dtype, optimizer=make_optimizer(), loss="mse", **arguments)
        model.fit({"ids": IDS, "x": x}, Y, batch_size=4, shuffle=False, verbose=0, epochs=2)
        models.append(model)
        rows.append(layer.lookup(np.arange(9)))
    return models, rows


OPTIMIZERS = {
    "global_clipnorm": dict(global_clipnorm=0.5),
    "gradient_accumulation_steps": dict(gradient_accumulation_steps=3),
    "loss_scale_factor": dict(loss_scale_factor=64.0),
    "clipped and scaled": dict(global_clipnorm=0.5, loss_scale_factor=64.0),
}


@pytest.mark.parametrize(
    ("name", "combiner", "run_eagerly"),
    [
        ("global_clipnorm", None, False),
        ("gradient_accumulation_steps", "mean", False),
        pytest.param("gradient_accumulation_steps", None, True, marks=pytest.mark.exhaustive),
        pytest.param("loss_scale_factor", None, True, marks=pytest.mark.exhaustive),
        ("clipped and scaled", "mean", False),
    ],
)
def test_a_step_does_to_rows_what_keras_does(name, combiner, run_eagerly):
    make = lambda: keras.optimizers.SGD(0.1, **OPTIMIZERS[name])  # noqa: E731
    models, (expected, actual) = both(make, combiner=combiner, run_eagerly=run_eagerly)
    assert np.abs(expected - 0.25).max() > 0.005
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    weights = [model.layers[-2].get_weights() for model in models]
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("kind", ["checkpoint", "weights"])
def test_gradients_accumulated_before_a_restore_are_forgotten(tmp_path, kind):
    """Saved, and restored, in the middle of the steps that are accumulated."""

    def make():
        layer = OurEmbedding(4, optimizer="same", embeddings_initializer="ones")
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        return make_model(layer, optimizer=optimizer, loss="mse"), layer

    def train(model, steps, first):
        batch = slice(first, first + 4)
        for _ in range(steps):
            model.train_on_batch({"ids": IDS[batch], "x": X[batch]}, Y[batch])

    def restore(model):
        if kind == "weights":
            model.load_weights(path)
        else:
            tf.train.Checkpoint(model=model).read(path).assert_consumed()

    (model, layer), (other, other_layer) = make(), make()
    train(model, 3, 0)
    path = str(tmp_path / "start.weights.h5")
    if kind == "weights":
        model.save_weights(path)
    else:
        path = tf.train.Checkpoint(model=model).write(str(tmp_path / "start"))
    train(model, 2, 8)
    train(other, 1, 0)  # All of it is there.
    for each in (model, other):
        restore(each)
        train(each, 1, 4)
    rows, expected = (each.lookup(np.arange(9)) for each in (layer, other_layer))
    np.testing.assert_array_equal(rows, expected)


def test_rows_that_are_set_leave_what_others_have_accumulated():
    def train(assigns):
        layer = OurEmbedding(4, optimizer="same", embeddings_initializer="ones")
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        model = make_model(layer, optimizer=optimizer, loss="mse")
        for step in range(4):
            model.train_on_batch({"ids": IDS[:4], "x": X[:4]}, Y[:4])
            if assigns and step % 2 == 0:
                layer.table.assign([99], np.zeros((1, 4), np.float32))
        return layer.lookup(np.arange(9))

    np.testing.assert_array_equal(train(True), train(False))


def test_clipping_over_accumulated_steps_is_refused():
    optimizer = keras.optimizers.SGD(global_clipnorm=1.0, gradient_accumulation_steps=2)
    layer = OurEmbedding(4, optimizer="same", name="users")
    model = make_model(layer, optimizer=optimizer, loss="mse")
    with pytest.raises(ValueError, match=r"users .*global_clipnorm=1.0 .*accumulation_steps=2"):
        model.fit({"ids": IDS, "x": X}, Y, verbose=0)


def test_accumulated_steps_do_not_say_how_often_an_id_came():
    layer = OurEmbedding(4, optimizer=optimizers.SGD(cowclip=0.5), name="users")
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    model = make_model(layer, optimizer=optimizer, loss="mse")
    with pytest.raises(ValueError, match=r"users .*cowclip=0\.5 .*accumulation_steps=2"):
        model.fit({"ids": IDS, "x": X}, Y, verbose=0)


# mixed_float16.


@pytest.mark.parametrize(
    ("inner", "run_eagerly"),
    [
        pytest.param(dict(global_clipnorm=0.5), True, marks=pytest.mark.exhaustive),
        (dict(gradient_accumulation_steps=3), False),
    ],
)
def test_a_step_that_the_scaler_skips_updates_no_row(inner, run_eagerly):
    """Of the first steps some overflow in the dense gradients only, some everywhere."""
    x = X.copy()
    x[:8] = 30000

    def make():
        optimizer = keras.optimizers.SGD(0.01, **inner)
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**17)

    models, (expected, actual) = both(make, x=x, dtype="mixed_float16", run_eagerly=run_eagerly)
    scales = [float(scaler_of(model.optimizer).dynamic_scale.numpy()) for model in models]
    assert scales[0] == scales[1] < 2**17
    assert np.abs(expected - 0.25).max() > 0.005
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_rows_that_overflow_skip_the_step_of_the_whole_model():
    layer = OurEmbedding(
        1, optimizer=optimizers.SGD(1.0), embeddings_initializer="zeros", dtype="mixed_float16"
    )
    ids = keras.Input((), dtype="int64")
    model = het_tf.keras.Model(ids, keras.ops.cast(layer(ids), "float32"))
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=2.0**20
    )
    model.compile(optimizer, loss=lambda _, predicted: -keras.ops.sum(predicted))
    sizes = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: sizes.append(layer.table.size())
    )
    model.fit(np.full(6, 3), np.zeros(6), batch_size=1, callbacks=[note], verbose=0)
    # A gradient of 2**20 is beyond float16, and so are 2**19 to 2**16; 2**15 is not.
    assert sizes == [0, 0, 0, 0, 0, 1]
    assert layer.table.lookup([3]) == 1
    assert int(optimizer.iterations.numpy()) == 1


# NaN.


def test_rows_that_are_skipped_do_not_count_in_the_norm():
    """Otherwise one bad id makes NaN of all dense weights."""
    layer = OurEmbedding(
        2, nonfinite="skip", embeddings_initializer="ones", optimizer=optimizers.SGD(1.0)
    )
    dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
    ids, weights = keras.Input((2,), dtype="int64"), keras.Input((2,))
    features = keras.Input((4,))
    of_rows = keras.ops.sum(layer(ids, weights=weights), [1, 2])[:, None]
    model = het_tf.keras.Model([ids, weights, features], of_rows + dense(features))
    model.compile(keras.optimizers.SGD(0.1, global_clipnorm=1.0), lambda y, p: keras.ops.sum(p))
    given = [np.array([[1, 2]]), np.array([[np.inf, 1]], np.float32), np.ones((1, 4), np.float32)]
    model.train_on_batch(given, np.zeros((1, 1)))
    # What is left: four weights and two columns of a row, of a gradient of 1 each.
    norm = 6**0.5
    np.testing.assert_allclose(dense.get_weights()[0], np.full((4, 1), 1 - 0.1 / norm), rtol=1e-6)
    np.testing.assert_allclose(layer.lookup([1, 2]), [[1, 1], [1 - 1 / norm] * 2], rtol=1e-6)


def test_a_nan_in_a_gradient_names_the_layer():
    layer = het_tf.layers.HetEmbedding(1, name="users", optimizer="sgd")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(np.array([1, 2]))) * float("nan")
    gradients = tape.gradient(loss, layer.trainable_variables)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"users.*NaN or infinity for 2 of 2"):
        keras.optimizers.SGD().apply(gradients, layer.trainable_variables)


# Loops of one's own.


def loop_over(model, optimizer, in_function: bool) -> None:
    """Trains in the way of Keras's guide, without compile and fit."""

    def step(ids, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model({"ids": ids, "x": x}, training=True) - y))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = tf.function(step) if in_function else step
    for i in range(0, 24, 4):
        step(*(tf.constant(each[i : i + 4]) for each in (IDS, X, Y)))


LOOPS = {
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
    "gradient_accumulation_steps": lambda: keras.optimizers.Adam(
        0.1, gradient_accumulation_steps=3
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
    "scaled and clipped": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5, global_clipnorm=0.1)
    ),
}


def models_of_a_loop(make_optimizer):
    optimizer = make_optimizer()
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own = type(inner)(float(inner.learning_rate.numpy()))
    constant = keras.initializers.Constant(0.25)
    ours = OurEmbedding(4, optimizer=own, embeddings_initializer=constant, name="users")
    return make_model(DenseEmbedding()), make_model(ours), ours


@pytest.mark.parametrize(
    ("name", "in_function", "is_built"),
    [
        ("global_clipnorm", False, True),
        ("gradient_accumulation_steps", True, True),
        ("scaled", True, False),
        ("scaled and clipped", False, False),
    ],
)
def test_a_loop_with_a_joint_optimizer_does_to_rows_what_keras_does(name, in_function, is_built):
    reference, model, layer = models_of_a_loop(LOOPS[name])
    optimizer = LOOPS[name]()
    loop_over(reference, optimizer, in_function)
    optimizer = optimizers.JointOptimizer(LOOPS[name]())
    if is_built:
        optimizer.build(model.trainable_variables)
    loop_over(model, optimizer, in_function)
    expected = reference.layers[1].lookup(np.arange(9))
    np.testing.assert_allclose(layer.lookup(np.arange(9)), expected, rtol=1e-5, atol=1e-6)
    assert np.abs(expected - 0.25).max() > 1e-3


def test_same_in_a_loop_whose_optimizer_was_not_built_says_what_to_do():
    layer = OurEmbedding(4, optimizer="same", name="users")
    optimizer = optimizers.JointOptimizer(keras.optimizers.SGD())
    message = r"rows of layer users .*optimizer\.build\(model\.train"
    with pytest.raises(ValueError, match=message):
        loop_over(make_model(layer), optimizer, in_function=True)
    optimizer.build(make_model(layer).trainable_variables)


def test_what_a_joint_optimizer_cannot_wrap_is_refused():
    joint = optimizers.JointOptimizer(keras.optimizers.SGD())
    for inner in ("sgd", joint):
        with pytest.raises(ValueError, match="inner_optimizer must be an optimizer of keras"):
            optimizers.JointOptimizer(inner)
    with pytest.raises(ValueError, match=r"write JointOptimizer\(LossScaleOptimizer\(inner\)\)"):
        keras.optimizers.LossScaleOptimizer(joint)
    built, model = keras.optimizers.Adam(), make_model(OurEmbedding(4, optimizer="sgd"))
    built.build(model.trainable_variables)
    with pytest.raises(ValueError, match=f"{built.name} was built before a JointOptimizer"):
        optimizers.JointOptimizer(built).build(model.trainable_variables)


def test_a_gradient_that_was_accumulated_by_another_optimizer_is_refused():
    model = make_model(OurEmbedding(4, optimizer="sgd", name="users"))
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"layer users .*JointOptimizer\(inner\) accumulates"):
        loop_over(model, optimizer, in_function=True)
