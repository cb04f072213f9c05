"""HetEmbeddingCollection: features and tables in the shape of keras-rs's DistributedEmbedding.

What each feature's output is, is in test_pooling.py; here is which table and row it comes from.
"""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf import optimizers
from het_tf.layers import FeatureConfig, HetEmbedding, HetEmbeddingCollection, TableConfig
from het_tf.storage.checkpoints import table_schema

BATCH = 4


def test_preprocessed_inputs_are_those_of_a_call():
    table = TableConfig("t", 10, 4, combiner="sum")
    layer = HetEmbeddingCollection({"a": FeatureConfig("a", table)})
    ids, weights = {"a": np.array([[1, 2]])}, {"a": np.array([[0.5, 2.0]], np.float32)}
    for given in ((ids,), (ids, weights)):
        expected = layer(*given)
        outputs = layer(layer.preprocess(*given, training=True))
        np.testing.assert_array_equal(outputs["a"], expected["a"])
    symbolic = {"a": keras.Input((2,), dtype="int64")}, {"a": keras.Input((2,))}
    model = keras.Model(symbolic, layer(layer.preprocess(*symbolic)))
    np.testing.assert_array_equal(model([ids, weights])["a"], expected["a"])


def test_features_that_are_called_as_what_is_preprocessed():
    table = TableConfig("t", 10, 4)
    layer = HetEmbeddingCollection(
        {name: FeatureConfig(name, table) for name in ("inputs", "weights")}
    )
    outputs = layer({"inputs": np.array([[1]]), "weights": np.array([[2]])})
    np.testing.assert_array_equal(outputs["weights"], layer.layers[0].table.lookup([2]))


def test_table_stacking_of_keras_rs():
    configs = [FeatureConfig(name, TableConfig(name, 10, 4)) for name in ("t", "u")]
    for stacking in ("auto", None, ["t", "u"], [["t", "u"]]):
        layer = HetEmbeddingCollection(configs, table_stacking=stacking, update_stats=False)
        assert len(layer.layers) == 1
    for arguments, message in [
        ({"table_stacking": [["t", "v"]]}, r"there are \['t', 'u'\], not \[\['t', 'v'\]\]"),
        ({"table_stacking": "all"}, "table_stacking must be .*, not 'all'"),
        ({"update_stats": True}, "update_stats must be False, not True"),
    ]:
        with pytest.raises(ValueError, match=message):
            HetEmbeddingCollection(configs, **arguments)


def test_embed_reduce():
    layer = het_tf.layers.EmbedReduce(10, 4, name="bags")
    ids = np.array([[1, 2, 2]])
    outputs = layer(ids)
    rows = layer.table.lookup(ids[0])
    np.testing.assert_allclose(outputs, rows.mean(axis=0, keepdims=True), rtol=1e-6)
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    assert (type(again), again.combiner) == (het_tf.layers.EmbedReduce, "mean")
    assert het_tf.layers.EmbedReduce(10, 4, combiner="max").combiner == "max"


def test_the_shapes_of_the_outputs():
    rows, bags = (
        TableConfig(name, 10, dim, combiner=combiner)
        for name, dim, combiner in (("rows", 4, None), ("bags", 2, "mean"))
    )
    layer = HetEmbeddingCollection(
        {"a": FeatureConfig("a", rows), "b": (FeatureConfig("b", bags), FeatureConfig("c", rows))}
    )
    shapes = {"a": (None, 3), "b": ((2, 5), (7,))}
    assert layer.compute_output_shape(shapes) == {"a": (None, 3, 4), "b": ((2, 2), (7, 4))}


def table(name, dim=3, **arguments):
    arguments = {"initializer": "normal", "optimizer": optimizers.SGD(1.0), **arguments}
    return TableConfig(name, vocabulary_size=10, embedding_dim=dim, **arguments)


def feature(name, of, shape=(None, 2)):
    return FeatureConfig(name, of, input_shape=shape, output_shape=(None, of.embedding_dim))


