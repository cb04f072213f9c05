"""What compile and callbacks say to the layer, without a strategy."""

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf import optimizers


@keras.saving.register_keras_serializable("test_compile")
class Loss(keras.losses.Loss):
    """Whose gradient is -1."""

    def call(self, y_true, y_pred):
        return -y_pred


def make_model(model_class, layer, optimizer, **arguments) -> keras.Model:
    """A model whose gradient for every looked up element is -1."""
    inputs = keras.Input((), dtype="int64")
    model = model_class(inputs, layer(inputs))
    loss = lambda _, predicted: -keras.ops.sum(predicted)  # noqa: E731
    model.compile(optimizer, loss=loss, **arguments)
    return model


def new_layer(optimizer=None, **arguments) -> het_tf.layers.HetEmbedding:
    arguments = {"embeddings_initializer": "zeros", "seed": 1, **arguments}
    return het_tf.layers.HetEmbedding(1, optimizer=optimizer or optimizers.SGD(1.0), **arguments)


class Subclassed(het_tf.keras.Model):
    """Of one layer, and built when it is called first."""

    def __init__(self, layer=None, **arguments):
        super().__init__(**arguments)
        self.layer = layer or new_layer("same")
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        return self.dense(self.layer(inputs))


def fit(model, epochs: int, *callbacks, steps: int = 1):
    ids = np.full(steps, 7)
    model.fit(ids, ids * 0.0, batch_size=1, epochs=epochs, callbacks=list(callbacks), verbose=0)


KERAS_OPTIMIZERS = [
    kind
    for name, kind in sorted(vars(keras.optimizers).items())
    if isinstance(kind, type)
    and issubclass(kind, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
]


def test_every_optimizer_of_keras_trains_what_is_beside_the_layer():
    for kind in KERAS_OPTIMIZERS:
        layer, dense = new_layer(), keras.layers.Dense(1, kernel_initializer="ones")
        inputs = keras.Input((2,), dtype="int64")
        rows = keras.layers.Flatten()(layer(inputs))
        model = het_tf.keras.Model(inputs, dense(rows + 1.0))
        loss = lambda _, predicted: -keras.ops.sum(predicted)  # noqa: E731
        model.compile(kind(), loss=loss, run_eagerly=True)
        model.train_on_batch(np.array([[7, 8]]), np.zeros(1))
        np.testing.assert_array_equal(layer.table.lookup([7, 8]), [[1], [1]])
        assert (dense.kernel.numpy() != 1).all(), kind


def test_a_strategy_of_one_replica_is_as_none():
    layer = new_layer(optimizers.SGD(8.0))
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = make_model(het_tf.keras.Model, layer, keras.optimizers.SGD(0.5))
    fit(model, 2, rates_of(0.5, 0.25))
    assert layer.table.lookup([7]) == 8 + 4


# The learning rate.


def rates_of(*rates):
    return keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch])


@pytest.mark.parametrize("run_eagerly", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_learning_rate_scheduler_moves_the_layers_rate_by_the_same_factor(run_eagerly):
    """From what `compile` was told, through rates of zero."""
    layer = new_layer(optimizers.SGD(8.0))
    compiled = keras.optimizers.SGD(0.5)
    model = make_model(het_tf.keras.Model, layer, compiled, run_eagerly=run_eagerly)
    fit(model, 4, rates_of(0.0, 0.25, 0.0, 1.0))
    assert layer.table.lookup([7]) == 0 + 4 + 0 + 16
    assert float(layer.learning_rate.value) == 8
    # Another `compile` is no change of the rate.
    model.compile(keras.optimizers.SGD(0.125), loss=model.loss, run_eagerly=run_eagerly)
    fit(model, 2, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2))
    assert layer.table.lookup([7]) == 20 + 4 + 2


