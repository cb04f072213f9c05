"""What kinds of models and compile arguments `fit` takes on a cluster."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import ClassVar

import keras
import numpy as np
import pytest
import small_models as sm
import tensorflow as tf

import het_tf.keras
from het_tf.keras.data.datasets import weigh_classes


class Subclassed(het_tf.keras.Model):
    """Not built until it sees data; dict inputs; a loss of its own added."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="relu")
        self.norm = keras.layers.BatchNormalization()
        self.dropout = keras.layers.Dropout(0.1)
        self.out = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        hidden = self.hidden(keras.ops.concatenate([inputs["a"], inputs["b"]], -1))
        self.add_loss(0.01 * keras.ops.mean(hidden))
        return self.out(self.dropout(self.norm(hidden, training=training), training=training))


def test_subclassed_model_with_dict_inputs_weights_and_added_loss(strategy):
    x, y = sm.make_data(192)
    inputs = {"a": x[:, :2], "b": x[:, 2:]}
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Subclassed()
        adam = keras.optimizers.Adam(0.02)  # fast enough to outrun the noise of three workers
        model.compile(adam, "mse", metrics=["mae"], weighted_metrics=["mse"])
    history = model.fit(
        inputs, y, sample_weight=np.linspace(0, 1, 192), batch_size=16, epochs=3, verbose=0
    )
    assert set(history.history) == {"loss", "mae", "mse", "examples_per_s"}
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert np.any(model.norm.moving_mean.numpy() != 0)
    assert int(model.optimizer.iterations.numpy()) == 36


@pytest.mark.exhaustive
def test_list_of_inputs_of_several_widths_and_a_metric_with_several_results(strategy):
    x, y = sm.make_data(96)
    y = np.concatenate([y, 1 - y], -1)
    with strategy.scope():
        inputs = [keras.Input((2,)), keras.Input((4,))]
        joined = keras.layers.Concatenate()(inputs)
        model = het_tf.keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(joined))
        model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    x = [x[:, :2], x[:, 2:]]
    history = model.fit(x, y, batch_size=16, validation_split=0.25, verbose=0).history
    assert history["f1_score"][0].shape == history["val_f1_score"][0].shape == (2,)
    outputs = model.predict(x, verbose=0)
    metric = keras.metrics.F1Score()
    metric.update_state(y, outputs)
    scores = model.evaluate(x, y, verbose=0, return_dict=True)["f1_score"]
    np.testing.assert_allclose(scores, metric.result(), rtol=1e-5)


def test_several_outputs_and_losses(strategy):
    x, y = sm.make_data(96)
    with strategy.scope():
        inputs = keras.Input((sm.FEATURES,))
        outputs = {
            "up": keras.layers.Dense(1, name="up")(inputs),
            "down": keras.layers.Dense(1, name="down")(inputs),
        }
        model = het_tf.keras.Model(inputs, outputs)
        model.compile(
            "sgd",
            loss={"up": "mse", "down": "mae"},
            loss_weights={"up": 1.0, "down": 0.5},
            metrics={"up": ["mae"]},
        )
    dataset = tf.data.Dataset.from_tensor_slices((x, {"up": y, "down": -y})).batch(16)
    history = model.fit(dataset, verbose=0)
    names = {"loss", "up_loss", "down_loss", "up_mae"}
    assert set(history.history) == names | {"examples_per_s"}
    logs = model.evaluate(dataset, verbose=0, return_dict=True)
    np.testing.assert_allclose(logs["loss"], logs["up_loss"] + 0.5 * logs["down_loss"], rtol=1e-5)


class OwnStep(het_tf.keras.Model):
    """Overrides `train_step`, with a metric and a log of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = keras.metrics.Sum(name="seen")

    @property
    def metrics(self):
        return [self.seen]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.seen.update_state(tf.ones(tf.shape(x)[0]))
        return {"seen": self.seen.result(), "last_loss": loss}


def test_own_train_step_is_used(strategy):
    x, y = sm.make_data(100)
    with strategy.scope():
        inputs = keras.Input((sm.FEATURES,))
        model = OwnStep(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.05))
    history = model.fit(x, y, batch_size=16, epochs=3, verbose=0).history
    assert history["seen"] == [100.0, 100.0, 100.0]
    assert set(history) == {"seen", "last_loss"}
    assert float(model.seen.result()) == 100.0


class GuidesStep(het_tf.keras.Model):
    """The `train_step` of Keras's guide to customizing `fit`; `test_step` likewise."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self._updated(y, y_pred, loss)

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        return self._updated(y, y_pred, self.compute_loss(y=y, y_pred=y_pred))

    def _updated(self, y, y_pred, loss):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.exhaustive
