"""Which gradients train the table: those that an optimizer applies."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf import optimizers
from het_tf.optimizers.joint_optimizer import stepped

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


def weights_of(*layers) -> list[keras.Variable]:
    return [variable for layer in layers for variable in layer.trainable_variables]


def optimizer_of_rows():
    return optimizers.JointOptimizer(keras.optimizers.SGD())


def built(optimizer, *layers):
    optimizer.build(weights_of(*layers))
    return optimizer


# A gradient that nobody applies.


def test_a_gradient_that_is_not_applied_trains_nothing(run):
    layer, dense = new_layer(), keras.layers.Dense(1)
    dense.build((None, 1))
    optimizer = built(keras.optimizers.SGD(), dense)

    def step():
        with tf.GradientTape(persistent=True) as tape:
            embedded = layer(IDS)
            loss = -tf.reduce_sum(dense(embedded))
        assert tape.gradient(loss, embedded) is not None
        assert None not in tape.gradient(loss, weights_of(layer))
        optimizer.apply(tape.gradient(loss, weights_of(dense)))

    run(step)
    assert layer.table.size() == 0


def test_of_several_gradients_that_are_asked_for_the_applied_one_trains(run):
    """As where two networks learn from one call, or gradients are watched."""
    layer, dense = new_layer(), keras.layers.Dense(1, kernel_initializer="ones")
    dense.build((None, 1))
    optimizers_of = [built(keras.optimizers.SGD(), layer), built(keras.optimizers.SGD(), dense)]

    def step():
        with tf.GradientTape(persistent=True) as tape:
            embedded = layer(IDS)
            loss, other = -tf.reduce_sum(dense(embedded)), 100.0 * tf.reduce_sum(embedded)
            both = loss + other
        gradients = tape.gradient(loss, weights_of(layer))
        tape.gradient(other, weights_of(layer))
        optimizers_of[1].apply(tape.gradient(both, weights_of(dense)))
        optimizers_of[0].apply(gradients)

    run(step)
    assert rows(layer) == [1, 1]


def test_a_gradient_penalty_trains_with_its_own_gradient_only():
    """The inner tape asks for the output's gradient, the outer one for the layer's weights."""
    layer = new_layer()

    def step():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                embedded = layer(IDS)
                loss = tf.reduce_sum(embedded**2 + 3 * embedded)
            penalty = tf.reduce_sum(inner.gradient(loss, embedded))
        train_rows(outer, penalty, layer)

    traced(step)
    assert rows(layer) == [-2, -2]


def test_a_jacobian_of_other_weights_trains_nothing():
    layer, factor = new_layer(), tf.Variable([2.0, 3.0])

    def step():
        with tf.GradientTape() as tape:
            outputs = (layer(IDS)[:, 0] + 1) * factor
        return tape.jacobian(outputs, [factor])

    np.testing.assert_array_equal(traced(step)[0], np.eye(2))
    assert rows(layer) == [0, 0]


# A gradient that is applied.


def test_two_losses_of_a_call_say_what_to_do():
    layer = new_layer()

    def step():
        with tf.GradientTape(persistent=True) as tape:
            embedded = layer(IDS)
            first, second = tf.reduce_sum(embedded), tf.reduce_sum(embedded**2)
        train_rows(tape, first, layer)
        train_rows(tape, second, layer)

    with pytest.raises(ValueError, match=r"users .* add the losses"):
        traced(step)


@pytest.mark.parametrize("joint", [False, True])
def test_every_call_of_a_layer_is_trained(run, joint):
    layer = new_layer()
    optimizer = keras.optimizers.SGD()
    optimizer = built(optimizers.JointOptimizer(optimizer) if joint else optimizer, layer)

    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(layer) + 2 * loss_of(layer)
        optimizer.apply(tape.gradient(loss, weights_of(layer)))

    run(step)
    run(step)
    assert rows(layer) == [6, 6]


def test_changes_of_the_scalars_gradient_leave_the_rows_in_a_function():
    layer, dense = new_layer(), keras.layers.Dense(1, kernel_initializer="ones")
    dense.build((None, 1))
    optimizer = built(keras.optimizers.SGD(1.0), layer, dense)

    def step():
        with tf.GradientTape() as tape:
            loss = -tf.reduce_sum(dense(layer(IDS)))
        gradients = tape.gradient(loss, weights_of(layer, dense))
        optimizer.apply(tf.clip_by_global_norm(gradients, 0.1)[0])

    traced(step)
    assert rows(layer) == [1, 1]


def test_a_scalars_gradient_that_was_changed_eagerly_is_refused():
    layer = new_layer()
    with tf.GradientTape() as tape:
        loss = loss_of(layer)
    (gradient,) = tape.gradient(loss, weights_of(layer))
    with pytest.raises(ValueError, match=r"layer users .*scaled eagerly.*JointOptimizer"):
        layer.anchor.assign(gradient * 0.5)
    assert layer.table.size() == 0


def test_a_step_in_a_loop_or_a_branch_and_a_recomputed_function_train(run):
    layer = new_layer()

    def step(loss_of=loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of(layer)
        train_rows(tape, loss, layer)
        return loss

    def recomputed(layer):
        return tf.recompute_grad(lambda x: loss_of(layer) * x)(tf.constant(1.0))

    def steps():
        tf.while_loop(lambda i: i < 3, lambda i: (i + tf.cast(step() < 1, tf.int32),), (0,))
        tf.cond(tf.shape(IDS)[0] > 1, step, lambda: 0.0)
        step(recomputed)

    run(steps)
    assert rows(layer) == [5, 5]


def test_steps_of_which_each_branch_makes_another_train():
    layer = new_layer()
    optimizers_of = [
        built(optimizers.JointOptimizer(keras.optimizers.SGD()), layer) for _ in range(2)
    ]

    @tf.function
    def step(which):
        with tf.GradientTape() as tape:
            loss = loss_of(layer)
        gradients = tape.gradient(loss, weights_of(layer))
        if which:
            optimizers_of[0].apply(gradients)
        else:
            optimizers_of[1].apply(gradients)

    step(tf.constant(True))
    step(tf.constant(False))
    assert rows(layer) == [2, 2]


def test_eager_gradients_that_nobody_applies_stay_out(run):
    """Also where the applied one is a sum: of two calls, after a pass that asked for other weights.

    As in a GAN whose discriminator has the rows.
    """
    layer, dense = new_layer(), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
    dense.build((None, 1))
    of_dense, of_layer = built(keras.optimizers.SGD(0.0), dense), built(optimizer_of_rows(), layer)

    def step():
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = -1000 * tf.reduce_sum(dense(layer(IDS)))
            gradients = tape.gradient(loss, weights_of(dense))
        of_dense.apply(gradients)
        with tf.GradientTape() as tape:
            loss = loss_of(layer) + loss_of(layer)
        unapplied = tape.gradient(loss, weights_of(layer))
        with tf.GradientTape() as tape:
            loss = loss_of(layer) + loss_of(layer)
        of_layer.apply(tape.gradient(loss, weights_of(layer)))
        return unapplied

    run(step)
    assert rows(layer) == [2, 2]


def test_two_gradients_may_be_computed_before_both_are_applied(run):
    layer = new_layer()
    first, second = (built(optimizer_of_rows(), layer) for _ in range(2))

    def step():
        with tf.GradientTape(persistent=True) as tape:
            one, other = loss_of(layer), 10.0 * loss_of(layer)
        of_one = tape.gradient(one, weights_of(layer))
        of_other = tape.gradient(other, weights_of(layer))
        first.apply(of_one)
        second.apply(of_other)

    run(step)
    assert rows(layer) == [11, 11]


def test_a_thread_that_steps_the_scalar_leaves_other_threads_alone():
    layer = new_layer()
    plain = built(keras.optimizers.SGD(), layer)
    with stepped(weights_of(layer)):
        assert not layer.anchor.overwrite_with_gradient

        def step():
            with tf.GradientTape() as tape:
                loss = loss_of(layer)
            plain.apply(tape.gradient(loss, weights_of(layer)))

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert rows(layer) == [1, 1]


# A call within a function of its own.


def test_a_function_within_the_tape_says_what_to_do():
    """TensorFlow makes its backward pass before it knows what will be asked for, or only once."""
    layer = new_layer()
    inner = tf.function(lambda: loss_of(layer))

    def step():
        with tf.GradientTape() as tape:
            loss = inner()
        train_rows(tape, loss, layer)

    with pytest.raises(ValueError, match=r"users .*in a tf.function"):
        traced(step)
    assert layer.table.size() == 0


def test_fit_of_a_function_within_the_model_says_what_to_do():
    class Decorated(het_tf.keras.Model):
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
    with pytest.raises(ValueError, match=r"users .*`fit` needs no tf\.function"):
        model.fit(IDS.numpy(), np.zeros(2), verbose=0)
    assert rows(layer) == [0, 0]
