"""`train_on_batch` and its like, and Python's own sources of batches, on a cluster."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf

IDS = np.arange(6)


@pytest.fixture(scope="module")
def model(strategy):
    """Of every id that is trained once more, the row grows by 1."""
    with strategy.scope():
        layer = het_tf.layers.HetEmbedding(
            1,
            optimizer=het_tf.optimizers.SGD(1.0),
            embeddings_initializer="zeros",
            cache=het_tf.CacheConfig(10),
            name="users",
        )
        ids = keras.Input((), dtype="int64")
        model = het_tf.keras.Model(ids, layer(ids))
        model.compile(loss=lambda _, predicted: -keras.ops.sum(predicted), metrics=["mae"])
    return model


@pytest.fixture
def rows(model):
    """A function that reads the rows, of which there are none at first."""
    table = model.get_layer("users").table
    table.clear()
    return lambda: table.lookup(IDS)[:, 0].tolist()


def test_batches_one_by_one(model, rows):
    model.reset_metrics()
    logs = model.train_on_batch(IDS[:4], np.zeros(4), return_dict=True)
    assert logs == {"loss": 0, "mae": 0}
    assert rows() == [1, 1, 1, 1, 0, 0]
    # Of this batch alone, as in Keras.
    assert model.train_on_batch(IDS[:4], np.zeros(4)) == [-4, 1]
    assert model.test_on_batch(IDS[:4], np.zeros(4)) == [-8, 2]
    assert model.test_on_batch(IDS[:4], np.zeros(4), return_dict=True) == {"loss": -8, "mae": 2}
    np.testing.assert_array_equal(model.predict_on_batch(IDS)[:, 0], [2, 2, 2, 2, 0, 0])
    assert rows() == [2, 2, 2, 2, 0, 0]


@pytest.mark.exhaustive
def test_an_empty_batch_changes_nothing(model, rows):
    empty = IDS[:0], np.zeros(0)
    before = rows()
    assert model.train_on_batch(*empty, return_dict=True)["loss"] == 0
    assert model.test_on_batch(*empty, return_dict=True)["loss"] == 0
    assert model.predict_on_batch(IDS[:0]).shape == (0, *model.predict_on_batch(IDS).shape[1:])
    assert rows() == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["ragged", pytest.param("sparse", marks=pytest.mark.exhaustive)])
def test_ragged_and_sparse_batches(strategy, kind):
    splits = [0, 2, 2, 5]
    ids, weights = (
        tf.RaggedTensor.from_row_splits(values, splits)
        for values in (np.array([3, 1, 2, 3, 3]), np.array([1, 2, 1, 1, 2], np.float32))
    )
    if kind == "sparse":
        ids, weights = ids.to_sparse(), weights.to_sparse()
    labels = np.ones((3, 1))
    logs = []
    for is_on_cluster in (False, True):
        with strategy.scope() if is_on_cluster else contextlib.nullcontext():
            kinds = {"ragged": kind == "ragged", "sparse": kind == "sparse"}
            shape = (None,) if kind == "ragged" else (3,)
            inputs = [keras.Input(shape, dtype=dtype, **kinds) for dtype in ("int64", "float32")]
            layer = het_tf.layers.HetEmbedding(1, combiner="sum", seed=1)
            model = het_tf.keras.Model(inputs, layer(*inputs))
            model.compile("sgd", "mse", metrics=["mae"])
        x, weight = [ids, weights], np.array([1.0, 2.0, 0.5])
        of_model = [model.train_on_batch(x, labels, weight) for _ in range(2)]
        of_model.append(model.train_on_batch(x, labels, class_weight={1: 2.0}))
        of_model.append(model.test_on_batch(x, labels, weight))
        logs.append([*np.ravel(of_model), *np.ravel(model.predict_on_batch(x))])
    np.testing.assert_allclose(*logs, rtol=1e-5)
    with pytest.raises(TypeError, match=r"ragged and sparse tensors in a tf\.data\.Dataset"):
        model.predict(x, verbose=0)  # the one on the cluster


@pytest.mark.exhaustive
def test_a_generator(model, rows):
    batches = ((IDS[i : i + 2], np.zeros(2)) for i in range(0, 6, 2))
    with pytest.warns(UserWarning, match="ran out before epoch 2 of 3: fit ends here"):
        history = model.fit(batches, epochs=3, verbose=0).history
    assert rows() == [1] * 6
    assert history["loss"] == [0]
    with pytest.raises(ValueError, match="has no batches"):
        model.fit(batches, verbose=0)
    given = lambda: ((IDS[i : i + 2], np.zeros(2)) for i in range(0, 6, 2))  # noqa: E731
    model.fit(given(), validation_data=given(), verbose=0)
    assert rows() == [2] * 6
    assert model.evaluate(given(), verbose=0, return_dict=True)["mae"] == 2
    model.fit(((*each, None) for each in given()), verbose=0)  # None: no weights.
    assert rows() == [3] * 6
    ids = (each for each, _ in given())
    np.testing.assert_array_equal(model.predict(ids, verbose=0)[:, 0], [3] * 6)


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_wrong_numbers_of_steps_and_examples_are_named(model, steps):
    labels = np.zeros(6)
    for name, call in {
        "batch_size": lambda: model.predict(IDS, batch_size=steps),
        "steps_per_epoch": lambda: model.fit(IDS, labels, steps_per_epoch=steps),
        "validation_steps": lambda: model.fit(
            IDS, labels, validation_data=(IDS, labels), validation_steps=steps
        ),
        "steps": lambda: model.evaluate(IDS, labels, steps=steps),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} must be an integer .* None, not {steps}"):
            call()


@pytest.mark.exhaustive
def test_a_generator_to_validate_on(model, rows):
    given = lambda: ((IDS[i : i + 2], np.zeros(2)) for i in range(0, 6, 2))  # noqa: E731
    with pytest.warns(UserWarning, match="validation_data ran out before epoch 2"):
        history = model.fit(
            IDS, np.zeros(6), epochs=2, batch_size=2, validation_data=given(), verbose=0
        ).history
    assert history["val_mae"] == [1]
    assert rows() == [2] * 6
    spent = given()
    list(spent)
    with pytest.raises(ValueError, match="has no batches"):
        model.fit(IDS, np.zeros(6), validation_data=spent, verbose=0)


def test_a_py_dataset(model, rows, monkeypatch):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return IDS[2 * i : 2 * i + 2], np.zeros(2)

    model.fit(Batches(), epochs=2, verbose=0)
    assert rows() == [2] * 6
    assert model.evaluate(Batches(), verbose=0, return_dict=True)["mae"] == 2
    np.testing.assert_array_equal(model.predict(Batches(), verbose=0)[:, 0], [2] * 6)
    monkeypatch.setattr(Batches, "__len__", lambda batches: 0)
    with pytest.raises(ValueError, match="The PyDataset Batches has no batches"):
        model.fit(Batches(), verbose=0)


@pytest.mark.exhaustive
def test_batches_of_several_widths(strategy):
    with strategy.scope():
        ids = keras.Input((None,), dtype="int64")
        layer = het_tf.layers.HetEmbedding(1, optimizer=het_tf.optimizers.SGD(1.0), combiner="sum")
        model = het_tf.keras.Model(ids, layer(ids))
        model.compile(loss=lambda _, predicted: -keras.ops.sum(predicted))

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return np.full((2, 1 + i), i), np.zeros((2, 1))

    model.fit(Batches(), shuffle=False, verbose=0)
    model.fit((Batches()[i] for i in range(3)), verbose=0)
    before = layer.table.lookup([0, 1, 2])[:, 0] - [4, 8, 12]
    np.testing.assert_allclose(before, 0, atol=0.1)  # what they began with


def test_weights_without_the_table_are_refused(model, tmp_path):
    for ask in (
        model.get_weights,
        lambda: model.set_weights([np.zeros(())] * len(model.weights)),
        lambda: model.save(tmp_path / "model.h5"),
    ):
        with pytest.raises(ValueError, match=r"layer users .*save_weights"):
            ask()
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_batches_of_other_shapes_trace_no_more_functions(strategy, kind):
    traced = []

    class Pooled(het_tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.rows = het_tf.layers.HetEmbedding(
                1, combiner="sum", optimizer="same", embeddings_initializer="zeros"
            )

        def call(self, ids):
            traced.append(ids.shape)
            return self.rows(ids)

    with strategy.scope():
        model = Pooled()
        model.compile(keras.optimizers.SGD(1.0), lambda _, outputs: -keras.ops.sum(outputs))
    counts = []
    for size in range(2, 8):
        ids = tf.ragged.constant([[3] * i for i in range(size)], dtype=tf.int64)
        ids = ids if kind == "ragged" else ids.to_sparse()
        model.train_on_batch(ids, np.zeros((size, 1)))
        assert model.predict_on_batch(ids).shape == (size, 1)
        counts.append(len(traced))
    # The first shape, then any.
    assert counts[1:] == [counts[1]] * 5
    # Of `size` examples the i-th has i times the id.
    assert model.rows.table.lookup([3]) == sum(n * (n - 1) // 2 for n in range(2, 8))
