"""`optimizer="same"` does to rows what compile's optimizer does to Keras's matrix."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf.optimizers.joint_optimizer import innermost

IDS = np.random.default_rng(0).integers(0, 9, (48, 3))
Y = np.random.default_rng(1).normal(size=(48, 1)).astype(np.float32)


class DenseEmbedding(keras.layers.Layer):
    """The reference: the gradient of Keras's own is sparse, so it decays rows at another time."""

    def build(self, shape):
        ones = keras.initializers.Ones()
        self.embeddings = self.add_weight(shape=(9, 4), initializer=ones, name="embeddings")

    def call(self, ids):
        return keras.ops.one_hot(ids, 9) @ self.embeddings

    def compute_output_shape(self, shape):
        return (*shape, 4)

    def lookup(self, ids) -> np.ndarray:
        return self.embeddings.numpy()[ids]


class OurEmbedding(het_tf.layers.HetEmbedding):
    def __init__(self, **arguments):
        super().__init__(4, optimizer="same", embeddings_initializer="ones", **arguments)

    def lookup(self, ids) -> np.ndarray:
        return self.table.lookup(ids)


def called_once(embedding, ids):
    return keras.layers.Flatten()(embedding(ids))


def called_twice(embedding, ids):
    """Both calls' gradients go to rows of their own, as one update of SGD would."""
    first, rest = embedding(ids[:, :1]), embedding(ids[:, 1:])
    return keras.layers.Flatten()(keras.layers.Concatenate(axis=1)([first, rest]))


def distributed(embedding, ids):
    rows = keras.layers.TimeDistributed(embedding)(keras.layers.Reshape((3, 1))(ids))
    return keras.layers.Flatten()(rows)


def make_model(model_class, layer, optimizer, join=called_once, **arguments):
    ids = keras.Input((3,), dtype="int64")
    constant = keras.initializers.Constant(0.5)
    model = model_class(ids, keras.layers.Dense(1, kernel_initializer=constant)(join(layer, ids)))
    model.compile(optimizer, "mse", **arguments)
    return model


def fit(model, first=0, last=48, epochs=1):
    model.fit(IDS[first:last], Y[first:last], batch_size=4, shuffle=False, epochs=epochs, verbose=0)


def both(train) -> tuple[np.ndarray, np.ndarray]:
    """Rows of Keras's layer and of ours after `train(model_class, layer)`."""
    layers = DenseEmbedding(), OurEmbedding()
    for kind, layer in zip((keras.Model, het_tf.keras.Model), layers, strict=True):
        train(kind, layer)
    expected, actual = (layer.lookup(np.arange(9)) for layer in layers)
    assert np.abs(expected - 1).max() > 0.005
    return expected, actual


def decay() -> keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


SCHEDULED = {
    "alone": lambda: keras.optimizers.SGD(decay()),
    "accumulating": lambda: keras.optimizers.SGD(decay(), gradient_accumulation_steps=3),
    "clipping": lambda: keras.optimizers.SGD(decay(), global_clipnorm=0.5),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(decay()), initial_scale=2.0**6
    ),
}


