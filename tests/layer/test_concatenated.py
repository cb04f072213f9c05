"""HetEmbeddingCollection(concatenate=True): what Keras's Concatenate makes of its outputs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf import ops, optimizers
from het_tf.layers import FeatureConfig, HetEmbeddingCollection, TableConfig

BATCH, ROWS, DIM = 6, 20, 3


def configs(combiners, dims=None):
    """A feature and a table for each combiner."""
    return {
        f"f{i}": FeatureConfig(
            f"f{i}",
            TableConfig(
                f"t{i}",
                ROWS,
                DIM if dims is None else dims[i],
                initializer="uniform",
                optimizer=optimizers.Adagrad(0.5),
                combiner=combiner,
            ),
        )
        for i, combiner in enumerate(combiners)
    }


def ids_of(shapes):
    rng = np.random.default_rng(0)
    return {
        f"f{i}": tf.constant(rng.integers(0, ROWS, (BATCH, *shape)), tf.int64)
        for i, shape in enumerate(shapes)
    }


def ragged(ids):
    return {name: tf.RaggedTensor.from_tensor(each, padding=3) for name, each in ids.items()}


def sparse(ids):
    return {name: tf.sparse.from_dense(each) for name, each in ids.items()}


# What is looked up together, then what is not: combiners, ids of an example, kind, dims.
TOGETHER = {
    "one id": (["mean"] * 3, [()] * 3, None),
    "one id, and bags of one": (["mean", None, "sum"], [(), (), (1,)], None),
    "bags": (["mean"] * 3, [(4,)] * 3, None),
    "bags of any size": (["max"] * 3, [(2,), (4,), (1,)], None),
    "bags, and one id": (["sqrtn", "mean", None], [(4,), (), ()], None),
    "one feature": (["sum"], [(4,)], None),
    "three axes": ([None, None], [(4,), (4,)], None),
    "three axes, and bags": ([None, "mean"], [(4,), (4, 2)], None),
}
APART = {
    "combiners": (["mean", "sum"], [(4,), (4,)], None),
    "two widths": (["mean"] * 3, [(), (2,), ()], [3, 5, 3]),
}


def layers_alike(combiners, dims=None, **arguments):
    return [
        HetEmbeddingCollection(
            configs(combiners, dims), seed=7, concatenate=concatenate, **arguments
        )
        for concatenate in (True, False)
    ]


def assert_alike(concatenated, apart, ids, weights=None):
    """Outputs, and the tables that two steps make of them, compiled as in fit."""

    @tf.function(autograph=False)
    def step(layer, factors):
        with tf.GradientTape() as tape:
            output = layer(ids, weights)
            if not layer.concatenate:
                output = tf.concat(keras.tree.flatten(output), -1)
            loss = tf.reduce_sum(output * factors)
        train_rows(tape, loss, layer)
        return output

    rng = np.random.default_rng(1)
    apart.build()
    shape = concatenated(ids, weights).shape
    for _ in range(2):
        factors = tf.constant(rng.normal(size=shape), tf.float32)
        outputs = [step(layer, factors) for layer in (concatenated, apart)]
        np.testing.assert_allclose(*outputs, rtol=1e-6, atol=1e-6)
    one, other = (layer.get_embedding_tables() for layer in (concatenated, apart))
    assert one.keys() == other.keys()
    for name, rows in one.items():
        assert np.abs(rows).max() > 0.5  # of uniform(-.05, .05): they were trained
        np.testing.assert_allclose(rows, other[name], rtol=1e-5, atol=1e-6)


def test_it_gives_and_trains_what_the_outputs_apart_do(subtests):
    for case, (combiners, shapes, dims) in (TOGETHER | APART).items():
        with subtests.test(case):
            assert_alike(*layers_alike(combiners, dims), ids_of(shapes))


def test_ragged_and_sparse_bags():
    cache = het_tf.CacheConfig(8)
    for kind in (ragged, sparse):
        assert_alike(*layers_alike(["mean"] * 3, cache=cache), kind(ids_of([(4,)] * 3)))


def test_weights():
    ids = ids_of([(4,)] * 2)
    weights = {name: tf.random.stateless_uniform(x.shape, (1, 2)) for name, x in ids.items()}
    assert_alike(*layers_alike(["mean"] * 2), ids, weights)


def test_rows_and_gradients_are_not_copied(subtests):
    copies = ("ConcatV2", "Pack", "Slice", "Split", "Unpack", "Transpose")
    for case, (combiners, shapes, _) in TOGETHER.items():
        layer, _ = layers_alike(combiners)
        ids = ids_of(shapes)

        def step(layer=layer, ids=ids):
            with tf.GradientTape() as tape:
                output = layer(ids)
            train_rows(tape, output, layer, of_loss=tf.ones_like(output))

        layer(ids)
        graph = tf.function(step, autograph=False).get_concrete_function().graph
        floats = [
            op
            for op in graph.get_operations()
            if op.type in copies and op.outputs[0].dtype == tf.float32
        ]
        with subtests.test(case):
            assert not floats


@pytest.mark.exhaustive
def test_a_model_with_it_trains_is_saved_and_served(tmp_path):
    ids = ids_of([(), (3,), ()])
    layer, _ = layers_alike(["mean", "sum", "mean"])
    inputs = {name: keras.Input(x.shape[1:], dtype="int64", name=name) for name, x in ids.items()}
    output = layer(inputs)
    assert output.shape == (None, 3 * DIM)
    assert layer.compute_output_shape({n: x.shape for n, x in inputs.items()}) == (None, 3 * DIM)
    model = het_tf.keras.Model(inputs, keras.layers.Dense(1)(output))
    model.compile("adam", "mse")
    labels = np.arange(BATCH, dtype=np.float32)
    losses = [model.train_on_batch(ids, labels) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    expected = model(ids)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[-2].concatenate
    np.testing.assert_allclose(loaded(ids), expected, rtol=1e-6)
    model.export(tmp_path / "served")
    served = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(served.serve(ids), expected, rtol=1e-5)


def test_what_was_saved_before_there_was_concatenate():
    config = HetEmbeddingCollection(configs(["mean"])).get_config()
    assert config.pop("concatenate") is False
    assert not HetEmbeddingCollection.from_config(config).concatenate


def test_the_dtype_policy():
    layer = HetEmbeddingCollection(configs(["mean"] * 2), concatenate=True, dtype="mixed_bfloat16")
    assert layer(ids_of([(), ()])).dtype == tf.bfloat16


DO_NOT_FIT = [
    (
        ["mean", None],
        lambda: ids_of([(4,), (4,)]),
        r"that of feature f1 has shape \(6, 4, 3\), and those of f0 have \(6, None\)",
    ),
    ([None], lambda: ragged(ids_of([(4,)])), "that of feature f0 is ragged"),
    (
        ["mean", "mean"],
        lambda: {**ids_of([()]), "f1": tf.constant([1, 2])},
        r"that of feature f1 has shape \(2, 3\), and those of f0 have \(6, None\)",
    ),
]


def test_outputs_that_do_not_fit_are_named(subtests):
    for combiners, inputs, message in DO_NOT_FIT:
        layer = HetEmbeddingCollection(configs(combiners), concatenate=True)
        symbolic = tf.nest.map_structure(
            lambda x: keras.KerasTensor(x.shape, "int64", ragged=isinstance(x, tf.RaggedTensor)),
            inputs(),
        )
        with subtests.test(message):
            with pytest.raises(ValueError, match=message):
                layer(inputs())
            with pytest.raises(ValueError, match=message):
                layer.compute_output_spec(symbolic)


def test_sizes_that_one_feature_knows_are_those_of_all():
    layer = HetEmbeddingCollection(configs(["mean"] * 3), concatenate=True)
    layer.build()

    def output_of(*shapes):
        specs = {f"f{i}": tf.TensorSpec(shape, tf.int64) for i, shape in enumerate(shapes)}
        return (
            tf.function(layer.call, autograph=False).get_concrete_function(specs).structured_outputs
        )

    assert output_of([None], [5, 4], [None, 2]).shape == (5, 3 * DIM)
    message = r"feature f2 has shape \(6, 3\), and those of f0, f1 have \(5, None\)"
    with pytest.raises(ValueError, match=message):
        output_of([None], [5, 4], [6, 2])


def test_axes_of_unknown_sizes_are_not_taken_for_one_another():
    layers = layers_alike([None, None])
    ids = [{"f0": tf.ones([2, 3], tf.int64), "f1": tf.ones([2, 3], tf.int64)}]
    ids.append(ids[0] | {"f1": tf.ones([3, 2], tf.int64)})
    specs = {name: tf.TensorSpec([None, None], tf.int64) for name in ids[0]}
    for layer in layers:
        layer.build()
    called = tf.function(layers[0].call, autograph=False, input_signature=[specs])
    apart = layers[1](ids[0])
    np.testing.assert_array_equal(called(ids[0]), tf.concat([apart["f0"], apart["f1"]], -1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="ConcatOp"):
        called(ids[1])


def test_what_is_no_bool_is_refused():
    with pytest.raises(ValueError, match="concatenate must be True or False, not 'no'"):
        HetEmbeddingCollection(configs(["mean"]), concatenate="no")


def test_ids_of_an_unknown_number_of_axes_are_named():
    layer = HetEmbeddingCollection(configs(["mean"]), concatenate=True)
    layer.build()
    with pytest.raises(ValueError, match="feature f0 must have a known number of axes"):
        tf.function(layer.call, autograph=False).get_concrete_function(
            {"f0": tf.TensorSpec(None, tf.int64)}
        )


def test_batches_whose_sizes_only_their_values_tell():
    layer = HetEmbeddingCollection(configs(["mean"] * 2), concatenate=True)
    layer.build()
    signature = {name: tf.TensorSpec([None], tf.int64) for name in ("f0", "f1")}
    called = tf.function(layer.call, autograph=False, input_signature=[signature])
    assert called(ids_of([(), ()])).shape == (BATCH, 2 * DIM)
    message = "feature 'f1' has 2 ids, 1 in a bag, and feature 'f0' 3, 1 in a bag"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        called({"f0": tf.constant([1, 2, 3], tf.int64), "f1": tf.constant([1, 2], tf.int64)})
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"'f1' hold 20, .* 20"):
        called({"f0": tf.constant([1], tf.int64), "f1": tf.constant([20], tf.int64)})


def test_the_op_puts_bags_of_any_size_in_the_order_of_examples():
    ids = [tf.constant([1, 2], tf.int32), tf.constant([[3, 4], [5, 6]], tf.int64)]
    of_two = {"offsets": [0, 100], "sizes": [10, 10], "names": ["a", "b"]}
    np.testing.assert_array_equal(ops.stack_ids(ids, **of_two), [1, 2, 103, 104, 105, 106])
    interleaved = ops.stack_ids(ids, bag_sizes=[1, 2], **of_two)
    np.testing.assert_array_equal(interleaved, [1, 103, 104, 2, 105, 106])
    for sizes, message in [
        ([1], "bag_sizes holds 1 numbers for 2 features"),
        ([1, 0], r"bag_sizes\[1\] = 0 is not positive"),
        ([1, 1], "feature 'b' has 4 ids, 1 in a bag, and feature 'a' 2, 1 in a bag"),
        ([4, 8], "feature 'a' has 2 ids, 4 in a bag"),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            ops.stack_ids(ids, bag_sizes=sizes, **of_two)
    empty = [x[:0] for x in ids]
    assert ops.stack_ids(empty, bag_sizes=[1, 2], **of_two).shape == (0,)
