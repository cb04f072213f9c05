"""Rows that come and go, in layers, collections and files of one process."""

import json
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf import Admission, Expiry, KeyRange, lifetimes, ops
from het_tf.checkpoint import TableState
from het_tf.tables.table import EmbeddingTable, TableExport

SGD = het_tf.optimizers.SGD(1.0)
DAYS = Expiry(age=2, time="given")


def make_table(admission=None, expiry=None, **arguments) -> EmbeddingTable:
    rules = lifetimes.spec(admission, expiry)
    return EmbeddingTable(1, SGD, initializer="zeros", lifetimes=rules, **arguments)


def update(table: EmbeddingTable, *keys: int) -> None:
    ids = ops.unique_ids(tf.constant(keys, tf.int64))
    ops.table_apply(table.handle(0), ids, -tf.ones([len(keys), 1]), 1.0)


def keys_of(table: EmbeddingTable) -> list[int]:
    return sorted(table.export().keys.tolist())


@pytest.mark.parametrize("kind", ["checkpoint", "weights"])
def test_clocks_of_another_rule_begin_anew(tmp_path, caplog, kind):
    def layer_of(clock):
        layer = het_tf.layers.HetEmbedding(1, optimizer=SGD, name="rows")
        with pytest.MonkeyPatch.context() as patch:
            made = lambda *args, **others: EmbeddingTable(*args, **others | {"clock": clock})  # noqa: E731
            patch.setattr("het_tf.layers.layer_table.EmbeddingTable", made)
            model = keras.Sequential([keras.Input((), dtype="int64"), layer])
        return model, layer.table

    model, table = layer_of("drift")
    values, clocks = np.float32([[3.0], [4.0]]), np.array([1 << 40, 7])
    table.import_(TableExport(np.array([1, 2]), values, np.zeros((2, 0), np.float32), clocks))
    if kind == "weights":
        path = tmp_path / "x.weights.h5"
        model.save_weights(path)
    else:
        state = TableState(table, lambda: None)
        path = tf.train.Checkpoint(table=state).write(str(tmp_path / "x"))
    for clock, expected in (("drift", [1 << 40, 7]), ("count", [0, 0])):
        other, found = layer_of(clock)
        if kind == "weights":
            other.load_weights(path)
        else:
            tf.train.Checkpoint(table=TableState(found, lambda: None)).read(path)
        rows = found.export()
        order = np.argsort(rows.keys)
        np.testing.assert_array_equal(rows.values[order], values)
        np.testing.assert_array_equal(rows.clocks[order], expected)
        assert ("clock='drift'" in caplog.text) == (clock == "count")


def test_counts_without_a_sketch_are_kept_without_a_word(tmp_path, caplog):
    table = make_table(Admission(count=3))
    update(table, 5)
    path = tf.train.Checkpoint(table=TableState(table, lambda: None)).write(str(tmp_path / "x"))
    other = make_table(Admission(count=2))
    tf.train.Checkpoint(table=TableState(other, lambda: None)).read(path)
    assert other.stats()["candidates"] == 1
    assert "sketch" not in caplog.text


def test_admission_and_expiry_in_a_model_of_one_process():
    embedding = het_tf.layers.HetEmbedding(
        2, optimizer=SGD, admission=Admission(count=2), expiry=DAYS, seed=1
    )
    ids = keras.Input((1,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(embedding(ids))))
    model.compile("sgd", "mse")
    table = embedding.table
    initial = table.lookup([5, 6])

    def fit(*batches: int) -> None:
        for each in batches:
            model.train_on_batch(np.array([[each]]), np.ones((1, 1)))

    table.expire(10)
    fit(5, 6, 6)
    np.testing.assert_array_equal(table.lookup([5]), initial[:1])
    assert keys_of(table) == [6]
    assert table.stats()["candidates"] == 1
    assert table.expire(11) == 0
    fit(5)
    assert keys_of(table) == [5, 6]
    assert table.expire(12) == 1
    assert keys_of(table) == [5]
    np.testing.assert_array_equal(
        model.predict(np.array([[6]]), verbose=0),
        [keras.ops.convert_to_numpy(model.layers[-1](table.lookup([6]).reshape(1, 2)))[0]],
    )
    np.testing.assert_array_equal(table.lookup([6]), initial[1:])
    stats = table.stats()
    counters = {"rows": 1, "rows_created": 2, "rows_expired": 1, "updates_refused": 2}
    assert {name: stats[name] for name in counters} == counters