@pytest.mark.parametrize(
    ("name", "join", "run_eagerly"),
    [
        ("alone", called_twice, False),
        ("alone", called_once, True),
        ("accumulating", distributed, False),
        pytest.param("clipping", called_twice, True, marks=pytest.mark.exhaustive),
        pytest.param("scaling", called_once, False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_schedule_is_asked_with_the_steps_of_the_optimizer(name, join, run_eagerly):
    def train(model_class, layer):
        model = make_model(
            model_class, layer, SCHEDULED[name](), join=join, run_eagerly=run_eagerly
        )
        fit(model, last=28)

    expected, actual = both(train)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_a_schedule_begins_anew_with_another_compile():
    def train(model_class, layer):
        model = make_model(model_class, layer, keras.optimizers.SGD(decay()))
        fit(model, last=16)
        model.compile(keras.optimizers.SGD(decay()), "mse")
        fit(model, last=16)

    expected, actual = both(train)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_a_schedule_goes_on_where_the_optimizer_was_saved(tmp_path):
    layer = het_tf.layers.HetEmbedding(4, optimizer="same", name="rows")
    model = make_model(het_tf.keras.Model, layer, keras.optimizers.SGD(decay()))
    fit(model, last=24)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in model, loaded:
        fit(each, first=24)
    rows = [each.get_layer("rows").table.lookup(np.arange(9)) for each in (model, loaded)]
    np.testing.assert_array_equal(*rows)


def test_a_schedule_in_a_loop_of_ones_own():
    def train(model_class, layer):
        model = make_model(model_class, layer, keras.optimizers.SGD(decay()))
        for ids, y in zip(IDS.reshape(12, 4, 3), Y.reshape(12, 4, 1), strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(ids, training=True) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    expected, actual = both(train)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.exhaustive
def test_all_calls_of_a_layer_are_accumulated_together():
    """Adagrad tells one update from two."""

    def train(model_class, layer):
        optimizer = keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=2)
        fit(make_model(model_class, layer, optimizer, join=called_twice))

    expected, actual = both(train)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


# Weight decay.


def test_rows_that_are_excluded_do_not_decay(subtests):
    def train(model_class, layer):
        optimizer = keras.optimizers.SGD(0.01, weight_decay=0.5)
        layer.build((None, 3))
        if excluded == "by variable":
            optimizer.exclude_from_weight_decay(var_list=layer.trainable_weights)
        elif excluded == "by name":
            optimizer.exclude_from_weight_decay(var_names=["bias", "embedding"])
        # In each batch all ids come: rows decay where they are updated.
        model = make_model(model_class, layer, optimizer)
        if excluded == "after compile":
            model.optimizer.exclude_from_weight_decay(var_names=["embeddings"])
        ids = np.arange(9).reshape(3, 3)
        for i in range(4):
            model.train_on_batch(ids, Y[i : i + 3])

    for excluded in ("by variable", "by name", "after compile", "not at all"):
        with subtests.test(excluded):
            expected, actual = both(train)
            np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_what_is_excluded_is_not_said_to_be_missing(recwarn):
    optimizer = keras.optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_names=["embeddings"])
    layer = het_tf.layers.HetEmbedding(4, optimizer=het_tf.optimizers.SGD(0.1))
    make_model(het_tf.keras.Model, layer, optimizer)
    assert not [each for each in recwarn if "go without" in str(each.message)]


def rates_of(*rates):
    return keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch])


def test_what_is_changed_after_compile_holds(subtests):
    def train(model_class, layer):
        model = make_model(model_class, layer, keras.optimizers.AdamW(0.1), run_eagerly=True)
        if change == "decay":
            model.optimizer.weight_decay = 0.5
        elif change == "beta":
            innermost(model.optimizer).beta_1 = 0.5
        else:
            model.optimizer.learning_rate = 0.01 if change == "rate" else decay()
        for _ in range(4):
            model.train_on_batch(np.arange(9).reshape(3, 3), Y[:3])

    for change in ("decay", "beta", "rate", "schedule"):
        with subtests.test(change):
            expected, actual = both(train)
            np.testing.assert_allclose(actual, expected, atol=1e-5)


# The rate is a number.


@pytest.mark.parametrize("first", [pytest.param("compile", marks=pytest.mark.exhaustive), "fit"])
def test_a_rate_that_begins_at_zero(first):
    """Rows stayed where they were for good."""

    def train(model_class, layer):
        rate = 0.0 if first == "compile" else 0.1
        model = make_model(model_class, layer, keras.optimizers.SGD(rate))
        rates = rates_of(0.0, 0.0, 0.1, 0.05)
        model.fit(IDS, Y, batch_size=16, epochs=4, shuffle=False, verbose=0, callbacks=[rates])

    expected, actual = both(train)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.exhaustive
