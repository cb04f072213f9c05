"""Pooled lookups of every kind of input."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf import optimizers

DIM = 5
COMBINERS = ["sum", "mean", "sqrtn", "max"]


def new_layer(dim=DIM, **arguments):
    arguments = {"optimizer": optimizers.SGD(1.0), "seed": 2, **arguments}
    return het_tf.layers.HetEmbedding(dim, embeddings_initializer="normal", **arguments)


LISTS = [[1, 2], [], [3, 3, 0], [0]]
WEIGHTS = [[0.5, 2.0], [], [1.0, -1.0, 3.0], [4.0]]


def as_kind(lists, kind, dtype):
    ragged = tf.ragged.constant(lists, dtype=dtype)
    if kind == "ragged":
        return ragged
    if kind == "sparse":
        return tf.SparseTensor(
            [[i, j] for i, each in enumerate(lists) for j in range(len(each))],
            ragged.flat_values,
            [4, 3],
        )
    return ragged.to_tensor(-1, shape=[4, 3])


def pooled_by_hand(layer, combiner, weights=WEIGHTS, padding=None):
    rows = layer.table.lookup(np.arange(4))
    outputs = []
    for ids, each in zip(LISTS, weights, strict=True):
        kept = [(rows[i], w) for i, w in zip(ids, each, strict=True) if i != padding]
        values = np.array([w * row for row, w in kept])
        w = np.array([w for _, w in kept])
        match combiner if kept else None:
            case None:
                outputs.append(np.zeros(DIM))
            case "sum":
                outputs.append(values.sum(0))
            case "mean":
                outputs.append(values.sum(0) / w.sum())
            case "sqrtn":
                outputs.append(values.sum(0) / np.sqrt((w**2).sum()))
            case "max":
                outputs.append(values.max(0))
    return np.array(outputs)


ONES = [[1.0] * len(each) for each in LISTS]


KINDS = ["dense", "ragged", "sparse"]


def test_pools_every_kind_of_input(subtests):
    for kind in KINDS:
        with subtests.test(kind):
            check_pools(kind)


def check_pools(kind):
    ids = as_kind(LISTS, kind, tf.int32)
    for combiner in COMBINERS:
        layer = new_layer(combiner=combiner, padding_id=-1 if kind == "dense" else None)
        layer.build()
        for weights, of_ids in ((WEIGHTS, as_kind(WEIGHTS, kind, tf.float32)), (ONES, None)):
            by_hand = pooled_by_hand(layer, combiner, weights)
            calls = [layer, tf.function(layer, autograph=False)]
            for call in calls if combiner == "mean" else calls[:1]:
                outputs = call(ids, of_ids)
                assert outputs.shape == (4, DIM)
                np.testing.assert_allclose(outputs, by_hand, rtol=1e-5, atol=1e-6)


def test_padding_is_neither_looked_up_nor_counted(subtests):
    for kind in KINDS:
        with subtests.test(kind):
            check_padding(kind)


def check_padding(kind):
    layer = new_layer(combiner="mean", mask_zero=True)
    ids = as_kind([[i for i in each] or [0] for each in LISTS], kind, tf.int64)
    if kind == "dense":
        ids = tf.maximum(ids, 0)
    with tf.GradientTape() as tape:
        outputs = layer(ids)
        loss = tf.reduce_sum(outputs)
    by_hand = pooled_by_hand(layer, "mean", ONES, padding=0)
    np.testing.assert_allclose(outputs, by_hand, rtol=1e-5)
    train_rows(tape, loss, layer)
    assert sorted(layer.table.export().keys) == [1, 2, 3]


def test_padding_without_a_combiner_reads_as_zeros():
    layer = new_layer(padding_id=7)
    ids = np.array([[1, 7], [7, 2]])
    with tf.GradientTape() as tape:
        outputs = layer(ids)
        loss = tf.reduce_sum(outputs)
    rows = layer.table.lookup([1, 2])
    np.testing.assert_array_equal(outputs, [[rows[0], 0 * rows[0]], [0 * rows[0], rows[1]]])
    train_rows(tape, loss, layer)
    assert sorted(layer.table.export().keys) == [1, 2]


def test_ragged_and_sparse_inputs_without_a_combiner():
    layer = new_layer()
    ragged = layer(as_kind(LISTS, "ragged", tf.int64))
    sparse = layer(as_kind(LISTS, "sparse", tf.int64))
    rows = layer.table.lookup(np.arange(4))
    assert ragged.shape == (4, None, DIM)
    assert sparse.shape == (4, 3, DIM)
    for i, ids in enumerate(LISTS):
        np.testing.assert_array_equal(ragged[i], rows[ids])
        np.testing.assert_array_equal(sparse[i][: len(ids)], rows[ids])
        assert not sparse[i][len(ids) :].numpy().any()


def test_weights_without_and_with_one_axis():
    for layer in (new_layer(), new_layer(combiner="sum")):
        outputs = layer(np.array([1, 2, 2]), np.array([1.0, 2.0, -1.0]))
        rows = layer.table.lookup([1, 2])
        np.testing.assert_allclose(outputs, [rows[0], 2 * rows[1], -rows[1]], rtol=1e-6)


def test_inputs_of_higher_rank():
    layer = new_layer(combiner="sum")
    ids = np.arange(24).reshape(2, 3, 4) % 5
    layer.build()
    rows = layer.table.lookup(np.arange(5))
    np.testing.assert_allclose(layer(ids), rows[ids].sum(-2), rtol=1e-5)
    ragged = tf.ragged.constant([[[1, 2], []], [[3]]], dtype=tf.int64)
    outputs = layer(ragged)
    np.testing.assert_allclose(outputs[0], [rows[1] + rows[2], 0 * rows[1]], rtol=1e-5)
    np.testing.assert_allclose(outputs[1], [rows[3]])
    uniform = tf.RaggedTensor.from_row_lengths(np.array([[1, 2], [3, 3], [4, 0]]), [2, 1])
    outputs = layer(uniform)
    np.testing.assert_allclose(outputs[0], [rows[1] + rows[2], 2 * rows[3]], rtol=1e-5)
    np.testing.assert_allclose(layer(ids, np.array([1.0, 2.0]))[1], 2 * layer(ids)[1], rtol=1e-5)
    sparse = tf.sparse.from_dense(ids)
    np.testing.assert_allclose(
        layer(sparse), rows[ids].sum(-2) - rows[0] * (ids == 0).sum(-1)[..., None], rtol=1e-4
    )
    assert layer(np.zeros([0, 3], np.int64)).shape == (0, DIM)
    assert not layer(np.zeros([2, 0], np.int64)).numpy().any()


def test_weights_get_a_gradient_and_a_frozen_table_none():
    layer = new_layer(combiner="mean")
    weights = tf.Variable([[1.0, 2.0], [3.0, 0.0]])
    layer(np.array([[1, 2], [3, 4]]))
    layer.trainable = False
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(np.array([[1, 2], [3, 4]]), weights)[:, 0])
    gradient = tape.gradient(loss, weights)
    rows = layer.table.lookup([1, 2, 3, 4])[:, 0]
    a, b = rows[0] - rows[1], rows[2] - rows[3]
    np.testing.assert_allclose(gradient, [[2 * a / 9, -a / 9], [0, -b / 3]], rtol=1e-4, atol=1e-6)
    assert layer.table.size() == 0


def test_inputs_and_weights_that_do_not_fit(subtests):
    layer = new_layer(combiner="sum", name="pooled")
    ragged, sparse = tf.ragged.constant, tf.sparse.from_dense
    for ids, weights, error in [
        (tf.constant([[1, 2]]), tf.ones([1, 3]), r"weights of layer .* have shape \(1, 3\)"),
        (ragged([[1]]), tf.ones([1, 1]), "RaggedTensor of the same row lengths"),
        (tf.constant([[1]]), ragged([[1.0]]), "must be a dense tensor"),
        (sparse([[1]]), tf.ones([1, 1]), "must be a SparseTensor"),
        (ragged([[1], [2]]), ragged([[1.0, 2.0], []]), "row lengths"),
        (sparse([[1, 0]]), sparse([[0.0, 1.0]]), "where its inputs lie"),
        (tf.SparseTensor([[1, 0], [0, 0]], [1, 2], [2, 1]), None, "tf.sparse.reorder"),
        (ragged([[1.5]]), None, "must be whole numbers, not 1.5"),
    ]:
        with (
            subtests.test(error),
            pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=error),
        ):
            layer(ids, weights)


def test_bad_arguments():
    for arguments, error in [
        ({"combiner": "average"}, "combiner must be one of sum, mean, sqrtn, max or None"),
        ({"padding_id": 1.5}, "padding_id"),
        ({"padding_id": 3, "mask_zero": True}, "padding_id = 3"),
    ]:
        with pytest.raises(ValueError, match=error):
            new_layer(**arguments)


def test_symbolic_inputs():
    for kind in KINDS:
        for combiner in (None, "mean"):
            kinds = {"ragged": kind == "ragged", "sparse": kind == "sparse"}
            ids = keras.Input((3,), dtype="int32", **kinds)
            weights = keras.Input((3,), dtype="float32", **kinds)
            outputs = new_layer(combiner=combiner)(ids, weights)
            assert outputs.shape == ((None, 3, DIM) if combiner is None else (None, DIM))
            assert outputs.ragged == (kind == "ragged" and combiner is None)
            assert not outputs.sparse
            model = keras.Model([ids, weights], outputs)
            given = [as_kind(LISTS, kind, tf.int32), as_kind(WEIGHTS, kind, tf.float32)]
            assert model(given) is not None


def test_get_config_has_all_and_predict_works():
    layer = new_layer(combiner="sqrtn", padding_id=9)
    restored = keras.layers.deserialize(keras.layers.serialize(layer))
    assert (restored.combiner, restored.padding_id) == ("sqrtn", 9)
    assert restored.get_config() == layer.get_config()
    model = keras.Sequential([keras.Input((2,), dtype="int64"), new_layer(combiner="mean")])
    assert model.predict(np.arange(10).reshape(5, 2), batch_size=2, verbose=0).shape == (5, DIM)


def test_fit_of_ragged_and_weighted_inputs():
    ids = keras.Input((None,), dtype="int64", ragged=True)
    weights = keras.Input((None,), ragged=True)
    layer = new_layer(combiner="mean", optimizer=optimizers.Adam(0.1))
    model = keras.Model([ids, weights], keras.layers.Dense(1)(layer(ids, weights)))
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 9, rng.integers(0, 5)) for _ in range(64)]
    inputs = (
        tf.ragged.constant(lists, dtype=tf.int64),
        tf.ragged.constant([np.ones(len(each)) for each in lists], dtype=tf.float32),
    )
    labels = np.array([[each.sum()] for each in lists], np.float32)
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(16)
    losses = model.fit(data, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    assert layer.table.size() == 9


@pytest.mark.exhaustive
def test_stock_tensorflow_pools_what_is_exported(tmp_path):
    ids = keras.Input((3,), dtype="int64")
    weights = keras.Input((3,))
    layers = [new_layer(combiner=combiner, mask_zero=True) for combiner in COMBINERS]
    model = het_tf.keras.Model([ids, weights], [layer(ids, weights) for layer in layers])
    given = np.array([[1, 2, 0], [0, 0, 0], [3, 3, 1]]), np.array(WEIGHTS[2:3] * 3, np.float32)
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(output) for output in model(list(given))])
    train_rows(tape, loss, *layers)
    model.export(tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    for first in (slice(None), slice(1, 2), slice(0, 0)):  # the second example is all padding
        some = [tf.constant(x[first]) for x in given]
        for served, expected in zip(loaded.serve(*some), model(some), strict=True):
            np.testing.assert_allclose(served, expected, rtol=1e-5, atol=1e-6)
    operations = loaded.serve.concrete_functions[0].graph.get_operations()
    assert not any(op.type.startswith("Het>") for op in operations)
    # Of three ids each there would be [3, 3, DIM] floats.
    shapes = [tensor.shape for op in operations for tensor in op.outputs]
    assert not any(shape.rank == 3 and shape[-1] == DIM for shape in shapes)
