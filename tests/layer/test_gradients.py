"""Which gradients train the table, and with what, without a strategy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf import optimizers

IDS = tf.constant([1, 2])


def new_layer(**arguments) -> het_tf.layers.HetEmbedding:
    """Built, of zeros, and with a step of 1."""
    arguments = {"optimizer": optimizers.SGD(1.0), "embeddings_initializer": "zeros", **arguments}
    layer = het_tf.layers.HetEmbedding(1, seed=1, name="users", **arguments)
    layer.build()
    return layer


def loss_of(layer) -> tf.Tensor:
    return -tf.reduce_sum(layer(IDS))


def rows(layer) -> list[float]:
    return layer.table.lookup(IDS.numpy())[:, 0].tolist()


@pytest.fixture(params=[False, True], ids=["eager", "function"])
def run(request):
    """Runs a step eagerly or as a `tf.function`."""
    return lambda step: (tf.function(step) if request.param else step)()


def traced(step):
    """Runs a step as a `tf.function`."""
    return tf.function(step, autograph=False)()


# What was not asked for.


def test_a_gradient_of_dense_weights_does_not_train_the_table(run):
    layer, dense = new_layer(), keras.layers.Dense(1)
    dense.build((None, 1))

    def step():
        with tf.GradientTape() as tape:
            loss = -tf.reduce_sum(dense(layer(IDS)))
        return tape.gradient(loss, dense.trainable_variables)

    assert all(gradient is not None for gradient in run(step))
    assert layer.table.size() == 0


def test_a_gradient_of_the_layers_output_does_not_train_the_table():
    layer = new_layer()

    def step():
        with tf.GradientTape() as tape:
            embedded = layer(IDS)
            loss = tf.reduce_sum(embedded**2 + 3 * embedded)
        return tape.gradient(loss, embedded)

    np.testing.assert_array_equal(traced(step), [[3], [3]])
    assert layer.table.size() == 0


def test_a_gradient_penalty_trains_with_its_own_gradient_only():
    """The inner tape asks for the output's gradient, the outer one for the layer's weights."""
    layer = new_layer()

    def step():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                embedded = layer(IDS)
                loss = tf.reduce_sum(embedded**2 + 3 * embedded)
            slope = inner.gradient(loss, embedded)
            penalty = tf.reduce_sum(slope)
        outer.gradient(penalty, layer.trainable_variables)

    traced(step)
    assert rows(layer) == [-2, -2]


# Twice.


def test_a_jacobian_of_the_layers_weight_is_refused():
    layer = new_layer()
    anchor = layer.anchor.value
    for sources in (anchor, [anchor]):

        def step(sources=sources):
            with tf.GradientTape() as tape:
                outputs = layer(IDS) + tf.zeros([2, 1])
            tape.jacobian(outputs, sources)

        message = "jacobian cannot be of a weight of layer users"
        with pytest.raises(NotImplementedError, match=message):
            traced(step)
    assert rows(layer) == [0, 0]


def test_a_jacobian_of_other_weights_trains_nothing():
    layer, factor = new_layer(), tf.Variable([2.0, 3.0])

    def step():
        with tf.GradientTape() as tape:
            outputs = (layer(IDS)[:, 0] + 1) * factor
        return tape.jacobian(outputs, [factor])

    np.testing.assert_array_equal(traced(step)[0], np.eye(2))
    assert rows(layer) == [0, 0]


def test_a_persistent_tape_asked_twice_trains_once():
    layer, dense = new_layer(), keras.layers.Dense(1, kernel_initializer="ones")
    dense.build((None, 1))

    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = -tf.reduce_sum(dense(layer(IDS)))
        tape.gradient(loss, dense.trainable_variables)
        tape.gradient(loss, layer.trainable_variables)
        tape.gradient(loss, [layer.trainable_variables, dense.trainable_variables])

    traced(step)
    assert rows(layer) == [1, 1]


def test_a_persistent_tape_asked_for_another_loss_says_what_to_do():
    layer = new_layer()

    def step():
        with tf.GradientTape(persistent=True) as tape:
            embedded = layer(IDS)
            first, second = tf.reduce_sum(embedded), tf.reduce_sum(embedded**2)
        tape.gradient(first, layer.trainable_variables)
        tape.gradient(second, layer.trainable_variables)

    with pytest.raises(ValueError, match=r"users .* add the losses"):
        traced(step)


# What was asked for, in whatever way.


def test_a_gradient_of_the_layers_weights_trains_the_table(run):
    for sources in (
        lambda layer, tape: layer.trainable_variables,
        lambda layer, tape: layer.trainable_variables[0],
        lambda layer, tape: layer.trainable_variables[0].value,
        lambda layer, tape: {"a": [layer.weights]},
        lambda layer, tape: tape.watched_variables(),
    ):
        layer = new_layer()

        def step(layer=layer, sources=sources):
            with tf.GradientTape(persistent=True) as tape:
                loss = loss_of(layer)
            tape.gradient(loss, sources(layer, tape))

        run(step)
        assert rows(layer) == [1, 1]


def test_a_tape_in_a_loop_or_a_branch_and_a_recomputed_function_train(run):
    layer = new_layer()

    def step(loss_of=loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of(layer)
        tape.gradient(loss, layer.trainable_variables)
        return loss

    def recomputed(layer):
        return tf.recompute_grad(lambda x: loss_of(layer) * x)(tf.constant(1.0))

    def steps():
        tf.while_loop(lambda i: i < 3, lambda i: (i + tf.cast(step() < 1, tf.int32),), (0,))
        tf.cond(tf.shape(IDS)[0] > 1, step, lambda: 0.0)
        step(recomputed)

    run(steps)
    assert rows(layer) == [5, 5]


# A call within a function of its own.


def test_a_function_within_the_tape_says_what_to_do():
    """TensorFlow makes its backward pass before it knows what will be asked for, or only once."""
    layer = new_layer()
    inner = tf.function(lambda: loss_of(layer))

    def step():
        with tf.GradientTape() as tape:
            loss = inner()
        tape.gradient(loss, layer.trainable_variables)

    with pytest.raises(ValueError, match=r"users .*in a tf.function of its own"):
        traced(step)
    assert layer.table.size() == 0


def test_fit_trains_through_functions_within_the_model():
    class Decorated(keras.Model):
        def __init__(self, embedding):
            super().__init__()
            self.embedding = embedding

        @tf.function
        def call(self, ids):
            return self.embedding(ids)

    layer = new_layer()
    model = Decorated(layer)
    loss = lambda _, predicted: -keras.ops.sum(predicted)  # noqa: E731
    model.compile("sgd", loss=loss)
    model.fit(IDS.numpy(), np.zeros(2), verbose=0)
    assert rows(layer) == [1, 1]