def test_models_that_share_a_layer_have_a_rate_each():
    def train(model_class, layer):
        rates = (0.0, 0.1)
        models = [make_model(model_class, layer, keras.optimizers.SGD(rate)) for rate in rates]
        for _ in range(3):
            for model in models:
                fit(model, last=16)

    expected, actual = both(train)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_rate_that_is_set_in_a_loop_of_ones_own(in_graph):
    def train(model_class, layer):
        model = make_model(model_class, layer, keras.optimizers.SGD(0.1))
        fit(model, last=4)

        def step(ids, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(ids, training=True) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        step = tf.function(step) if in_graph else step
        for rate in (0.05, 0.0, 0.01):
            model.optimizer.learning_rate = rate
            step(tf.constant(IDS[:4]), tf.constant(Y[:4]))

    expected, actual = both(train)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_the_rate_of_the_layer_is_the_optimizers():
    layer = OurEmbedding()
    model = make_model(het_tf.keras.Model, layer, keras.optimizers.SGD(0.5))
    layer.learning_rate = 0.25
    assert float(model.optimizer.learning_rate.numpy()) == 0.25
    model.optimizer.learning_rate = 0.125
    assert float(layer.learning_rate.numpy()) == 0.125


# Frozen rows.


def test_a_frozen_layer_goes_with_any_optimizer():
    layer = OurEmbedding()
    teacher = make_model(het_tf.keras.Model, layer, keras.optimizers.SGD(0.1, momentum=0.9))
    fit(teacher)
    before = layer.table.export()
    layer.trainable = False
    student = make_model(het_tf.keras.Model, layer, "nadam")
    losses = [np.mean((student(IDS) - Y) ** 2)]
    fit(student, epochs=3)
    teacher.compile("nadam", "mse")
    fit(teacher)
    losses.append(np.mean((student(IDS) - Y) ** 2))
    assert losses[1] < losses[0]
    after = layer.table.export()
    np.testing.assert_array_equal(after.values, before.values)
    np.testing.assert_array_equal(after.slots, before.slots)


def test_a_model_that_only_evaluates_goes_with_any_optimizer():
    layer = OurEmbedding()
    model = make_model(het_tf.keras.Model, layer, keras.optimizers.SGD(0.1))
    fit(model)
    expected = pytest.approx(model.evaluate(IDS, Y, verbose=0))
    judge = het_tf.keras.Model(model.input, model.output)
    judge.compile(loss="mse", run_eagerly=True)  # with rmsprop
    assert judge.evaluate(IDS, Y, verbose=0) == expected
    fit(model)


# Rows that are there before there is a compile.


MATRIX = np.arange(36, dtype=np.float32).reshape(9, 4) / 36


def with_rows(matrix=None):
    matrix = MATRIX if matrix is None else matrix
    ids = keras.Input((3,), dtype="int64")
    layer = het_tf.layers.HetEmbedding(
        9, 4, optimizer="same", embeddings_initializer=keras.initializers.Constant(matrix)
    )
    return het_tf.keras.Model(ids, keras.layers.Dense(1)(called_once(layer, ids)))


def rows_of(model) -> np.ndarray:
    return model.layers[1].table.lookup(np.arange(9))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["keras", "weights.h5"])
def test_trained_rows_that_are_loaded_take_another_optimizer(kind, tmp_path):
    model = with_rows()
    model.compile("sgd", "mse")
    fit(model)
    if kind == "keras":
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
        optimizer = "adam"
    else:
        model.save_weights(tmp_path / "model.weights.h5")
        loaded, optimizer = with_rows(), "sgd"
        loaded.compile(optimizer, "mse")
        loaded.load_weights(tmp_path / "model.weights.h5")
        np.testing.assert_array_equal(rows_of(loaded), rows_of(model))
        optimizer = "adagrad"
    loaded.compile(optimizer, "mse")
    loaded.layers[1].binding.take(loaded.optimizer)
    np.testing.assert_array_equal(rows_of(loaded), rows_of(model))
    fit(loaded)
    assert np.abs(rows_of(loaded) - rows_of(model)).max() > 0


@pytest.mark.exhaustive
def test_what_was_predicted_before_a_step_is_not_predicted_after_it():
    """The function that predicts is traced with the table that is trained."""
    made = with_rows()
    made.compile("sgd", "mse")
    fit(made)
    clone = het_tf.keras.Model.from_config(made.get_config())
    clone.compile("adam", "mse")
    before = clone.predict(IDS, verbose=0)
    fit(clone, epochs=3)
    after = clone.predict(IDS, verbose=0)
    assert np.abs(after - before).max() > 0.001
    np.testing.assert_allclose(after, clone(IDS), rtol=1e-5)


