"""Tables in tf.train.Checkpoint, in one process."""

import dataclasses
import gc
import json
import logging
import pathlib
import resource
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf.checkpoint import TableState
from het_tf.tables.table import EmbeddingTable, TableExport

IDS = np.arange(300).reshape(100, 3)
TARGETS = np.ones(100)


def build_model(optimizer=None, width: int = 4) -> tuple[keras.Model, het_tf.layers.HetEmbedding]:
    optimizer = optimizer or het_tf.optimizers.Adam(0.01)
    embedding = het_tf.layers.HetEmbedding(width, optimizer=optimizer, seed=1)
    ids = keras.Input((3,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(embedding(ids))))
    model.compile("sgd", "mse")
    return model, embedding


def trained_model(**arguments) -> tuple[keras.Model, het_tf.layers.HetEmbedding]:
    model, embedding = build_model(**arguments)
    model.fit(IDS, TARGETS, verbose=0)
    return model, embedding


@pytest.fixture(scope="module")
def trained() -> tuple[keras.Model, het_tf.layers.HetEmbedding]:
    """A model and its layer, which no test changes."""
    return trained_model()


def sorted_rows(table: EmbeddingTable) -> list[np.ndarray]:
    rows = table.export()
    order = np.argsort(rows.keys)
    return [getattr(rows, field.name)[order] for field in dataclasses.fields(rows)]


def assert_same_rows(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_restore_brings_back_values_slots_clocks_and_the_learning_rate(tmp_path):
    model, embedding = trained_model()
    embedding.learning_rate = 0.25
    rows = sorted_rows(embedding.table)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    expected = model.predict(IDS, verbose=0)
    embedding.learning_rate = 0.5
    for more in (0, 1000):  # rows that the checkpoint does not have, too
        model.fit(IDS + more, TARGETS, verbose=0)
    assert embedding.table.size() == 600
    assert not np.allclose(model.predict(IDS, verbose=0), expected)

    tf.train.Checkpoint(model=model).restore(path).assert_existing_objects_matched()

    np.testing.assert_array_equal(model.predict(IDS, verbose=0), expected)
    assert_same_rows(sorted_rows(embedding.table), rows)
    assert float(embedding.learning_rate.value) == 0.25


def test_a_checkpoint_may_be_restored_before_there_is_a_table(trained, tmp_path):
    _, embedding = trained
    path = tf.train.Checkpoint(layer=embedding).save(str(tmp_path / "checkpoint"))
    later = het_tf.layers.HetEmbedding(4, optimizer=het_tf.optimizers.Adam(0.01), seed=1)
    tf.train.Checkpoint(layer=later).restore(path)
    later(IDS)
    assert_same_rows(sorted_rows(later.table), sorted_rows(embedding.table))


def test_stock_tensorflow_reads_the_rows(trained, tmp_path):
    """As docs/checkpoints.md says."""
    _, embedding = trained
    path = tf.train.Checkpoint(layer=embedding).save(str(tmp_path / "checkpoint"))
    reader = tf.train.load_checkpoint(path)
    part = "layer/_table_state/shard_0"
    rows = TableExport(
        *(reader.get_tensor(f"{part}/{x}") for x in ("keys", "values", "slots", "clocks"))
    )
    order = np.argsort(rows.keys)
    saved = [getattr(rows, field.name)[order] for field in dataclasses.fields(rows)]
    assert_same_rows(saved, sorted_rows(embedding.table))
    config = json.loads(reader.get_tensor(f"{part}/config"))
    assert config == {
        "format": 1,
        "shard": 0,
        "num_shards": 1,
        "rows": 300,
        "dim": 4,
        "slot_dim": rows.slots.shape[1],
        "optimizer": embedding.table.optimizer.spec(),
        "initializer": config["initializer"],
        "seed": 1,
        "clock": "count",
        "row_dtype": "float32",
        "snapshot": config["snapshot"],
    }


def test_any_file_system_of_tensorflow_will_do(trained):
    """A bucket is reached in the same way as TensorFlow's file system in memory."""
    _, embedding = trained
    rows = sorted_rows(embedding.table)
    path = tf.train.Checkpoint(layer=embedding).save("ram://checkpoints/ckpt")
    with het_tf.checkpoint.rows_in("ram://beside"):
        store = {}
        embedding.save_own_variables(store)
    assert len(tf.io.gfile.glob("ram://beside/*.index")) == 1
    embedding.table.clear()
    tf.train.Checkpoint(layer=embedding).restore(path).expect_partial()
    assert_same_rows(sorted_rows(embedding.table), rows)
    embedding.table.clear()
    embedding.load_own_variables(store)
    assert_same_rows(sorted_rows(embedding.table), rows)


def test_an_asynchronous_checkpoint_is_refused_before_anything_is_written(trained, tmp_path):
    model, _ = trained
    checkpoint = tf.train.Checkpoint(model=model)
    options = tf.train.CheckpointOptions(enable_async=True)
    for save in (checkpoint.save, checkpoint.write):
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"enable_async=True.* het_tf\.checkpoint\.Manager"
            ):
                save(str(tmp_path / "checkpoint"), options=options)
    assert not list(tmp_path.iterdir())
    checkpoint.save(str(tmp_path / "checkpoint"))


