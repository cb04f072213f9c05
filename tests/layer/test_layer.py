"""HetEmbedding without a strategy, in plain Keras: the table lives in this process.

What rows start as, and the optimizers against Keras's, are in test_table.py.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf import optimizers

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
SPREAD = (0, 1, -1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63))


@pytest.fixture(autouse=True)
def _same_every_time():
    keras.utils.set_random_seed(1)


def new_layer(dim: int = 4, rate=1.0, **arguments) -> het_tf.layers.HetEmbedding:
    arguments = {"optimizer": optimizers.SGD(rate), "seed": 2, **arguments}
    return het_tf.layers.HetEmbedding(dim, **arguments)


def zero_layer(dim: int = 1, **arguments) -> het_tf.layers.HetEmbedding:
    return new_layer(dim, embeddings_initializer="zeros", **arguments)


def train(layer: het_tf.layers.HetEmbedding, ids, gradient=-1.0) -> None:
    """One step whose gradient is the same for every element."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(layer(ids), tf.float32)) * gradient
    train_rows(tape, loss, layer)


# In fit.

IDS = np.random.default_rng(0).integers(0, 50, (512, 3)) - 25
LABELS = (IDS.sum(axis=1) > 0).astype(np.float32)


class Subclassed(keras.Model):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.head = keras.layers.Dense(1, activation="sigmoid")

    def call(self, ids):
        return self.head(keras.ops.sum(self.embedding(ids), axis=1))


def functional(embedding) -> keras.Model:
    inputs = keras.Input((3,), dtype="int64")
    summed = keras.ops.sum(embedding(inputs), axis=1)
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(summed))


def sequential(embedding) -> keras.Model:
    head = [keras.layers.Flatten(), keras.layers.Dense(1, activation="sigmoid")]
    return keras.Sequential([keras.Input((3,), dtype="int64"), embedding, *head])


@pytest.mark.parametrize("build", [functional, Subclassed, sequential])
def test_fit_trains_the_table(build):
    layer = new_layer(optimizer=optimizers.RowWiseAdagrad(0.1))
    model = build(layer)
    model.compile(keras.optimizers.Adam(0.05), loss="binary_crossentropy")
    losses = model.fit(IDS, LABELS, batch_size=64, epochs=5, shuffle=False, verbose=0).history[
        "loss"
    ]
    assert losses[-1] < 0.7 * losses[0]
    rows = layer.table.export()
    assert sorted(rows.keys) == list(range(-25, 25))
    batches = [set(IDS[first : first + 64].ravel()) for first in range(0, 512, 64)]
    updates = {key: 5 * sum(key in batch for batch in batches) for key in range(-25, 25)}
    assert dict(zip(rows.keys.tolist(), rows.clocks.tolist(), strict=True)) == updates
    assert np.abs(rows.values - new_table_values(layer, rows.keys)).min(axis=1).max() > 1e-3

    before = layer.table.export()
    model.evaluate(IDS, LABELS, verbose=0)
    model.predict(IDS + 1000, verbose=0)
    np.testing.assert_array_equal(layer.table.export().clocks, before.clocks)
    np.testing.assert_array_equal(layer.table.export().values, before.values)


def new_table_values(layer: het_tf.layers.HetEmbedding, keys) -> np.ndarray:
    table = het_tf.EmbeddingTable(layer.output_dim, layer.optimizer, seed=layer.seed)
    return table.lookup(keys)


def test_a_layer_that_is_not_trainable_keeps_its_table():
    layer = new_layer()
    train(layer, np.array([1, 2]))
    before = layer.table.export().values
    model = functional(layer)
    layer.trainable = False
    model.compile("sgd", loss="binary_crossentropy")
    model.fit(IDS, LABELS, verbose=0)
    assert layer.table.size() == 2
    np.testing.assert_array_equal(layer.table.export().values, before)
    layer.trainable = True
    model.compile("sgd", loss="binary_crossentropy")
    model.fit(IDS, LABELS, verbose=0)
    assert layer.table.size() == 50


