"""Dense variables replicated on three workers: every step counts once, and rules for all kinds."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import small_models as sm
import tensorflow as tf
from faults import Warnings

import het_tf
import het_tf.keras
from het_tf.distribute.dense.server_copy import DenseCopy


@pytest.fixture
def dense(strategy):
    """The strategy, to be given a `dense_staleness` and so on for one test."""
    yield strategy
    strategy.dense_staleness = None
    strategy.dense_wire_dtype = "float32"


def integer_model(strategy):
    """A model whose gradient is the sum of its inputs, so that every step is of whole numbers."""
    with strategy.scope():
        inputs = keras.Input((4,))
        layer = keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros")
        model = het_tf.keras.Model(inputs, layer(inputs))
        model.compile(keras.optimizers.SGD(1.0), lambda y, p: 8 * keras.ops.sum(p, axis=-1))
    return model


@pytest.mark.parametrize(
    ("staleness", "wire"),
    [
        (0, "float32"),
        (5, "bfloat16"),
        pytest.param(100, "float32", marks=pytest.mark.exhaustive),
    ],
)
def test_every_step_counts_once(dense, staleness, wire):
    dense.dense_staleness, dense.dense_wire_dtype = staleness, wire
    model = integer_model(dense)
    x = np.random.default_rng(staleness).integers(-3, 4, (8 * 90, 4)).astype(np.float32)
    once = -x.sum(0)[:, None] * np.ones((1, 3))
    # Twice in one fit, and in two: what is owed at the end of a fit goes on into the next.
    for passes, epochs in ((2, 2), (4, 2)):
        model.fit(x, np.zeros((len(x), 1)), batch_size=8, epochs=epochs, verbose=0)
        owed = model.dense_owed.numpy().reshape(4, 3)
        assert np.any(owed != 0)
        np.testing.assert_allclose(model.get_weights()[0] + owed, passes * once, atol=2e-3)
        assert int(model.optimizer.iterations.numpy()) == 90 * passes


def test_a_worker_that_dies_while_it_sets_the_copy(dense, monkeypatch):
    """Another worker sets the copy. It was left unset, and the next step failed."""
    dense.dense_staleness = 5
    model = integer_model(dense)
    set_copy, failures = DenseCopy.set, []

    def fails_once(*args):
        if not failures:
            # As TensorFlow says it when a worker dies.
            said = "from /job:worker/replica:0/task:0: Socket closed"
            failures.append(tf.errors.UnavailableError(None, None, said))
            raise failures[0]
        set_copy(*args)

    monkeypatch.setattr(DenseCopy, "set", fails_once)
    x = np.ones((8 * 60, 4), np.float32)
    model.fit(x, np.zeros((len(x), 1)), batch_size=8, verbose=0)
    assert failures
    made = model.get_weights()[0] + model.dense_owed.numpy().reshape(4, 3)
    np.testing.assert_allclose(made, -len(x) * np.ones((4, 3)), atol=2e-3)


def test_what_is_owed_is_saved_and_restored(dense, tmp_path):
    dense.dense_staleness = 5
    x = np.ones((8 * 60, 4), np.float32)
    model = integer_model(dense)
    model.fit(x, np.zeros((len(x), 1)), batch_size=8, verbose=0)
    weights, owed = model.get_weights()[0], model.dense_owed.numpy()
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "saved"))
    again = integer_model(dense)
    tf.train.Checkpoint(model=again).restore(path)
    again.fit(x, np.zeros((len(x), 1)), batch_size=8, verbose=0)
    total = again.get_weights()[0] + again.dense_owed.numpy().reshape(4, 3)
    np.testing.assert_allclose(total, weights + owed.reshape(4, 3) - 60 * 8, atol=1e-2)
    # Weights that are set have none of it.
    again.set_weights([np.full((4, 3), 7, np.float32)])
    again.fit(x, np.zeros((len(x), 1)), batch_size=8, verbose=0)
    total = again.get_weights()[0] + again.dense_owed.numpy().reshape(4, 3)
    np.testing.assert_allclose(total, np.full((4, 3), 7 - 60 * 8), atol=1e-2)


def test_nothing_is_owed_to_other_variables_that_train_later(dense):
    dense.dense_staleness = 5
    x = np.ones((8 * 30, 4), np.float32)
    with dense.scope():
        inputs = keras.Input((4,))
        layers = [
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name=name)
            for name in ("first", "second")
        ]
        model = het_tf.keras.Model(inputs, keras.layers.Add()([layer(inputs) for layer in layers]))
    for trained, frozen in (layers, layers[::-1]):
        trained.trainable, frozen.trainable = True, False
        with dense.scope():
            model.compile(keras.optimizers.SGD(1.0), lambda y, p: p)
        before = frozen.get_weights()[0]
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        np.testing.assert_array_equal(frozen.get_weights()[0], before)
        total = trained.get_weights()[0][:, 0] + model.dense_owed.numpy()
        np.testing.assert_allclose(total, -30 * np.ones(4), atol=1e-3)


def test_what_is_written_back_keeps_to_constraints(dense):
    """Each worker's steps leave it at 0, and all of them together below."""
    dense.dense_staleness = 100
    with dense.scope():
        inputs = keras.Input((1,))
        layer = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="ones", kernel_constraint="non_neg"
        )
        model = het_tf.keras.Model(inputs, layer(inputs))
        model.compile(keras.optimizers.SGD(2.0), lambda y, p: p)
    x = np.ones((90, 1), np.float32)
    model.fit(x, x, batch_size=1, verbose=0)
    assert model.get_weights()[0] == 0
    np.testing.assert_array_equal(model.predict(x, verbose=0), 0 * x)