@pytest.mark.parametrize(
    ("kind", "rows"),
    [(Subclassed, "same"), (lambda layer: het_tf.keras.Sequential([layer]), "own")],
)
def test_a_model_that_is_built_after_compile_counts_from_it(kind, rows):
    layer = new_layer("same" if rows == "same" else optimizers.SGD(8.0))
    model = kind(layer)
    model.compile(keras.optimizers.SGD(0.5), loss=lambda _, y: -keras.ops.sum(y))
    if kind is Subclassed:
        model.dense.trainable = False
    fit(model, 2, rates_of(0.25, 0.125))
    own = 0.5 if rows == "same" else 8
    assert layer.table.lookup([7]) == own * (0.5 + 0.25)


def test_models_that_share_a_layer_have_a_factor_each():
    layer = new_layer(optimizers.SGD(1.0))
    first = make_model(het_tf.keras.Model, layer, keras.optimizers.SGD(1.0))
    second = make_model(het_tf.keras.Model, layer, keras.optimizers.SGD(0.25))
    fit(first, 1)
    first.optimizer.learning_rate = 2.0
    step = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: second.train_on_batch(np.array([7]), np.zeros(1))
    )
    fit(first, 2, step)
    assert layer.table.lookup([7]) == 1 + 2 * (1 + 2)


def test_rows_of_a_loaded_model_go_on_at_the_rate_that_callbacks_moved(tmp_path):
    def build():
        inputs = keras.Input((), dtype="int64")
        layer = new_layer(optimizers.SGD(8.0), name="users")
        model = het_tf.keras.Model(inputs, layer(inputs))
        model.compile(keras.optimizers.SGD(0.5), loss=Loss())
        return model

    model = build()
    fit(model, 1)
    model.optimizer.learning_rate = 0.25
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = build()
    loaded.load_weights(tmp_path / "model.weights.h5")
    for each in keras.models.load_model(tmp_path / "model.keras"), loaded:
        fit(each, 1)
        assert each.get_layer("users").table.lookup([7]) == 8 + 4


def test_a_rate_that_had_moved_itself_is_loaded(tmp_path):
    """As in files that were written when the layer's weight moved with the compiled rate."""
    layer = new_layer(optimizers.SGD(8.0), name="users")
    model = make_model(het_tf.keras.Model, layer, keras.optimizers.SGD(0.5))
    for moved, moved_with, expected in ((4.0, 0.25, 8.0), (0.0, -1 / 16, 8.0), (4.0, 0.0, 4.0)):
        keras.Model.save_weights(model, tmp_path / "old.weights.h5")  # without checksums
        with h5py.File(tmp_path / "old.weights.h5", "r+") as file:
            weights = file["layers/het_embedding/vars"]
            weights["1"][()] = moved
            weights["2"] = np.float32(moved_with)
        model.load_weights(tmp_path / "old.weights.h5")
        assert float(layer.learning_rate.value) == expected


def test_a_compiled_rate_of_zero_says_that_the_layer_has_its_own():
    with pytest.warns(UserWarning, match="has a learning rate of 0, .* at 1: give"):
        Subclassed(new_layer()).compile(keras.optimizers.SGD(0.0), "mse")  # not built yet
    layer = new_layer(optimizers.SGD(1.0), name="users")
    with pytest.warns(UserWarning, match="layer users trains with its own optimizer SGD"):
        fit(make_model(het_tf.keras.Model, layer, keras.optimizers.SGD(0.0)), 1)
    assert layer.table.lookup([7]) == 1


def test_an_optimizer_of_several_has_no_rate_that_could_be_zero(recwarn):
    layer = new_layer(name="users")
    of_all = keras.optimizers.SGD(0.5)
    several = keras.optimizers.MultiOptimizer(lambda variable: of_all)
    model = make_model(het_tf.keras.Model, layer, several)
    fit(model, 1)
    assert layer.table.lookup([7]) == 1
    assert not [each for each in recwarn if "learning rate of 0" in str(each.message)]


# compile's optimizer.