def test_a_layer_that_is_made_so_is_not_trainable_without_a_word(recwarn):
    layer = new_layer(trainable=False)
    model = functional(layer)
    assert not layer.trainable_variables
    assert not any(variable.name == "anchor" for variable in model.trainable_variables)
    model.compile("sgd", loss="binary_crossentropy")
    model.fit(IDS, LABELS, verbose=0)
    assert layer.table.size() == 0
    assert not [str(w.message) for w in recwarn if "Gradients do not exist" in str(w.message)]
    layer.trainable = True
    model.compile("sgd", loss="binary_crossentropy")
    model.fit(IDS, LABELS, verbose=0)
    assert layer.table.size() == 50


def test_a_layer_called_twice_in_a_step_updates_twice():
    layer = zero_layer()
    inputs = [keras.Input((), dtype="int64") for _ in range(2)]
    model = keras.Model(inputs, keras.ops.squeeze(layer(inputs[0]) + layer(inputs[1]), -1))
    model.compile("sgd", loss=lambda _, predicted: -keras.ops.mean(predicted))
    model.fit([np.array([1]), np.array([1])], np.zeros(1), verbose=0)
    rows = layer.table.export()
    assert (rows.keys.tolist(), rows.values.tolist(), rows.clocks.tolist()) == ([1], [[2]], [2])


def test_two_layers_have_two_tables():
    first, second = zero_layer(name="same"), zero_layer(name="same")
    train(first, np.array([1]))
    second.build()
    assert (first.table.size(), second.table.size()) == (1, 0)


# Shapes, dtypes and keys.


def test_ids_of_any_shape():
    for shape in ((), (5,), (0,), (2, 3), (2, 3, 4), (2, 0, 4)):
        layer = new_layer()
        ids = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        wanted = layer_values(layer, ids)
        assert wanted.shape == (*shape, 4)
        np.testing.assert_array_equal(layer(tf.constant(ids)), wanted)
        signature = [tf.TensorSpec([None] * len(shape), tf.int64)]
        traced = tf.function(layer, input_signature=signature, autograph=False)
        np.testing.assert_array_equal(traced(tf.constant(ids)), wanted)
        assert layer.compute_output_spec(keras.KerasTensor(shape, "int64")).shape == (*shape, 4)
        train(layer, tf.constant(ids))
        np.testing.assert_allclose(layer(tf.constant(ids)), wanted + 1, rtol=1e-6)
        assert layer.table.size() == ids.size


def layer_values(layer: het_tf.layers.HetEmbedding, ids) -> np.ndarray:
    if not layer.built:
        layer.build()
    return layer.table.lookup(ids)


def test_ids_of_any_integer_dtype_stay_distinct(subtests):
    """In training, not only in a lookup: 2^24 + 1 and so on keep their rows."""
    for dtype in INTEGERS:
        with subtests.test(dtype):
            check_ids_of(dtype)


def check_ids_of(dtype):
    limits = np.iinfo(dtype)
    largest = min(limits.max, 2**63 - 1)
    fitting = [key for key in SPREAD if limits.min <= key <= largest]
    fitting += [largest, largest - 1, limits.min, limits.min + 1]
    ids = np.array(list(dict.fromkeys(fitting)), dtype)
    layer = zero_layer()
    inputs = keras.Input((), dtype=dtype)
    model = keras.Model(inputs, keras.ops.squeeze(layer(inputs), -1))
    # The gradient of id i is -(i + 1).
    loss = lambda weight, predicted: -keras.ops.sum(weight * predicted)  # noqa: E731
    run_eagerly = dtype not in ("uint8", "int32", "uint64")
    model.compile("sgd", loss=loss, run_eagerly=run_eagerly)
    weights = np.arange(1.0, len(ids) + 1)
    model.train_on_batch(ids, weights)
    keys = ids.astype(np.int64)
    assert sorted(layer.table.export().keys) == sorted(keys)
    np.testing.assert_array_equal(layer.table.lookup(keys)[:, 0], weights)
    np.testing.assert_array_equal(model.predict_on_batch(ids), weights)