def test_a_manager_deletes_the_rows_with_their_checkpoint(trained, tmp_path):
    model, _ = trained
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), tmp_path, max_to_keep=2)
    for _ in range(4):
        manager.save()
    names = {path.name.split(".")[0] for path in tmp_path.iterdir()}
    assert names == {"checkpoint", "ckpt-3", "ckpt-4"}


def test_another_optimizer_keeps_the_values(trained, tmp_path, caplog):
    _, embedding = trained
    path = tf.train.Checkpoint(layer=embedding).save(str(tmp_path / "checkpoint"))
    _, other = build_model(optimizer=het_tf.optimizers.Adagrad(0.1, initial_accumulator_value=0.5))
    with caplog.at_level(logging.WARNING, logger="absl"):
        tf.train.Checkpoint(layer=other).restore(path).expect_partial()
    assert "optimizer 'adam" in caplog.text
    keys, values, slots, clocks = sorted_rows(other.table)
    saved = sorted_rows(embedding.table)
    assert_same_rows([keys, values, clocks], [saved[0], saved[1], saved[3]])
    assert slots.shape == values.shape
    assert (slots == 0.5).all()


def test_rows_never_updated_read_differently_with_another_seed_and_the_log_says_so(
    tmp_path, caplog
):
    """A layer without a seed draws one, so a program that is started again has another."""
    layers = [
        het_tf.layers.HetEmbedding(4, optimizer="sgd", seed=seed) for seed in (1, 1, 2, None, None)
    ]
    for layer in layers:
        layer.build()
    saved, same, *others = layers
    saved.table.assign([5], np.ones((1, 4), np.float32))
    path = tf.train.Checkpoint(layer=saved).save(str(tmp_path / "checkpoint"))
    ids = [5, 6]
    expected = saved.table.lookup(ids)
    with caplog.at_level(logging.WARNING, logger="absl"):
        tf.train.Checkpoint(layer=same).restore(path).expect_partial()
        np.testing.assert_array_equal(same.table.lookup(ids), expected)
        assert "never updated" not in caplog.text
        for layer in others:
            tf.train.Checkpoint(layer=layer).restore(path).expect_partial()
            rows = layer.table.lookup(ids)
            np.testing.assert_array_equal(rows[0], expected[0])
            assert (rows[1] != expected[1]).all()
            assert f"and {layer.seed} of this table, rows that were never updated" in caplog.text
    assert len({layer.seed for layer in others}) == 3


def test_an_optimizer_without_slots_saves_none(tmp_path):
    layer = het_tf.layers.HetEmbedding(4, optimizer="sgd")
    layer.build()
    layer.table.assign([5], np.ones((1, 4), np.float32))
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "checkpoint"))
    reader = tf.train.load_checkpoint(path)
    part = "layer/_table_state/shard_0"
    assert reader.get_tensor(f"{part}/keys").tolist() == [5]
    assert not reader.has_tensor(f"{part}/slots")


def test_another_width_is_refused_before_anything_is_restored(tmp_path):
    """Also where the table of the other width comes last, behind one that fits."""

    def model_of(width: int) -> keras.Model:
        ids = keras.Input((3,), dtype="int64")
        layers = [
            het_tf.layers.HetEmbedding(4, name="first", seed=1),
            het_tf.layers.HetEmbedding(width, name="last", seed=1),
        ]
        outputs = [keras.layers.Dense(1)(keras.layers.Flatten()(each(ids))) for each in layers]
        model = het_tf.keras.Model(ids, keras.layers.Add()(outputs))
        model.compile(keras.optimizers.Adam(), "mse", run_eagerly=True)
        model.train_on_batch(IDS, TARGETS)
        return model

    def state_of(model: keras.Model) -> list[np.ndarray]:
        variables = model.optimizer.variables + model.non_trainable_variables
        variables += [each for each in model.trainable_variables if each.name != "anchor"]
        rows = [sorted_rows(model.get_layer(name).table) for name in ("first", "last")]
        return [each.numpy() for each in variables] + rows[0] + rows[1]

    model, other = model_of(6), model_of(5)
    before = state_of(other)
    checkpoint = tf.train.Checkpoint(model=model)
    paths = [checkpoint.save(str(tmp_path / "checkpoint"))]
    manager = het_tf.checkpoint.Manager(checkpoint, tmp_path / "chain", full_every=10)
    for _ in range(2):
        manager.save()
    manager.wait()
    paths.append(manager.latest_checkpoint)
    for path in paths:
        for restore in (tf.train.Checkpoint.restore, tf.train.Checkpoint.read):
            message = "table for last has rows of 6 columns, the table 5"
            with pytest.raises(ValueError, match=message):
                restore(tf.train.Checkpoint(model=other), path)
            assert_same_rows(state_of(other), before)
        # It can be restored to what has its width.
        fitting = model_of(6)
        tf.train.Checkpoint(model=fitting).restore(path).assert_existing_objects_matched()
        assert_same_rows(state_of(fitting), state_of(model))