def test_steps_and_bytes_are_counted(dense):
    staleness = dense.dense_staleness = 5
    model = integer_model(dense)
    seen = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(dense.dense_stats()),
        on_epoch_end=lambda epoch, logs: seen.append(dense.dense_stats()),
    )
    x = np.ones((8 * 60, 4), np.float32)
    model.fit(x, np.zeros((len(x), 1)), batch_size=8, epochs=2, verbose=0, callbacks=[count])
    assert dense.dense_stats() == {}
    before, first, again, second = seen
    assert before == {}
    assert again == first
    for number, stats in enumerate((first, second), start=1):
        assert stats["steps"] == stats["steps_sent"] == 60 * number
        assert stats["pending"] == stats["steps_lost"] == 0
        # Fewer where a push holds several steps. Each has a server's part of the 12 weights.
        fewest = stats["steps"] // (staleness + 1)
        assert fewest <= stats["pushes"] / dense.num_ps <= stats["steps"]
        weights = 4 * 12
        assert stats["bytes_up"] > weights * stats["pushes"] / dense.num_ps
        assert stats["bytes_down"] > weights * stats["values"] / dense.num_ps


@pytest.mark.exhaustive
def test_learns_with_every_kind_of_variable(dense):
    dense.dense_staleness = 4
    with dense.scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((sm.FEATURES,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        hidden = keras.layers.BatchNormalization(momentum=0.9)(hidden)
        hidden = keras.layers.Dropout(0.1)(hidden)
        model = het_tf.keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
        optimizer = keras.optimizers.AdamW(
            0.02, global_clipnorm=1.0, use_ema=True, ema_momentum=0.8
        )
        model.compile(optimizer, "binary_crossentropy", metrics=["auc"])
    x, y = sm.make_data(960)
    before = [v.numpy() for v in model.variables]
    history = model.fit(x, y, batch_size=32, epochs=4, verbose=0).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    for variable, old in zip(model.variables, before, strict=True):
        moved = np.any(variable.numpy() != old)
        assert moved or "seed" in variable.path, variable.path
    assert all(np.any(v.numpy() != 0) for v in optimizer.variables)
    assert model.evaluate(x, y, verbose=0, return_dict=True)["auc"] > 0.9


def test_variables_are_current_at_the_end_of_an_epoch_and_changes_are_taken_over(dense):
    dense.dense_staleness = 50
    model = integer_model(dense)
    x = np.ones((8 * 12, 4), np.float32)
    seen = []

    def on_epoch_end(epoch, logs):
        seen.append(model.get_weights()[0][0, 0] + model.dense_owed.numpy()[0])
        model.set_weights([np.full((4, 3), 1000.0 * (epoch + 1))])

    callback = keras.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)
    model.fit(x, np.zeros((len(x), 1)), batch_size=8, epochs=3, verbose=0, callbacks=[callback])
    step = -8 * 12
    np.testing.assert_allclose(seen, [step, 1000 + step, 2000 + step], rtol=1e-5)
    assert model.get_weights()[0][0, 0] == 3000, "nothing came after the last callback"


def test_whoever_looks_or_saves_in_the_middle_gets_what_was_made(dense, tmp_path):
    dense.dense_staleness = 50
    with dense.scope():
        inputs = keras.Input((4,))
        model = het_tf.keras.Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=2)
    seen = []

    def look(step, logs):
        seen.append(model.get_weights()[0][0, 0])
        if len(seen) == 5:
            model.save(tmp_path / "middle.keras")

    x = np.ones((8 * 30, 4), np.float32)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    model.fit(x, 3 * x[:, :1], batch_size=8, verbose=0, callbacks=[callback])
    assert all(b > a for a, b in zip(seen[:5], seen[5:10], strict=True))
    saved = keras.models.load_model(tmp_path / "middle.keras")
    assert 0 < int(saved.optimizer.iterations.numpy()) < 30
    assert all(np.any(v.numpy() != 0) for v in saved.optimizer.variables)