def test_mask_zero():
    inputs = keras.Input((3,), dtype="int64")
    embedded = zero_layer(mask_zero=True)(inputs)
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(embedded))
    layer = model.layers[1]
    train(layer, np.array([5, 6]))
    train(layer, np.array([6]))
    ids = np.array([[5, 6, 0], [0, 5, 0]])
    np.testing.assert_array_equal(model.predict(ids, verbose=0), [[1.5], [1]])
    np.testing.assert_array_equal(layer.compute_mask(ids), ids != 0)
    assert zero_layer().compute_mask(ids) is None


# Precision.


@pytest.mark.parametrize("combiner", [None, "sum"])
def test_rows_are_float32_whatever_the_compute_dtype(combiner):
    for policy in ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16", "float64"):
        layer = zero_layer(dtype=policy, combiner=combiner)
        ids = np.array([1, 2]) if combiner is None else np.array([[1], [2]])
        compute_dtype = keras.DTypePolicy(policy).compute_dtype
        symbol = keras.KerasTensor(ids.shape, "int64")
        assert layer.compute_output_spec(symbol).dtype == compute_dtype
        assert layer(ids).dtype.name == compute_dtype
        for _ in range(3):
            train(layer, ids, -1 - 2.0**-6)
        rows = layer.table.lookup([1, 2])
        np.testing.assert_array_equal(rows, np.full((2, 1), 3 * (1 + 2.0**-6)))


def fitted_once(model_class=keras.Model, **compile_arguments) -> np.ndarray:
    inputs = keras.Input((), dtype="int64")
    layer = zero_layer()
    model = model_class(inputs, keras.ops.cast(layer(inputs), "float32"))
    loss = lambda _, predicted: -keras.ops.sum(predicted)  # noqa: E731
    model.compile(keras.optimizers.SGD(1.0), loss=loss, **compile_arguments)
    model.fit(np.array([3]), np.zeros(1), verbose=0)
    return layer.table.lookup([3])


@pytest.fixture
def _mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.usefixtures("_mixed_float16")
@pytest.mark.parametrize("auto_scale_loss", [False, True])
def test_mixed_float16_in_fit(auto_scale_loss):
    assert fitted_once(het_tf.keras.Model, auto_scale_loss=auto_scale_loss) == 1


@pytest.mark.usefixtures("_mixed_float16")
def test_mixed_float16_in_a_plain_model_says_what_to_write():
    with pytest.raises(ValueError, match=r"as a LossScaleOptimizer does: .*JointOptimizer\(optim"):
        fitted_once()
    assert fitted_once(auto_scale_loss=False) == 1


# The learning rate.


def test_a_learning_rate_schedule_is_asked_with_the_updates_made():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [1.0, 10.0, 100.0])
    layer = zero_layer(rate=schedule)
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", loss=lambda _, predicted: -keras.ops.sum(predicted))
    model.fit(
        np.full(6, 7), np.zeros(6), batch_size=1, verbose=0
    )  # steps 0 and 1, 2 and 3, 4 and 5
    assert layer.table.lookup([7]) == 2 * 1 + 2 * 10 + 2 * 100
    (updates,) = (weight for weight in layer.weights if weight.name == "iterations")
    assert schedule(updates.value) == 100


@keras.saving.register_keras_serializable("het_tf_tests")
class EverySecond(keras.optimizers.schedules.LearningRateSchedule):
    """One of a user's own."""

    def __call__(self, step):
        return keras.ops.where(step % 2 == 0, 0.5, 0.25)

    def get_config(self):
        return {}


SCHEDULES = keras.optimizers.schedules


