"""`het_tf.keras.Model` without a strategy is `keras.Model`."""

from __future__ import annotations

import keras
import numpy as np
import small_models as sm

import het_tf.keras


def test_trains_like_keras():
    x, y = sm.make_data(64)
    results = []
    for model_class in (keras.Model, het_tf.keras.Model):
        model = sm.make_classifier(model_class)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        history = model.fit(x, y, epochs=2, shuffle=False, verbose=0, validation_split=0.25)
        evaluated = model.evaluate(x, y, verbose=0)
        results.append((history.history, evaluated, model.predict(x, verbose=0).tolist()))
    assert results[0] == results[1]


def test_steps_per_execution_auto_is_one():
    model = sm.make_classifier(het_tf.keras.Model)
    model.compile("sgd", "mse")
    assert model.steps_per_execution == 1


def test_functional_and_subclassed_models_side_by_side():
    class Subclassed(het_tf.keras.Model):
        def __init__(self):
            super().__init__(name="mine")
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    class Functional(het_tf.keras.Model):
        def double(self):
            return 2

    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(2)(inputs)
    plain = het_tf.keras.Model(inputs, outputs, name="plain")
    derived = Functional(inputs=inputs, outputs=outputs)
    subclassed = Subclassed()  # After a functional one: the class itself must not have changed.
    for model in (plain, derived, subclassed):
        assert isinstance(model, het_tf.keras.Model)
        assert isinstance(model, keras.Model)
        assert model(np.zeros([4, 3])).shape == (4, 2)
    assert (plain.name, subclassed.name, derived.double()) == ("plain", "mine", 2)
    assert plain.output_shape == (None, 2)


def test_saves_and_loads(tmp_path):
    x, _ = sm.make_data(8)
    model = sm.make_classifier(het_tf.keras.Model)
    model.compile("sgd", "mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, het_tf.keras.Model)
    assert loaded.compiled
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_sequential_is_keras_sequential():
    model = het_tf.keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    assert isinstance(model, keras.Sequential)
    model.compile("sgd", "mse")
    history = model.fit(np.ones([8, 3]), np.ones([8, 1]), verbose=0, epochs=2).history
    assert history["loss"][1] < history["loss"][0]