def shops_and_users(rate=1.0):
    """Two tables that share one of het_tf, one of another width; one table of two features."""
    sgd = optimizers.SGD(rate)
    users, words = table("users", optimizer=sgd), table("words", 5, optimizer=sgd)
    shops = table("shops", combiner="sum", optimizer=sgd)
    return {
        "who": feature("who", users),
        "where": (feature("here", shops), feature("there", shops)),
        "said": feature("said", words),
    }


def ids_of(kind="dense"):
    flat = [np.array([[1, 2], [3, 3], [0, 9], [4, 4]]) + shift for shift in (0, 0, -1, 0)]
    flat = [tf.constant(np.maximum(each, 0)) for each in flat]
    if kind == "ragged":
        flat = [tf.RaggedTensor.from_tensor(each, padding=9) for each in flat]
    if kind == "sparse":
        flat = [tf.sparse.from_dense(each) for each in flat]
    who, here, there, said = flat
    return {"who": who, "where": (here, there), "said": said}


def expected_of(tables, ids, combiner):
    pool = {"mean": np.mean, "sum": np.sum}[combiner]
    return np.array([pool(tables[each], 0) if len(each) else 0 * tables[0] for each in ids])


def lists(ids):
    if isinstance(ids, tf.RaggedTensor):
        return ids.to_list()
    if isinstance(ids, tf.SparseTensor):
        return [[i for i in each if i] for each in tf.sparse.to_dense(ids).numpy().tolist()]
    return ids.numpy().tolist()


def test_outputs_are_those_of_each_features_table():
    for kind in ("dense", "ragged", "sparse"):
        check_outputs_of(kind)


def check_outputs_of(kind):
    layer = HetEmbeddingCollection(shops_and_users())
    ids = ids_of(kind)
    outputs = layer(ids)
    tables = layer.get_embedding_tables()
    assert {name: rows.shape for name, rows in tables.items()} == {
        "users": (10, 3),
        "shops": (10, 3),
        "words": (10, 5),
    }
    assert not np.allclose(tables["users"], tables["shops"])
    who = expected_of(tables["users"], lists(ids["who"]), "mean")
    np.testing.assert_allclose(outputs["who"], who, rtol=1e-5, atol=1e-6)
    for output, each in zip(outputs["where"], ids["where"], strict=True):
        np.testing.assert_allclose(
            output, expected_of(tables["shops"], lists(each), "sum"), rtol=1e-5, atol=1e-6
        )
    said = expected_of(tables["words"], lists(ids["said"]), "mean")
    np.testing.assert_allclose(outputs["said"], said, rtol=1e-5, atol=1e-6)