# Damage. A table by itself, of several blocks.

ROWS = 30_000
WIDTH = 64


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[EmbeddingTable, pathlib.Path]:
    """A table of about three blocks, and a folder with its checkpoint "ckpt-1"."""
    rng = np.random.default_rng(0)
    table = EmbeddingTable(WIDTH, het_tf.optimizers.Adagrad(0.1), name="damaged")
    values, slots = (rng.random((ROWS, WIDTH), np.float32) for _ in range(2))
    table.import_(TableExport(np.arange(ROWS) * 3, values, slots, np.arange(ROWS)))
    folder = tmp_path_factory.mktemp("saved")
    checkpoint_of(table).save(str(folder / "ckpt"))
    return table, folder


def small_table() -> EmbeddingTable:
    table = EmbeddingTable(WIDTH, het_tf.optimizers.Adagrad(0.1), name="damaged")
    ones = np.ones((2, WIDTH), np.float32)
    table.import_(TableExport(np.array([1, 2]), ones, ones, np.array([5, 6])))
    return table


def checkpoint_of(table: EmbeddingTable) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(table=TableState(table, lambda: None))


def restore(table: EmbeddingTable, folder: pathlib.Path) -> None:
    checkpoint_of(table).restore(str(folder / "ckpt-1")).expect_partial()


def rows_file(folder: pathlib.Path) -> pathlib.Path:
    """The data file with the rows: the largest."""
    return max(folder.glob("ckpt-1.data-*"), key=lambda path: path.stat().st_size)


def error_of(fn, *arguments) -> Exception | None:
    try:
        fn(*arguments)
    except Exception as error:  # TensorFlow raises what not when it reads a damaged file
        return error
    return None