def test_seconds_pass_by_themselves():
    table = make_table(expiry=Expiry(age=1))
    update(table, 1, 2)
    deadline = time.monotonic() + 60
    while table.size() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert table.stats()["rows_expired"] == 2
    with pytest.raises(ValueError, match="now = 3, but ages in this table are in seconds"):
        table.expire(3)
    assert table.expire() == 0


def test_errors_of_expire():
    table = make_table(expiry=DAYS)
    table.expire(7)
    with pytest.raises(tf.errors.InvalidArgumentError, match="now = 6 must be at least 7"):
        table.expire(6)
    with pytest.raises(ValueError, match="now must be an integer from 0"):
        table.expire(-1)
    assert table.time == 7
    with pytest.raises(tf.errors.FailedPreconditionError, match="has no expiry"):
        make_table(Admission(count=2)).expire()


def test_key_ranges_have_rules_of_their_own():
    far = 2**53 + 1  # a float64 takes it for its neighbour
    ranges = [KeyRange(100, 199, expiry=Expiry(age=1, time="given")), KeyRange(far, far)]
    rules = lifetimes.spec(Admission(count=2), DAYS, ranges)
    table = EmbeddingTable(1, SGD, lifetimes=rules)
    table.expire(0)
    update(table, 1, 100, far - 1, far)
    assert keys_of(table) == [100, far]
    update(table, 1, far - 1)
    assert table.expire(1) == 1
    assert keys_of(table) == [1, far - 1, far]
    assert table.expire(100) == 2
    assert keys_of(table) == [far]


def test_a_collections_tables_have_rules_of_their_own():
    table = het_tf.layers.TableConfig
    tables = {
        "often": table("often", 10, 2, optimizer=SGD, admission=Admission(count=2)),
        "all": table("all", 10, 2, optimizer=SGD),
        "today": table("today", 10, 2, optimizer=SGD, expiry=Expiry(age=1, time="given")),
    }
    configs = {name: het_tf.layers.FeatureConfig(name, each) for name, each in tables.items()}
    collection = het_tf.layers.HetEmbeddingCollection(configs, seed=1)
    collection = type(collection).from_config(json.loads(json.dumps(collection.get_config())))
    assert len(collection.layers) == 1

    def train() -> None:
        with tf.GradientTape() as tape:
            outputs = collection({name: tf.constant([[3]]) for name in tables})
            loss = tf.add_n([tf.reduce_sum(each) for each in outputs.values()])
        train_rows(tape, loss, collection)

    train()
    shared = collection.layers[0].table
    first, second, third = (3 + (place << 32) for place in range(3))
    assert keys_of(shared) == [first, third]  # tables in the order of their features' names
    shared.expire(0)
    train()
    assert keys_of(shared) == [first, second, third]
    shared.expire(1)
    assert keys_of(shared) == [first, second]


def test_rules_are_in_the_config():
    embedding = het_tf.layers.HetEmbedding(
        2,
        admission=Admission(count=3, sketch_bytes=1 << 16),
        expiry=[Expiry(age=5), Expiry(age=1, updates_below=2, norm_below=0.5)],
        key_ranges=[KeyRange(-5, 5, Admission(probability=0.5), Expiry(age=9))],
    )
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(embedding)))
    again = keras.saving.deserialize_keras_object(config)
    for name in ("admission", "expiry", "key_ranges"):
        assert getattr(again, name) == getattr(embedding, name)