def test_tables_of_one_width_and_optimizer_share_one_and_it_is_updated_once():
    layer = HetEmbeddingCollection(shops_and_users())
    ids = ids_of()
    layer(ids)
    assert len(layer.layers) == 2
    before = layer.get_embedding_tables()
    with tf.GradientTape() as tape:
        outputs = layer(ids)
        loss = tf.reduce_sum(outputs["where"][0]) + 2 * tf.reduce_sum(outputs["where"][1])
    train_rows(tape, loss, layer)
    after = layer.get_embedding_tables()
    counts = [np.bincount(each.numpy().ravel(), minlength=10) for each in ids["where"]]
    change = (counts[0] + 2 * counts[1])[:, np.newaxis] * np.ones(3)
    np.testing.assert_allclose(before["shops"] - after["shops"], change, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(before["users"], after["users"])
    np.testing.assert_array_equal(before["words"], after["words"])
    # One update of each row, though two features looked it up.
    (shared,) = (each for each in layer.layers if each.output_dim == 3)
    assert set(shared.table.export().clocks) == {1}


def test_weights_and_their_structure():
    layer = HetEmbeddingCollection(shops_and_users())
    ids = ids_of()
    weights = tf.nest.map_structure(lambda x: tf.constant([[1.0, 2.0]] * BATCH), ids)
    outputs = layer(ids, weights)
    rows = layer.get_embedding_tables()["users"][lists(ids["who"])]
    np.testing.assert_allclose(outputs["who"], (rows[:, 0] + 2 * rows[:, 1]) / 3, rtol=1e-5)
    with pytest.raises(ValueError, match="inputs must have the structure of feature_configs"):
        layer({"who": ids["who"]})
    with pytest.raises(ValueError, match="weights must have the structure of feature_configs"):
        layer(ids, weights={"who": weights["who"]})


def test_structures():
    for nest in (lambda f: f, lambda f: [f], lambda f: {"a": (f,)}):
        layer = HetEmbeddingCollection(nest(feature("one", table("t"))))
        output = layer(nest(tf.constant([[1, 2]])))
        keras.tree.assert_same_structure(nest(0), output)
        assert keras.tree.flatten(output)[0].shape == (1, 3)


def test_an_ordered_dict_has_no_order_of_its_own(tmp_path):
    """Ids were looked up in each other's tables, and a model that was saved did not load."""
    ordered = collections.OrderedDict((n, feature(n, table(n, combiner=None))) for n in "ba")
    layer = HetEmbeddingCollection([ordered], name="all")
    inputs = [{n: keras.Input((), dtype="int64", name=n) for n in "ab"}]
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    tables = layer.get_embedding_tables()
    for each in (layer, keras.models.load_model(tmp_path / "model.keras").get_layer("all")):
        for kind in (dict, collections.OrderedDict):
            ids = kind([("b", tf.constant([1])), ("a", tf.constant([7]))])
            (outputs,) = each([ids])
            np.testing.assert_array_equal(outputs["b"], tables["b"][[1]])
            np.testing.assert_array_equal(outputs["a"], tables["a"][[7]])


def test_fields_of_another_order_are_an_error():
    features, others = (collections.namedtuple("Ids", names) for names in ("a b", "b a"))
    layer = HetEmbeddingCollection([features(*(feature(n, table(n)) for n in "ab"))])
    ids = {n: tf.constant([[i]]) for i, n in enumerate("ab")}
    with pytest.raises(ValueError, match=r"fields are \('a', 'b'\), not \('b', 'a'\)"):
        layer([others(**ids)])
    rows = {n: each[[i]] for i, (n, each) in enumerate(layer.get_embedding_tables().items())}
    (outputs,) = layer([features(**ids)])
    np.testing.assert_array_equal(outputs.a, rows["a"])
    np.testing.assert_array_equal(outputs.b, rows["b"])


def test_one_id_for_each_example():
    layer = HetEmbeddingCollection({"one": feature("one", table("t"), (None,))})
    outputs = layer({"one": tf.constant([7, 1, 7])})
    rows = layer.get_embedding_tables()["t"]
    np.testing.assert_allclose(outputs["one"], rows[[7, 1, 7]], rtol=1e-6)


def test_ids_that_are_none_or_out_of_the_vocabulary():
    layer = HetEmbeddingCollection([feature("a", table("t")), feature("b", table("u"))])
    of_feature = "ids of feature b .*"
    for dtype, id_, message in [
        ("int32", 10, r"'b' hold 10, .* \[0, 10\)"),
        ("int64", -1, r"'b' hold -1, .* \[0, 10\)"),
        ("float32", 10, r"'b' hold 10, .* \[0, 10\)"),
        (
            "uint64",
            2**63,
            of_feature + r"must be at most 2\*\*63 - 1, not 9223372036854775808",
        ),
        ("float32", 2.5, of_feature + "must be whole numbers, not 2.5"),
        ("float32", 2.0**24, of_feature + "apart below"),
    ]:
        ids = [tf.constant([[1, 2]]), tf.constant([[3, id_]], dtype)]
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            layer(ids)


TABLE = table("t")


BAD_ARGUMENTS = [
    (lambda: TableConfig("t", 0, 3), "vocabulary_size"),
    (lambda: TableConfig("t", 5, 0), "embedding_dim"),
    (lambda: TableConfig("", 5, 3), "name of a table"),
    (lambda: TableConfig("t", 5, 3, combiner="average"), "combiner"),
    (lambda: TableConfig("t", 5, 3, placement="sparsecore"), "placement of table t"),
    (lambda: FeatureConfig("f", "t"), "table of feature f must be a TableConfig, not 't'"),
    (lambda: FeatureConfig("f", TABLE, None, (None, 4)), "output_shape of feature f"),
    (lambda: HetEmbeddingCollection({}), "at least"),
    (
        lambda: HetEmbeddingCollection({"a": feature("a", TABLE), 1: feature("b", TABLE)}),
        r"keys of feature_configs must be such as can be sorted, .* not \['a', 1\]",
    ),
    (lambda: HetEmbeddingCollection([TABLE]), "nested structure of FeatureConfig"),
    (
        lambda: HetEmbeddingCollection([feature("a", TABLE), feature("b", table("t"))]),
        "two tables are called 't'",
    ),
    (lambda: HetEmbeddingCollection([feature("a", TABLE)], table_stacking=["u"]), "stacking"),
    (lambda: HetEmbeddingCollection([feature("a", TABLE)], nonfinite="no"), "nonfinite"),
]


def test_bad_arguments(subtests):
    for make, message in BAD_ARGUMENTS:
        with subtests.test(message), pytest.raises(ValueError, match=message):
            make()


def model_of(layer, kind="dense", weighted=False):
    kinds = {"ragged": kind == "ragged", "sparse": kind == "sparse"}

    def inputs_of(dtype, of=""):
        return keras.tree.map_structure(
            lambda feature: keras.Input((2,), dtype=dtype, name=of + feature.name, **kinds),
            layer.feature_configs,
        )

    inputs = inputs_of("int32")
    weights = inputs_of("float32", "weight_of_") if weighted else None
    outputs = keras.tree.flatten(layer(inputs, weights))
    joined = keras.layers.Concatenate()(outputs)
    given = (inputs, weights) if weighted else inputs
    return keras.Model(given, keras.layers.Dense(1)(joined))


def initializers_of_their_own():
    kinds = keras.initializers
    given = {
        "ones": "ones",
        "uniform": kinds.RandomUniform(2, 3),
        "glorot": "glorot_uniform",
        "orthogonal": kinds.Orthogonal(),
        "same": kinds.Orthogonal(),
        "constant": kinds.Constant(7.0),
    }
    sgd = optimizers.SGD(1.0)
    tables = {n: table(n, initializer=i, optimizer=sgd) for n, i in given.items()}
    return HetEmbeddingCollection({n: feature(n, of) for n, of in tables.items()}, seed=3)


def test_tables_with_initializers_of_their_own_share_one():
    layer = initializers_of_their_own()
    (shared,) = layer.layers
    layer.build()
    tables = layer.get_embedding_tables()
    assert (tables["ones"] == 1).all()
    assert (tables["constant"] == 7).all()
    assert ((tables["uniform"] >= 2) & (tables["uniform"] < 3)).all()
    assert len(np.unique(tables["uniform"])) == 30
    limit = np.sqrt(6 / (10 + 3))
    assert limit / 2 < np.abs(tables["glorot"]).max() <= limit, "fan-in is the table's own"
    for name in ("orthogonal", "same"):
        np.testing.assert_allclose(tables[name].T @ tables[name], np.eye(3), atol=1e-6)
    assert not np.allclose(tables["orthogonal"], tables["same"])
    again = HetEmbeddingCollection.from_config(layer.get_config())
    again.build()
    for name, rows in again.get_embedding_tables().items():
        np.testing.assert_array_equal(rows, tables[name])
    assert again.layers[0].get_config() == shared.get_config()


@pytest.mark.exhaustive
def test_rows_that_nobody_updated_are_served_with_the_initializers_of_their_tables(tmp_path):
    layer = initializers_of_their_own()
    ids = {n: tf.constant([[1, 9]], tf.int64) for n in layer.feature_configs}
    inputs = {n: keras.Input((2,), dtype="int64", name=n) for n in ids}
    model = keras.Model(inputs, layer(inputs))
    expected = model(ids)
    het_tf.export_saved_model(model, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    served = loaded.serve(ids)
    for name, rows in expected.items():
        np.testing.assert_allclose(served[name], rows, rtol=0, atol=1e-6)


def test_a_model_is_saved_and_loaded_with_its_shared_tables(tmp_path):
    cache = het_tf.CacheConfig(5)
    layer = HetEmbeddingCollection(shops_and_users(0.1), cache=cache, name="all")
    model = model_of(layer)
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(ids_of(), np.arange(BATCH, dtype=np.float32), epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    again = loaded.get_layer("all")
    assert again.get_config() == layer.get_config()
    assert HetEmbeddingCollection.from_config(layer.get_config()).get_config() == again.get_config()
    for name, rows in layer.get_embedding_tables().items():
        np.testing.assert_array_equal(again.get_embedding_tables()[name], rows)
    np.testing.assert_allclose(loaded(ids_of()), model(ids_of()), rtol=1e-6)
    assert len(again.layers) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_fit_with_weights(kind):
    model = model_of(HetEmbeddingCollection(shops_and_users(rate=0.05)), kind, weighted=True)
    model.compile("adam", "mse")
    ids = ids_of(kind)
    weights = keras.tree.map_structure(lambda x: tf.cast(x, tf.float32) * 0.1, ids)
    given = (ids, weights)
    data = tf.data.Dataset.from_tensors((given, np.arange(4, dtype=np.float32))).repeat(30)
    losses = model.fit(data, epochs=2, verbose=0).history["loss"]
    assert losses[1] < 0.5 * losses[0]


def test_tables_of_a_layer_that_is_made_not_trainable_stay_as_they_are():
    layer = HetEmbeddingCollection(shops_and_users(), trainable=False)
    model = model_of(layer, "dense", False)
    model.compile("adam", "mse", run_eagerly=True)
    model.train_on_batch(ids_of(), np.arange(4, dtype=np.float32))
    assert sum(each.table.size() for each in layer.layers) == 0
    again = HetEmbeddingCollection.from_config(layer.get_config())
    assert not any(each.trainable for each in again.layers)


def test_one_process_serves_it_with_stock_ops(tmp_path):
    layer = HetEmbeddingCollection({"a": feature("a", table("t")), "b": feature("b", table("u"))})
    inputs = {name: keras.Input((2,), dtype="int64", name=name) for name in ("a", "b")}
    outputs = layer(inputs)
    model = het_tf.keras.Model(inputs, keras.layers.Concatenate()([outputs["a"], outputs["b"]]))
    model.export(tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    given = {name: tf.constant([[1, 2], [9, i]], tf.int64) for i, name in enumerate("ab")}
    np.testing.assert_allclose(loaded.serve(given), model(given), rtol=1e-5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ids of feature a are not all in"):
        loaded.serve({"a": tf.constant([[10, 1]], tf.int64), "b": given["b"][:1]})


def test_a_single_feature_trains_as_the_layer_does():
    collection = HetEmbeddingCollection(feature("f", table("t", combiner="sqrtn")), seed=5)
    alone = HetEmbedding(
        3, combiner="sqrtn", embeddings_initializer="normal", optimizer=optimizers.SGD(1.0), seed=5
    )
    ids = tf.constant([[1, 2], [2, 2]])
    for layer in (collection, alone):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) ** 2)
        train_rows(tape, loss, layer)
    rows = alone.table.lookup(np.arange(10))
    np.testing.assert_allclose(collection.get_embedding_tables()["t"], rows, rtol=1e-6)


# How a collection whose tables changed since is given what was saved.


def sized(tables):
    """A model of a table for each name, in this order: its size, or its size and optimizer."""
    arguments = {name: each if isinstance(each, tuple) else (each, "adam") for name, each in tables}
    features = [
        FeatureConfig(name, TableConfig(name, size, 3, "normal", *optimizer, combiner="sum"))
        for name, (size, *optimizer) in arguments.items()
    ]
    layer = HetEmbeddingCollection(features, seed=3, name="tables")
    inputs = [keras.Input((None,), dtype="int64") for _ in features]
    model = het_tf.keras.Model(inputs, layer(inputs))
    return model, layer


SAVED = [("item", 10), ("user", 10)]
USERS_ROW = np.full((1, 3), 7, np.float32)


def saver_of(form, folder):
    """What saves a model, and what gives another model what was saved."""
    path = str(folder / "saved")

    def checkpoint(model):
        # Of the layer, since a model's names in it shift when it has more inputs.
        return tf.train.Checkpoint(layer=model.get_layer("tables"))

    def save(model):
        if form == "checkpoint":
            checkpoint(model).write(path)
        elif form == "manager":
            manager = het_tf.checkpoint.Manager(checkpoint(model), path)
            manager.save()
            manager.wait()
        elif form == "weights":
            model.save_weights(f"{path}.weights.h5")
        else:
            with het_tf.checkpoint.rows_in(path):
                model.save_weights(f"{path}.weights.h5")

    def load(model):
        if form == "checkpoint":
            checkpoint(model).read(path)
        elif form == "manager":
            het_tf.checkpoint.Manager(checkpoint(model), path).restore_or_initialize()
        else:
            model.load_weights(f"{path}.weights.h5")

    return save, load


@pytest.mark.parametrize("form", ["checkpoint", "manager", "weights", "beside"])
def test_a_table_that_grew_has_its_rows_and_one_that_is_elsewhere_is_named(form, tmp_path):
    save, load = saver_of(form, tmp_path)
    model, layer = sized(SAVED)
    item, user = (first for _, _, first in layer.layers[0].layout)
    assert item == 0
    layer.layers[0].table.assign(np.array([user + 7]), USERS_ROW)
    save(model)
    for tables in (
        [("item", 1000), ("user", 10)],
        [("item", 5), ("user", 8)],
        [("item", 10), ("user", 10), ("shop", 10)],
        # Keras's files lack what a layer of its own would have to be given.
        *([[*SAVED, ("shop", (10, "sgd"))]] if form in ("checkpoint", "manager") else []),
    ):
        grown, layer = sized(tables)
        load(grown)
        np.testing.assert_array_equal(layer.get_embedding_tables()["user"][[7]], USERS_ROW)
        assert layer.layers[0].table.size() == 1
    for tables, message in (
        ([("item", 10), ("shop", 10), ("user", 10)], f"table user: .*key {user} on there, .*key"),
        (
            [("user", 10), ("item", 10)],
            r"table item: layers\[0\] from key 0 on there, .*table user",
        ),
        ([("thing", 10), ("user", 10)], "table item: .* there, nowhere in the layer$"),
        ([("item", 10)], "table user: .* there, nowhere in the layer$"),
        (
            [("item", 10), ("user", (10, "sgd"))],
            r"table user: .*, layers\[1\] from key 0 on in the",
        ),
        (
            [("item", (10, "sgd")), ("user", 10)],
            r"table user: .*, layers\[1\] from key 0 on in the",
        ),
    ):
        other, layer = sized(tables)
        for each in layer.layers:
            each.table.assign(np.array([5]), USERS_ROW)
        with pytest.raises(ValueError, match=message):
            load(other)
        assert [each.table.size() for each in layer.layers] == [1] * len(layer.layers)


def test_tables_that_share_a_layer_begin_at_multiples_of_four_billion_keys():
    _, layer = sized([("item", 2**32 + 1), ("user", 2**32), ("shop", 10)])
    expected = (("item", 0, 0), ("user", 0, 2 * 2**32), ("shop", 0, 3 * 2**32))
    assert layer.layers[0].layout == expected


def test_tables_that_came_to_share_one_do_not_lose_rows_in_silence(tmp_path):
    save, load = saver_of("checkpoint", tmp_path)
    model, _ = sized([("item", 10), ("user", (10, "sgd"))])
    save(model)
    with pytest.raises(ValueError, match=r"table user: layers\[1\] from key 0 on there, layers\[0"):
        load(sized(SAVED)[0])


def test_rows_of_before_are_taken_where_they_are_of_one_table(tmp_path):
    table = sized(SAVED[:1])[1].layers[0].table
    table_schema.check_shape({"format": 1, "dim": 3}, table, "it")
    table = sized(SAVED)[1].layers[0].table
    with pytest.raises(ValueError, match=r"^it does not say .* tables \['item', 'user'\]$"):
        table_schema.check_shape({"format": 1, "dim": 3}, table, "it")


def test_a_damaged_layout_is_named():
    table = sized(SAVED)[1].layers[0].table
    for layout in (3, [], {"t": 3}, {"t": [0]}, {"t": [0, -1]}, {"t": [0, "0"]}):
        config = table_schema.describe(table) | {"layout": layout}
        with pytest.raises(ValueError, match="it says layout = "):
            table_schema.check_description(config)
        with pytest.raises(ValueError, match=r"^it is damaged: it says layout = "):
            table_schema.check_shape(config, table, "it")