def test_no_rule_is_an_error_that_names_the_variable(dense):
    dense.dense_staleness = 4
    with dense.scope():
        inputs = keras.Input((4,), dtype="float64")
        model = het_tf.keras.Model(
            inputs, keras.layers.Dense(1, dtype="float64", name="wide")(inputs)
        )
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"wide/kernel.*float64"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


class RunningMaximum(keras.layers.Layer):
    def build(self, shape):
        begin = keras.initializers.Constant(-np.inf)
        self.top = self.add_weight(shape=(), initializer=begin, trainable=False, name="top")

    def call(self, inputs, training=False):
        if training:
            self.top.assign(keras.ops.maximum(self.top, keras.ops.max(inputs)))
        return inputs


def test_what_would_be_added_to_infinity_is_refused(dense):
    dense.dense_staleness = 4
    with dense.scope():
        inputs = keras.Input((4,))
        model = het_tf.keras.Model(inputs, keras.layers.Dense(1)(RunningMaximum()(inputs)))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"top.*infinity"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    dense.dense_staleness = None
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    assert model.layers[1].top.numpy() == 1


def test_a_step_that_assigns_the_learning_rate_is_refused(dense):
    dense.dense_staleness = 4

    class Decays(het_tf.keras.Model):
        def train_step(self, data):
            self.optimizer.learning_rate.assign(0.5)
            return super().train_step(data)

    with dense.scope():
        inputs = keras.Input((4,))
        model = Decays(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="learning_rate"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


@pytest.mark.exhaustive
def test_mixed_bfloat16(dense):
    dense.dense_staleness = 4
    policy = keras.dtype_policies.DTypePolicy("mixed_bfloat16")
    with dense.scope():
        inputs = keras.Input((sm.FEATURES,))
        hidden = keras.layers.Dense(8, activation="tanh", dtype=policy)(inputs)
        model = het_tf.keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(hidden))
        model.compile(keras.optimizers.Adam(0.02), "mse")
    x, y = sm.make_data(960)
    losses = model.fit(x, y, batch_size=32, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]


class Seen(keras.layers.Layer):
    """Has a state for which there is no rule."""

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(), dtype="bool", initializer="zeros", trainable=False, name="seen"
        )

    def call(self, x):
        self.seen.assign(True)
        return x


@pytest.mark.parametrize("wrong", ["weight", "state", None])
def test_auto_leaves_variables_without_a_rule_on_the_servers(dense, monkeypatch, wrong):
    dense.dense_staleness = 64
    monkeypatch.setattr(dense, "dense_is_auto", True)
    logged, stats = Warnings(), []
    with dense.scope():
        inputs = keras.Input((4,))
        dtype = "float64" if wrong == "weight" else "float32"
        layer = keras.layers.Dense(1, dtype=dtype, name="wrong")
        hidden = Seen()(inputs) if wrong == "state" else inputs
        model = het_tf.keras.Model(inputs, layer(hidden))
        model.compile("sgd", "mse")
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: stats.append(dense.dense_stats())
    )
    losses = model.fit(
        np.ones((32, 4)), np.ones((32, 1)), epochs=3, batch_size=2, verbose=0, callbacks=[look]
    ).history["loss"]
    assert losses[-1] < losses[0]
    named = [text for text in logged.take() if "variables on the parameter servers" in text]
    assert all(("seen" if wrong == "state" else "wrong/") in text for text in named)
    assert bool(named) == bool(wrong) != any(stats)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dense_staleness": -1}, "dense_staleness"),
        ({"dense_staleness": "fast"}, "dense_staleness must be .*\"auto\" or None, not 'fast'"),
        ({"dense_wire_dtype": "int8"}, "dense_wire_dtype must be .* not 'int8'"),
    ],
)
def test_bad_arguments(cluster, arguments, message):
    with pytest.raises(ValueError, match=message):
        het_tf.distribute.HetParameterServerStrategy(cluster.resolver, **arguments)