@pytest.mark.parametrize(
    ("run_eagerly", "predicts_first"),
    [
        (False, True),
        pytest.param(True, False, marks=pytest.mark.exhaustive),
        (False, False),
    ],
)
def test_same_takes_the_optimizer_of_compile(run_eagerly, predicts_first):
    layer = new_layer("same")
    compiled = keras.optimizers.SGD(0.5, momentum=0.5)
    model = make_model(het_tf.keras.Model, layer, compiled, run_eagerly=run_eagerly)
    if predicts_first:
        assert model.predict(np.array([7]), verbose=0) == 0
    fit(model, 2, rates_of(0.5, 0.25))
    # As Keras: velocity = 0.5 velocity + rate.
    assert layer.optimizer == optimizers.Momentum(0.5, momentum=0.5)
    assert layer.table.lookup([7]) == 0.5 + (0.25 + 0.25)


class Powers(keras.optimizers.schedules.LearningRateSchedule):
    """Of a user, who does not save it: without `get_config`."""

    def __call__(self, step):
        return 10.0 ** keras.ops.cast(step, "float32")


def test_a_schedule_is_followed_and_need_not_be_serializable():
    optimizer = keras.optimizers.SGD(Powers())
    for layer in (new_layer(optimizer), new_layer("same")):
        compiled = keras.optimizers.SGD(Powers())
        fit(make_model(het_tf.keras.Model, layer, compiled), 1, steps=3)
        assert layer.table.lookup([7]) == 111


def test_same_within_another_layer_is_as_its_own():
    class Around(keras.layers.Layer):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def call(self, inputs):
            return 2.0 * self.layer(inputs)

    layer = new_layer("same")
    model = make_model(het_tf.keras.Model, Around(layer), keras.optimizers.SGD(0.5))
    fit(model, 2)
    assert layer.table.lookup([7]) == 2


def test_same_in_a_subclassed_model_is_saved_and_loaded(tmp_path):
    model = Subclassed()
    model.compile(keras.optimizers.Adam(0.5), "mse")
    model.fit(np.array([7]), np.ones(1), verbose=0)
    model.save(tmp_path / "model.keras")
    custom = {"Subclassed": Subclassed}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=custom)
    assert loaded.layer.table.lookup([7]) == model.layer.table.lookup([7]) != 0
    for one, other in zip(loaded.dense.get_weights(), model.dense.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_same_without_a_compiled_model_says_what_is_missing():
    layer = new_layer("same", name="users", embeddings_initializer="ones")
    # It may be looked at, and set.
    assert layer(np.array([7])) == tf.function(layer)(tf.constant([7])) == 1
    layer.table.assign([7], [[3.0]])
    layer.flush()

    plain = keras.optimizers.SGD()
    plain.build(layer.trainable_variables)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([7])))
        plain.apply(tape.gradient(loss, layer.trainable_variables))

    for each in (step, tf.function(step)):
        with pytest.raises(ValueError, match=r"users has no optimizer .*optimizer=.*JointOptimiz"):
            each()
    assert layer.table.lookup([7]) == 3
    # What was set is there when the model is known.
    inputs = keras.Input((1,), dtype="int64")
    model = het_tf.keras.Model(inputs, layer(inputs))
    model.compile(
        keras.optimizers.SGD(1.0, momentum=0.5), lambda _, outputs: keras.ops.sum(outputs)
    )
    assert layer.table.slot_dim == 1
    assert layer.table.lookup([7]) == 3
    model.fit(np.array([[7]]), np.zeros((1, 1)), verbose=0)
    assert layer.table.lookup([7]) == 2


def test_same_refuses_an_optimizer_without_a_row_form_or_another_one_for_its_rows():
    with pytest.raises(ValueError, match="Nadam"):
        fit(make_model(het_tf.keras.Model, new_layer("same"), keras.optimizers.Nadam()), 1)
    model = make_model(het_tf.keras.Model, new_layer("same", name="users"), "sgd")
    fit(model, 1)
    model.compile(keras.optimizers.SGD(0.5), loss=model.loss)
    assert float(model.layers[1].learning_rate.value) == 0.5
    model.compile("adam", loss=model.loss)
    model.evaluate(np.array([7]), np.zeros(1), verbose=0)
    with pytest.raises(ValueError, match=r"users .*Adam"):
        fit(model, 1)