def test_train_step_of_the_guide_has_flat_logs(strategy):
    x, y = sm.make_data(96)
    with strategy.scope():
        inputs = keras.Input((sm.FEATURES,))
        model = GuidesStep(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae", "mse"])
    history = model.fit(x, y, epochs=2, validation_data=(x, y), verbose=0).history
    names = {"loss", "mae", "mse"}
    assert set(history) == names | {f"val_{name}" for name in names}
    assert history["val_loss"][-1] < history["val_loss"][0]
    np.testing.assert_allclose(history["loss"], history["mse"], rtol=1e-4)


class Examples(keras.metrics.Metric):
    """The result is the variable, as in metrics that were written for older versions of Keras."""

    def __init__(self):
        super().__init__(name="examples")
        self.seen = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

    def result(self):
        return self.seen


class Both(keras.metrics.Metric):
    """Has several results, each with a name."""

    def __init__(self):
        super().__init__(name="both")
        self.steps = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.steps.assign_add(1.0)

    def result(self):
        return {"steps": self.steps, "twice": 2.0 * self.steps}


class RenamedLogs(het_tf.keras.Model):
    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"of_closure": logs["examples"]}


@pytest.mark.exhaustive
def test_metrics_whose_result_is_a_variable_or_a_dict(strategy):
    x, y = sm.make_data(96)
    with strategy.scope():
        inputs = keras.Input((sm.FEATURES,))
        model = RenamedLogs(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse", metrics=[Examples(), Both()], steps_per_execution=2)
    history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0).history
    assert history["examples"] == history["val_examples"] == [96.0, 96.0]
    assert (history["steps"], history["twice"]) == ([6, 6], [12, 12])
    assert history["of_closure"] == [32.0, 32.0]  # of two steps: no metric's name, so not added up