BAD_RULES = [
    (lambda: Admission(count=0), "count must be an integer from 1"),
    (lambda: Admission(count=16, sketch_bytes=1 << 20), r"from 1 to 15 \(with sketch_bytes\)"),
    (lambda: Admission(count=2, sketch_bytes=100), "sketch_bytes must be an integer"),
    (lambda: Admission(probability=1.5), "probability must be a number from 0 to 1, not 1.5"),
    (lambda: Admission(count=2, probability=0.5), "probability = 0.5 excludes count = 2"),
    (lambda: Expiry(age=-1), "age must be an integer from 0"),
    (lambda: Expiry(age=1.5), "age must be an integer from 0 .* not 1.5"),
    (lambda: Expiry(age=1, norm_below=float("nan")), "norm_below must be a number"),
    (lambda: Expiry(age=1, updates_below=0), "updates_below must be an integer from 1"),
    (lambda: Expiry(age=1, time="days"), 'time must be "seconds" or "given", not \'days\''),
    (lambda: KeyRange(3, 2), "last must be an integer from 3"),
    (lambda: KeyRange(1, 2, expiry=3), "expiry must be a het_tf.Expiry, a sequence"),
    (
        lambda: het_tf.layers.HetEmbedding(2, admission=3),
        "admission must be a het_tf.Admission",
    ),
    (lambda: het_tf.layers.HetEmbedding(2, key_ranges=[3]), "key_ranges must hold"),
    (
        lambda: het_tf.layers.HetEmbedding(2, key_ranges=KeyRange(1, 5)),
        "key_ranges must be a sequence of het_tf.KeyRange, not KeyRange",
    ),
    (
        lambda: het_tf.layers.HetEmbedding(2, key_ranges=[KeyRange(1, 5), KeyRange(5, 6)]),
        "key_ranges overlap: KeyRange.first=1",
    ),
    (
        lambda: het_tf.layers.HetEmbedding(2, expiry=[Expiry(age=1), DAYS]),
        "all expiries of a layer must have one time",
    ),
]


def test_bad_rules_are_named(subtests):
    for make, message in BAD_RULES:
        with subtests.test(message), pytest.raises(ValueError, match=message):
            make()


def test_clocks_that_have_no_such_rules():
    for clock, expiry, message in [
        ("lamport", Expiry(age=1), "'lamport'"),
        ("drift", Expiry(age=1, updates_below=3), "updates_below = 3 needs clock = 'count'"),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            make_table(expiry=expiry, clock=clock)


def test_a_checkpoint_keeps_ages_updates_and_time(tmp_path):
    rules = (Admission(count=2), [DAYS, Expiry(age=1, updates_below=2, time="given")])
    table = make_table(*rules)
    table.expire(100)
    for _ in range(3):
        update(table, 1, 2, 3)
    table.expire(101)
    update(table, 2)
    update(table, 4, 4)  # a candidate: a key of a batch is one update
    path = tf.train.Checkpoint(table=TableState(table, lambda: None)).write(str(tmp_path / "x"))
    reader = tf.train.load_checkpoint(path)
    (name,) = [n for n in reader.get_variable_to_shape_map() if n.endswith("shard_0/ages")]
    saved = reader.get_tensor(name.replace("ages", "keys")).tolist()
    assert dict(zip(saved, reader.get_tensor(name).tolist(), strict=True)) == {1: 1, 2: 0, 3: 1}

    other = make_table(*rules)
    other.expire(5)
    tf.train.Checkpoint(table=TableState(other, lambda: None)).read(path)
    assert other.time == 101
    assert other.stats()["candidates"] == 1
    assert other.expire(102) == 2
    assert keys_of(other) == [2]
    assert other.export().clocks.tolist() == [3]

    # Where ages are in seconds, or not at all, those of the file mean nothing.
    for expiry in (Expiry(age=3600), None):
        other = make_table(expiry=expiry)
        tf.train.Checkpoint(table=TableState(other, lambda: None)).read(path)
        assert keys_of(other) == [1, 2, 3]
    path = tf.train.Checkpoint(table=TableState(other, lambda: None)).write(str(tmp_path / "y"))
    tf.train.Checkpoint(table=TableState(table, lambda: None)).read(path)
    assert table.expire(500) == 0, "time begins anew"
    assert table.expire(502) == 3


def test_imported_rows_are_as_if_updated_now():
    table = make_table(Admission(count=5), DAYS)
    table.expire(0)
    table.assign(np.array([7]), np.ones((1, 1), np.float32))
    assert table.expire(1) == 0
    assert table.lookup([7])[0] == 1
    assert table.expire(2) == 1


def test_a_table_without_rules_takes_no_more_memory():
    tables = [make_table(), make_table(expiry=Expiry(age=100))]
    for table in tables:
        update(table, *range(10000))
    plain, mortal = (table.stats()["memory_bytes"] for table in tables)
    assert plain < mortal <= plain * 1.3