@pytest.mark.exhaustive
def test_any_schedule_of_keras(subtests):
    start = np.ones((10, 2), np.float32)
    ids = np.arange(20).reshape(10, 2) % 10
    for schedule in (
        SCHEDULES.ExponentialDecay(0.5, 3, 0.5, staircase=True),
        SCHEDULES.PolynomialDecay(0.5, 5, 0.1, power=2.0, cycle=True),
        SCHEDULES.InverseTimeDecay(0.5, 2, 0.5),
        SCHEDULES.PiecewiseConstantDecay([1, 4], [0.5, 0.25, 0.125]),
        SCHEDULES.CosineDecay(0.1, 6, warmup_target=0.5, warmup_steps=3),
        SCHEDULES.CosineDecayRestarts(0.5, 3),
        EverySecond(),
    ):
        layer = het_tf.layers.HetEmbedding(10, 2, weights=start, optimizer=optimizers.SGD(schedule))
        layer = het_tf.layers.HetEmbedding.from_config(layer.get_config())
        theirs = keras.layers.Embedding(10, 2, weights=start)
        layer(ids)  # builds it
        layer.table.assign(np.arange(10), start)
        optimizer = keras.optimizers.SGD(schedule)
        for step in range(8):
            batch = ids[5 * (step % 2) :][:5]
            for embedding in (layer, theirs):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(embedding(batch) ** 2)
                if embedding is theirs:
                    gradients = tape.gradient(loss, embedding.trainable_variables)
                    optimizer.apply(gradients, embedding.trainable_variables)
                else:
                    train_rows(tape, loss, embedding)
        rows = [embedding(ids) for embedding in (layer, theirs)]
        with subtests.test(type(schedule).__name__):
            np.testing.assert_allclose(*rows, rtol=1e-5)


def test_an_assigned_learning_rate_counts_from_the_next_step_on_without_retracing():
    layer = zero_layer()
    layer.build()
    traces = []

    @tf.function
    def step(ids):
        traces.append(1)
        train(layer, ids)

    for rate in (1.0, 0.5, 0.0, 4.0):
        if rate < 1:
            layer.learning_rate.assign(rate)
        else:
            layer.learning_rate = rate
        step(tf.constant([7]))
    assert len(traces) == 1
    assert layer.table.lookup([7]) == 5.5
    assert float(layer.learning_rate.value) == 4


# Outside of Keras.


def test_gradients_of_other_weights_are_right():
    """The layer's zero gradient must not disturb the model's."""
    layer = new_layer()
    dense = keras.layers.Dense(1, use_bias=False)
    ids = np.array([1, 2, 3])
    values = layer_values(layer, ids)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(dense(layer(ids)))
    variables = [*layer.trainable_variables, *dense.trainable_variables]
    gradients = tape.gradient(loss, variables)
    assert abs(float(gradients[0])) < 1e-20
    kernel = dense.kernel.numpy()[:, 0]
    keras.optimizers.SGD().apply(gradients, variables)
    np.testing.assert_allclose(gradients[1][:, 0], values.sum(axis=0), rtol=1e-6)
    np.testing.assert_allclose(layer.table.lookup(ids), values - kernel, rtol=1e-6)


def test_occurrences_of_an_id_are_one_update_with_the_sum_of_their_gradients():
    layer = zero_layer()
    train(layer, np.array([[9, 9, 9], [9, 8, 9]]))
    rows = layer.table.export()
    assert dict(zip(rows.keys.tolist(), rows.values[:, 0].tolist(), strict=True)) == {9: 5, 8: 1}
    assert rows.clocks.tolist() == [1, 1]


def test_a_loop_in_a_tf_function():
    layer = zero_layer()
    layer.build()

    @tf.function
    def steps(count):
        for i in tf.range(count):
            train(layer, i[tf.newaxis] % 2)

    steps(tf.constant(10))
    assert layer.table.lookup([0, 1]).tolist() == [[5], [5]]


def test_a_lookup_without_a_tape_changes_nothing():
    layer = new_layer()
    layer(np.arange(100))
    tf.function(layer)(np.arange(100))
    assert layer.table.size() == 0