@pytest.mark.parametrize("more", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_damaged_bytes_are_noticed_before_a_row_is_replaced(saved, tmp_path, more):
    original, folder = saved
    rows = sorted_rows(original)
    table = small_table()
    before = sorted_rows(table)
    data, index = rows_file(folder), folder / "ckpt-1.index"
    rng = np.random.default_rng(1)
    cases = []
    for path, truncations, flips in ((data, 2, 5), (index, 2, 7)):
        size = path.stat().st_size
        cases += [(path.name, "cut", int(at)) for at in rng.integers(0, size, more * truncations)]
        cases += [(path.name, "flip", int(at)) for at in rng.integers(0, size, more * flips)]
    refused = 0
    for name, kind, at in cases:
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        content = bytearray((copy / name).read_bytes())
        if kind == "cut":
            del content[at:]
        else:
            content[at] ^= 1 << rng.integers(8)
        (copy / name).write_bytes(content)
        error = error_of(restore, table, copy)
        if error is None:
            # A few bits of an index have no meaning.
            assert name == index.name, (name, kind, at)
            assert_same_rows(sorted_rows(table), rows)
            table = small_table()
        else:
            refused += 1
            # TensorFlow reads the index before it asks us, and does not say which.
            assert name == index.name or str(copy) in str(error), (name, kind, at)
            assert_same_rows(sorted_rows(table), before)
        shutil.rmtree(copy)
    assert refused >= len(cases) - 2 * more


def rewrite(folder: pathlib.Path, to: pathlib.Path, change) -> None:
    """Copies a checkpoint with correct checksums after `change(tensors)`."""
    reader = tf.train.load_checkpoint(str(folder / "ckpt-1"))
    tensors = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    change(tensors)
    names = list(tensors)
    tf.raw_ops.SaveV2(
        prefix=str(to / "ckpt-1"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[tf.constant(tensors[name]) for name in names],
    )


PART = "table/shard_0"


def _config(**changes):
    def change(tensors):
        config = json.loads(tensors[f"{PART}/config"]) | changes
        tensors[f"{PART}/config"] = json.dumps(config).encode()

    return change


def _tensor(name, fn):
    def change(tensors):
        tensors[f"{PART}/{name}"] = fn(tensors[f"{PART}/{name}"])

    return change


def _set(array, at, value):
    array = array.copy()
    array[at] = value
    return array


WRONG = [
    (_config(format=2), "format 2, expected 1"),
    (_config(rows=ROWS + 1), r"keys: is int64 \[\d+\], expected int64 \[\d+\]"),
    (_config(rows=-1), "config is damaged"),
    (_config(rows="many"), "config is damaged"),
    (_config(num_shards=2), "shard_1/config is missing"),
    (_config(shard=1), "config is damaged"),
    (_config(optimizer=5), "config is damaged: it says optimizer = 5"),
    (_config(slot_dim=None), "config is damaged: it says slot_dim = None"),
    (_config(seed=0.5), "config is damaged: it says seed = 0.5"),
    (_config(dim=32), "rows of 32 columns, the table 64"),
    (_tensor("config", lambda x: b"{"), "config is damaged"),
    (_tensor("config", lambda x: np.int64(3)), "config is damaged"),
    (lambda tensors: tensors.pop(f"{PART}/config"), "config is missing"),
    (lambda tensors: tensors.pop(f"{PART}/clocks"), "shard_0: clocks: "),
    (_tensor("keys", lambda x: _set(x, 7, x[90])), r"shard_0: keys holds \d+ twice"),
    (_tensor("values", lambda x: x[:-1]), r"values: is float \[\d+,64\], expected"),
    (_tensor("values", lambda x: x[:, :-1]), r"values: is float \[\d+,63\], expected"),
    (_tensor("values", lambda x: x.astype(np.float64)), "values: is double"),
    (_tensor("clocks", lambda x: _set(x, 3, -1)), "clocks holds -1 for key"),
    (_tensor("values", lambda x: _set(x, (5, 2), np.nan)), "NaN or infinity for key"),
]


def test_wrong_contents_with_right_checksums_are_refused(saved, tmp_path, subtests):
    original, _ = saved
    # Of few rows, since stock TensorFlow writes a tensor in one block.
    few = EmbeddingTable(WIDTH, het_tf.optimizers.Adagrad(0.1), name="few")
    rows = TableExport(*(x[:100] for x in sorted_rows(original)))
    few.import_(rows)
    (tmp_path / "few").mkdir()
    checkpoint_of(few).save(str(tmp_path / "few" / "ckpt"))
    rewrite(tmp_path / "few", tmp_path, lambda tensors: None)
    table = small_table()
    restore(table, tmp_path)
    assert table.size() == 100  # so what follows is refused for the change alone
    before = sorted_rows(table)
    for change, message in WRONG:
        with subtests.test(message):
            rewrite(tmp_path / "few", tmp_path, change)
            with pytest.raises((tf.errors.OpError, ValueError), match=message) as error:
                restore(table, tmp_path)
            assert str(tmp_path / "ckpt-1") in str(error.value)
            assert_same_rows(sorted_rows(table), before)


def test_a_missing_file_is_named(saved, tmp_path):
    _, folder = saved
    table = small_table()
    before = sorted_rows(table)
    for name in (rows_file(folder).name, "ckpt-1.index"):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        (copy / name).unlink()
        with pytest.raises((tf.errors.OpError, ValueError), match=str(copy / "ckpt-1")):
            restore(table, copy)
        assert_same_rows(sorted_rows(table), before)


def test_a_full_disk_leaves_table_and_folder_as_they_were(saved, tmp_path):
    table, _ = saved
    before = sorted_rows(table)
    path = checkpoint_of(table).write(str(tmp_path / "first"))
    there = sorted(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, limits[1]))  # of the 15 MB that it takes
    try:
        with pytest.raises(tf.errors.OpError, match="File too large"):
            checkpoint_of(table).write(str(tmp_path / "second"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(tmp_path.iterdir()) == there
    assert_same_rows(sorted_rows(table), before)
    # And the next one is written, since the failed one holds nothing any more.
    checkpoint_of(table).write(str(tmp_path / "second"))
    restored = small_table()
    checkpoint_of(restored).restore(path).expect_partial()
    assert_same_rows(sorted_rows(restored), before)


def test_nothing_is_left_where_tensorflow_cannot_write_its_own_part(saved, tmp_path):
    table, _ = saved
    (tmp_path / "checkpoint_temp").write_text("no folder")
    with pytest.raises(tf.errors.OpError, match="checkpoint_temp"):
        checkpoint_of(table).write(str(tmp_path / "checkpoint"))
    gc.collect()
    assert sorted(tmp_path.iterdir()) == []
    assert table.size() == ROWS
    checkpoint_of(table).write(str(tmp_path / "checkpoint"))


def test_a_folder_that_cannot_be_made_is_named(saved, tmp_path):
    table, _ = saved
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(tf.errors.OpError, match=str(tmp_path / "file")):
        checkpoint_of(table).write(str(tmp_path / "file" / "checkpoint"))
    assert (tmp_path / "file").read_text() == "no folder"
    assert table.size() == ROWS