class OwnLoss(het_tf.keras.Model):
    """Returns a loss of its own, which the model's tracker of losses hears nothing of."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients)}

    def test_step(self, data):
        x, y = data
        return {"loss": tf.reduce_mean(tf.square(self(x) - y)), "one": 1.0}


@pytest.mark.exhaustive
def test_a_step_that_returns_a_loss_of_its_own(strategy):
    x, y = sm.make_data(96)
    histories = []
    for where in (strategy.scope(), contextlib.nullcontext()):
        with where:
            inputs = keras.Input((sm.FEATURES,))
            layer = keras.layers.Dense(1, kernel_initializer="zeros")
            model_class = keras.Model if histories else het_tf.keras.Model
            steps = {name: vars(OwnLoss)[name] for name in ("train_step", "test_step")}
            model = type("Own", (model_class,), steps)(inputs, layer(inputs))
            model.compile(keras.optimizers.SGD(0.01))
        # One step, which no other overlaps with.
        history = model.fit(x, y, batch_size=96, validation_data=(x, y), validation_batch_size=96)
        histories.append(history.history)
    ours, keras_s = histories
    assert ours.keys() - {"examples_per_s"} == keras_s.keys()
    for name, values in keras_s.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5)
    assert ours["val_loss"][0] > 0


@pytest.mark.exhaustive
def test_logs_of_steps_when_a_share_ends(strategy):
    """Closures that find a share at its end make no step, and have no logs."""
    x, y = sm.make_data(96)
    with strategy.scope():
        inputs = keras.Input((sm.FEATURES,))
        model = OwnLoss(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.01), metrics=[keras.metrics.F1Score()])
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    share = lambda context: data.shard(2, min(context.input_pipeline_id, 1))  # noqa: E731
    history = model.fit(share, epochs=2, verbose=0, steps_per_epoch=None).history
    assert set(history) == {"loss", "norm"}
    assert min(history["loss"]) > 0
    assert min(history["norm"]) > 0


@pytest.mark.exhaustive
def test_a_metric_of_several_values_that_a_step_returns_and_does_not_update(strategy):
    class Returns(het_tf.keras.Model):
        def train_step(self, data):
            self.get_layer("out")(data[0])
            return self.get_metrics_result()

    x, y = sm.make_data(32)
    with strategy.scope():
        inputs = keras.Input((sm.FEATURES,))
        model = Returns(inputs, keras.layers.Dense(2, name="out")(inputs))
        model.compile("sgd", "mse", metrics=[keras.metrics.F1Score()])
    y = np.concatenate([y, 1 - y], 1)
    model.evaluate(x, y, verbose=0)  # The metric is built by what it is given.
    history = model.fit(x, y, verbose=0).history
    np.testing.assert_array_equal(history["f1_score"], [[0, 0]])


def test_class_weight_is_of_the_labels_that_keras_takes_it_of():
    for labels, weights in (
        ([0.9, 0.1, 1.4, 2.0], {0: 1.0, 1: 5.0}),
        ([1.0, -1.0, 3.0, 0.0], {1: 2.0, -1: 0.5}),
        ([5, 6, 4], {5: 0.5, 6: 2.0}),
    ):
        labels = np.array(labels)[:, None]
        data = tf.data.Dataset.from_tensors((labels, labels))
        ((_, _, ours),) = weigh_classes(data, weights).as_numpy_iterator()
        np.testing.assert_array_equal(
            ours, [weights.get(int(np.round(label)), 1.0) for label in labels[:, 0]]
        )


@pytest.mark.exhaustive
def test_class_weight_weighs(strategy):
    x, y = sm.make_data(90)
    with strategy.scope():
        model = sm.make_classifier(het_tf.keras.Model)
        model.compile(keras.optimizers.SGD(0.0), "mse", weighted_metrics=["mse"])
    weights = {0: 3.0, 1: 0.5}
    squares = (model.predict(x, verbose=0) - y)[:, 0] ** 2
    per_example = np.where(y[:, 0] > 0, 0.5, 3.0)
    expected = np.sum(squares * per_example) / np.sum(per_example)
    pairs = tf.data.Dataset.from_tensor_slices((x, y)).batch(15)
    for data in ((x, y), (pairs.map(lambda x, y: (x, y, None)), None)):
        history = model.fit(*data, class_weight=weights, verbose=0).history
        np.testing.assert_allclose(history["mse"][0], expected, rtol=1e-5)


def test_compiling_again_takes_effect(strategy):
    x, y = sm.make_data(64)
    with strategy.scope():
        model = sm.make_classifier(het_tf.keras.Model)
    model.compile("sgd", "mse")
    assert set(model.fit(x, y, verbose=0).history) == {"loss", "examples_per_s"}
    model.compile("adam", "mse", metrics=["mae"])
    assert set(model.fit(x, y, verbose=0).history) == {"loss", "mae", "examples_per_s"}


class Smallest(keras.metrics.Metric):
    """Not a sum."""

    def __init__(self):
        super().__init__(name="smallest")
        self.value = self.add_weight(initializer=lambda shape, dtype: tf.fill(shape, 9e9))

    def reset_state(self):
        self.value.assign(9e9)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(tf.minimum(self.value, tf.reduce_min(y_pred)))

    def result(self):
        return self.value


class State(keras.metrics.Metric):
    """Its state after each step is a function of that before it, and of the predictions."""

    def __init__(self, update, name="state"):
        super().__init__(name=name)
        self.update = update
        self.value = self.add_weight(initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(self.update(self.value, tf.reduce_mean(y_pred)))

    def result(self):
        return self.value


class SumAndLast(State):
    """A sum, beside a variable that is not added up and so may be assigned anything."""

    def __init__(self):
        super().__init__(lambda state, x: state + x, "sum_and_last")
        self.last = self.add_variable((), "zeros", aggregation="none", name="last")

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true, y_pred)
        self.last.assign(tf.reduce_max(y_pred))


SUMS = {
    "sum": lambda state, x: state + x,
    "cast": lambda state, x: tf.cast(x - 1.0, tf.float64) + tf.cast(tf.identity(state), tf.float64),
    "where": lambda state, x: tf.where(x > 0.5, state + 1.0, state),
    "same": lambda state, x: tf.identity(state),
}


def test_metrics_that_are_sums_are_taken(strategy):
    x, y = sm.make_data(32)
    metrics = [State(update, name) for name, update in SUMS.items()]
    with strategy.scope():
        model = sm.make_classifier(het_tf.keras.Model)
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[*metrics, SumAndLast()])
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    for name, update in [*SUMS.items(), ("sum_and_last", SUMS["sum"])]:
        want = tf.constant(0.0)
        for batch in range(0, 32, 8):
            mean = tf.reduce_mean(model(x[batch : batch + 8]))
            want = tf.cast(update(want, mean), tf.float32)
        np.testing.assert_allclose(history[name], [want], rtol=1e-5, err_msg=name)


def test_what_cannot_be_trained_asynchronously_is_named(strategy):
    x, y = sm.make_data(32)
    with strategy.scope():
        model = sm.make_classifier(het_tf.keras.Model)
    model.compile("sgd", "mse", metrics=[Smallest()])
    with pytest.raises(ValueError, match=r"'smallest.* does not reset to zero"):
        model.fit(x, y, verbose=0)
    with pytest.raises(ValueError, match="run_eagerly"):
        model.compile("sgd", "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match="jit_compile is ignored"):
        model.compile("sgd", "mse", jit_compile=True)
    model.compile(keras.optimizers.SGD(), "mse")  # The optimizer was made outside the scope.
    with pytest.raises(ValueError, match="was not made under the strategy"):
        model.fit(x, y, verbose=0)


class Noting(het_tf.layers.HetEmbedding):
    """Writes down in which graphs it is called."""

    graphs: ClassVar[list[weakref.ref]] = []

    def call(self, *args, **kwargs):
        self.graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return super().call(*args, **kwargs)


def fit_one_that_notes(strategy):
    with strategy.scope():
        model = het_tf.keras.Sequential(
            [Noting(2, cache=het_tf.CacheConfig(8)), keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    model.fit(np.arange(32).reshape(16, 2), np.ones(16), batch_size=4, verbose=0)


@pytest.mark.exhaustive
def test_graphs_go_with_their_model(strategy):
    fit_one_that_notes(strategy)
    graphs = list(Noting.graphs)
    fit_one_that_notes(strategy)  # What holds a model, until another is there, is of this one.
    Noting.graphs.clear()
    gc.collect()
    assert graphs
    assert [each for each in (graph() for graph in graphs) if each is not None] == []
