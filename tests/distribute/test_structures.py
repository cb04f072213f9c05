"""What models are fed, in structures that Keras takes: by the keys of the Inputs, and with None."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
import het_tf.keras

N = 12
IDS = {"user": np.arange(N)[:, None] % 5 + 500, "item": np.arange(N)[:, None] % 3}
Fed = collections.namedtuple("Fed", ["user", "item"])


def make_model(model_class, kind, outputs=1):
    """Inputs user, then item, of which only one takes ids from 500 on."""
    inputs = kind((k, keras.Input((1,), dtype="int64", name=k)) for k in IDS)
    rows = [
        het_tf.layers.HetEmbedding(
            2,
            input_dim=bound,
            combiner="sum",
            embeddings_initializer=keras.initializers.Constant(value),
            optimizer=het_tf.optimizers.SGD(0.1),
            cache=None,  # A step reads the updates of all others, as in Keras.
            name=f"{key}_rows",
        )(inputs[key])
        for key, value, bound in (("user", 1.0, 1000), ("item", 5.0, 10))
    ]
    dense = [keras.layers.Dense(1, kernel_initializer="ones", name=f"d{i}") for i in range(outputs)]
    joined = keras.layers.Concatenate()(rows)
    made = [each(joined) for each in dense]
    model = model_class(inputs, made if outputs > 1 else made[0])
    model.compile(keras.optimizers.SGD(0.01), ["mse"] + [None] * (outputs - 1))
    return model


def datasets(x):
    return tf.data.Dataset.from_tensor_slices((x, np.ones((N, 1), np.float32))).batch(4)


def generators(x):
    for i in range(0, N, 4):
        yield type(x)((k, v[i : i + 4]) for k, v in x.items()), np.ones((4, 1))


KINDS = [dict, collections.OrderedDict]


def test_inputs_are_found_by_their_keys(strategy):
    """Whatever the order of the keys. An id that reached the wrong layer would be an error."""
    with strategy.scope():
        model = make_model(het_tf.keras.Model, dict)
    x = collections.OrderedDict((key, IDS[key]) for key in ("item", "user"))
    y = np.ones((N, 1))
    model.fit(x, y, batch_size=4, validation_split=0.5, verbose=0)
    model.fit(datasets(x), verbose=0)
    model.fit(generators(x), verbose=0)
    model.train_on_batch(x, y)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(model.test_on_batch(x, y))
    kernel, bias = model.get_layer("d0").get_weights()
    rows = [model.get_layer(f"{k}_rows").table.lookup(v[:, 0]) for k, v in IDS.items()]
    expected = np.concatenate(rows, 1) @ kernel + bias
    for predicted in (
        model.predict(x, verbose=0),
        model.predict_on_batch(x),
        model.predict(datasets(x), verbose=0),
    ):
        np.testing.assert_allclose(predicted, expected, rtol=1e-5)


@pytest.mark.parametrize("fed", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_found_by_their_keys_in_one_process(kind, fed):
    model = make_model(het_tf.keras.Model, kind)
    x = fed((key, IDS[key]) for key in ("item", "user"))
    model.fit(x, np.ones((N, 1)), verbose=0)
    assert model(x).shape == (N, 1)
    assert set(model.get_layer("user_rows").table.export().keys) == set(range(500, 505))


def test_arrays_in_a_namedtuple_keep_its_fields(strategy):
    class Model(het_tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.rows = het_tf.layers.HetEmbedding(2, combiner="sum", optimizer="same")
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(self.rows(x.item))

    with strategy.scope():
        model = Model()
        model.compile("sgd", "mse")
    x = Fed(**IDS)
    model.fit(x, np.ones((N, 1)), batch_size=4, verbose=0)
    assert model.predict(x, verbose=0).shape == (N, 1)
    assert set(model.rows.table.export().keys) == {0, 1, 2}


def train_with_none(model) -> list[float]:
    """Losses of steps one at a time, in which None stands for labels and weights."""
    y = np.ones((N, 1), np.float32)
    data = tf.data.Dataset.from_tensor_slices((IDS, y)).batch(N)
    losses = model.fit(data.map(lambda x, y: (x, (y, None))), epochs=2, verbose=0).history["loss"]
    without_weights = data.map(lambda x, y: (x, (y, None), None))
    losses += model.fit(without_weights, verbose=0).history["loss"]
    losses += model.fit(IDS, [y, None], batch_size=N, verbose=0).history["loss"]
    losses += np.ravel(model.train_on_batch(IDS, [y, None])).tolist()[:1]
    assert int(model.optimizer.iterations) == 5
    weighed = model.fit(
        IDS, [y, y], sample_weight=[y[:, 0] / 2, None], validation_split=0.5, verbose=0
    ).history
    evaluated = model.evaluate(without_weights, verbose=0)
    losses += [*weighed["loss"], *weighed["val_loss"], *map(float, np.ravel(evaluated))]
    predicted = model.predict(data.map(lambda x, y: (x, None)), verbose=0)
    return [*losses, *np.ravel(predicted[0])]


@pytest.mark.exhaustive
def test_none_in_the_place_of_weights_and_labels(strategy):
    with strategy.scope():
        model = make_model(het_tf.keras.Model, dict, outputs=2)
    ours = train_with_none(model)
    keras_s = train_with_none(make_model(keras.Model, dict, outputs=2))
    np.testing.assert_allclose(ours, keras_s, rtol=1e-5)
    assert max(ours[1:5]) < ours[0] / 2


def test_weights_are_not_taken_for_labels(strategy):
    with strategy.scope():
        model = make_model(het_tf.keras.Model, dict)
    x = {key: each[:0] for key, each in IDS.items()}
    with pytest.raises(ValueError, match="sample_weight needs y"):
        model.train_on_batch(x, None, np.ones((0,)))