def test_a_function_of_a_table_that_was_replaced_fails():
    model = with_rows()
    model.compile("sgd", "mse")
    base = het_tf.keras.Model(model.input, model.layers[1].output)
    model(IDS)  # makes the table
    base.predict(IDS, verbose=0)
    model.compile("adam", "mse")
    fit(model)
    with pytest.raises(tf.errors.OpError):
        base.predict(IDS, verbose=0)


def test_rows_that_were_updated_often_do_not_count_as_new(tmp_path):
    """Otherwise those that expire if they had few updates go."""
    ids = keras.Input((3,), dtype="int64")
    expiry = het_tf.Expiry(age=3, updates_below=3, time="given")
    layer = het_tf.layers.HetEmbedding(4, optimizer="same", expiry=expiry)
    model = het_tf.keras.Model(ids, keras.layers.Dense(1)(called_once(layer, ids)))
    model.compile("sgd", "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    loaded.compile("adam", "mse")
    loaded.layers[1].binding.take(loaded.optimizer)
    table = loaded.layers[1].table
    clocks = [np.sort(each.export().clocks) for each in (table, layer.table)]
    np.testing.assert_array_equal(*clocks)
    for now in range(5):
        assert table.expire(now) == 0


def test_slots_of_the_same_kind_are_kept(tmp_path):
    """Such as where Keras does not save what an optimizer excludes from weight decay."""
    model = with_rows()
    optimizer = keras.optimizers.Adam(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["embeddings"])
    model.compile(optimizer, "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.predict(IDS, verbose=0)
    assert loaded.layers[1].optimizer.weight_decay == pytest.approx(0.1)
    rows, kept = (each.layers[1].table.export() for each in (model, loaded))
    order, of_kept = np.argsort(rows.keys), np.argsort(kept.keys)
    assert rows.slots.any()
    for name in ("keys", "values", "slots", "clocks"):
        np.testing.assert_array_equal(getattr(rows, name)[order], getattr(kept, name)[of_kept])


@keras.saving.register_keras_serializable("test_same")
class Around(keras.layers.Layer):
    """Keras calls it, and so the layer in it, for the shape of its outputs."""

    def __init__(self, rows, **arguments):
        super().__init__(**arguments)
        self.rows = het_tf.layers.HetEmbedding.from_config(rows)

    def call(self, ids):
        return 2.0 * self.rows(ids)

    def get_config(self):
        return super().get_config() | {"rows": self.rows.get_config()}


@pytest.mark.exhaustive
def test_rows_within_a_layer_that_is_loaded_take_another_optimizer(tmp_path):
    rows = {"output_dim": 4, "optimizer": "same"}
    model = make_model(het_tf.keras.Model, Around(rows, name="around"), "sgd")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    loaded.compile("adam", "mse")
    old, new = (each.get_layer("around").rows for each in (model, loaded))
    new.binding.take(loaded.optimizer)
    expected = old.table.lookup(np.arange(9))
    np.testing.assert_array_equal(new.table.lookup(np.arange(9)), expected)
    fit(loaded)
    assert np.abs(new.table.lookup(np.arange(9)) - expected).max() > 0


def test_rows_that_a_function_trained_say_how_to_get_another_optimizer():
    model = with_rows()
    model.compile("sgd", "mse")
    fit(model)
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"cannot take Adam.*new.table.assign\(rows.keys"):
        fit(model)
    old, new = model.layers[1], with_rows()
    new.compile("adam", "mse")
    new(IDS)  # makes the table
    rows = old.table.export()
    new.layers[1].table.assign(rows.keys, rows.values)
    np.testing.assert_array_equal(rows_of(new), rows_of(model))


def test_a_compiled_model_is_saved_before_it_is_called(tmp_path):
    model = with_rows()
    model.compile("adam", "mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(rows_of(loaded), MATRIX)
    other = with_rows(np.zeros((9, 4)))
    other.compile("adam", "mse")
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(rows_of(other), rows_of(model))