def test_same_takes_another_compile_after_one_that_failed(monkeypatch):
    layer = new_layer("same", name="users")
    layer.build()
    with monkeypatch.context() as patched:
        patched.setattr("het_tf.layers.layer_table.EmbeddingTable", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make_model(het_tf.keras.Model, layer, keras.optimizers.SGD(1.0))
    fit(make_model(het_tf.keras.Model, layer, keras.optimizers.SGD(1.0)), 1)
    assert layer.table.lookup([7]) == 1


def test_same_is_saved_and_loaded(tmp_path):
    inputs = keras.Input((), dtype="int64")
    model = het_tf.keras.Model(inputs, new_layer("same", name="users")(inputs))
    model.compile(keras.optimizers.Adam(0.5), "mse")
    model.fit(np.array([7]), np.ones(1), verbose=0)
    model.save(tmp_path / "model.keras")
    for compiled in (True, False):
        loaded = keras.models.load_model(tmp_path / "model.keras", compile=compiled)
        table = loaded.get_layer("users").table
        assert table.lookup([7]) == model.get_layer("users").table.lookup([7])
    fresh = het_tf.keras.Model.from_config(model.get_config())
    fresh.compile("sgd", "mse")
    fresh.fit(np.array([7]), np.ones(1), verbose=0)


# Keras's optimizers.


# Those of Keras are made in the test: variables made before a cluster was connected are lost.
TAKEN = [
    ("sgd", optimizers.SGD(0.01)),
    ("Adam", optimizers.Adam(0.001)),
    ("adagrad", optimizers.Adagrad(0.001)),
    ("ftrl", optimizers.Ftrl(0.001)),
    ("row_wise_adagrad", optimizers.RowWiseAdagrad()),
    (
        lambda: keras.optimizers.SGD(0.5, weight_decay=0.25),
        optimizers.SGD(0.5, weight_decay=0.25),
    ),
    (
        lambda: keras.optimizers.SGD(0.5, momentum=0.25, nesterov=True),
        optimizers.Momentum(0.5, momentum=0.25, nesterov=True),
    ),
    (
        lambda: keras.optimizers.Adam(0.5, beta_1=0.25, beta_2=0.75, epsilon=0.125),
        optimizers.Adam(0.5, beta_1=0.25, beta_2=0.75, epsilon=0.125),
    ),
    (
        lambda: keras.optimizers.Adagrad(0.5, initial_accumulator_value=0.25, epsilon=0.125),
        optimizers.Adagrad(0.5, initial_accumulator_value=0.25, epsilon=0.125),
    ),
    ("adamw", optimizers.AdamW(0.001, weight_decay=0.004)),
    ("rmsprop", optimizers.RMSprop(0.001)),
    ("lion", optimizers.Lion(0.001)),
    ("lamb", optimizers.LAMB(0.001)),
    (
        lambda: keras.optimizers.RMSprop(0.5, 0.25, 0.75, epsilon=0.125, centered=True),
        optimizers.RMSprop(0.5, rho=0.25, momentum=0.75, epsilon=0.125, centered=True),
    ),
    (
        lambda: keras.optimizers.Lion(0.5, 0.25, 0.75, weight_decay=0.125),
        optimizers.Lion(0.5, beta_1=0.25, beta_2=0.75, weight_decay=0.125),
    ),
    (
        lambda: keras.optimizers.AdamW(0.5, 0.125, 0.25, 0.75, epsilon=0.125),
        optimizers.AdamW(0.5, weight_decay=0.125, beta_1=0.25, beta_2=0.75, epsilon=0.125),
    ),
    (
        lambda: keras.optimizers.Lamb(0.5, 0.25, 0.75, epsilon=0.125, weight_decay=0.125),
        optimizers.LAMB(0.5, beta_1=0.25, beta_2=0.75, epsilon=0.125, weight_decay=0.125),
    ),
    (
        lambda: keras.optimizers.Ftrl(
            0.5,
            initial_accumulator_value=0.25,
            l1_regularization_strength=0.5,
            l2_regularization_strength=0.75,
            l2_shrinkage_regularization_strength=1.0,
            beta=0.125,
        ),
        optimizers.Ftrl(
            0.5, initial_accumulator_value=0.25, l1=0.5, l2=0.75, l2_shrinkage=1.0, beta=0.125
        ),
    ),
    (
        {"class_name": "Adam", "config": {"learning_rate": 0.5, "beta_1": 0.25}},
        optimizers.Adam(0.5, beta_1=0.25, epsilon=1e-7),
    ),
]


def test_an_optimizer_of_keras_or_its_name_is_taken(subtests):
    for given, taken in TAKEN:
        with subtests.test(taken.spec()):
            given = given() if callable(given) else given
            assert het_tf.layers.HetEmbedding(1, optimizer=given).optimizer == taken
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
    taken = het_tf.layers.HetEmbedding(1, optimizer=keras.optimizers.SGD(schedule)).optimizer
    assert taken.learning_rate.get_config() == schedule.get_config()
    # Defaults are those of Keras.
    for name in ("SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "Lion", "Ftrl"):
        with subtests.test(name):
            taken = het_tf.layers.HetEmbedding(1, optimizer=name).optimizer
            assert taken == getattr(optimizers, name)()


REFUSED = [
    (lambda: keras.optimizers.Nadam(), "Nadam"),
    (lambda: "nothing", "nothing"),
    (lambda: keras.optimizers.Adam(amsgrad=True), "amsgrad=True"),
    (lambda: keras.optimizers.AdamW(amsgrad=True), "amsgrad=True"),
    (lambda: keras.optimizers.SGD(clipnorm=1.0), "clipnorm=1.0"),
    (lambda: keras.optimizers.SGD(global_clipnorm=1.0), "global_clipnorm=1.0"),
    (lambda: keras.optimizers.Ftrl(learning_rate_power=-0.25), "learning_rate_power=-0.25"),
]


def test_what_has_no_row_form_is_refused_by_name(subtests):
    for make, named in REFUSED:
        with subtests.test(named), pytest.raises(ValueError, match=named):
            het_tf.layers.HetEmbedding(1, optimizer=make())


# What compile's optimizer has, and a layer's own has not.


LACKS = [
    ({"clipnorm": 1e-3}, r"has clipnorm=0.001, which rows of layer users go without.*clipnorm"),
    ({"clipvalue": 1e-3}, r"has clipvalue=0.001, .* clipnorm, which is of each row"),
    ({"use_ema": True}, r"has use_ema=True, which rows of layer users go without.*no average"),
    ({"weight_decay": 0.5}, r"has weight_decay=0.5, .*optimizer=.same."),
    (
        {"learning_rate": keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)},
        r"has a schedule as learning_rate, .*optimizer=.same.",
    ),
]


def test_what_rows_go_without_is_said(subtests):
    for arguments, message in LACKS:
        optimizer = keras.optimizers.SGD(**arguments)
        with subtests.test(message), pytest.warns(UserWarning, match=message):
            make_model(het_tf.keras.Model, new_layer(name="users"), optimizer)
    layer = new_layer(name="users")
    with pytest.warns(UserWarning, match=message):
        fit(make_model(het_tf.keras.Model, layer, optimizer), 1)
    assert layer.table.lookup([7]) == 1


def test_what_rows_have_is_not_said_to_be_missing(recwarn):
    schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    compiled = keras.optimizers.SGD(schedule, clipnorm=1.0, weight_decay=0.1)
    own = new_layer(optimizers.SGD(schedule, clipnorm=1.0, weight_decay=0.1))
    make_model(het_tf.keras.Model, own, compiled)
    make_model(het_tf.keras.Model, new_layer(trainable=False), compiled)
    fit(make_model(het_tf.keras.Model, new_layer("same"), keras.optimizers.SGD(schedule)), 1)
    assert not [each for each in recwarn if "go without" in str(each.message)]
