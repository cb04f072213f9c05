"""Checkpoints whose rows are written while training goes on, in one process."""

import logging
import threading

import keras
import numpy as np
import program_runner
import pytest
import tensorflow as tf
from test_checkpoint import assert_same_rows, sorted_rows

import het_tf
from het_tf.checkpoint import Manager, TableState
from het_tf.tables.table import EmbeddingTable, TableExport

WIDTH = 4


def make_table(rows: int = 100) -> EmbeddingTable:
    table = EmbeddingTable(WIDTH, het_tf.optimizers.SGD(1.0))
    values = np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH)
    slots = np.zeros((rows, 0), np.float32)
    table.import_(TableExport(np.arange(rows), values, slots, np.ones(rows, np.int64)))
    return table


def manager_of(table: EmbeddingTable, folder, **arguments) -> Manager:
    number = tf.Variable(0, dtype=tf.int64)
    state = TableState(table, lambda: None)
    return Manager(tf.train.Checkpoint(table=state, number=number), folder, **arguments)


def step(table: EmbeddingTable, keys, rate: float = 1.0) -> None:
    found = table.lookup_op(tf.constant(keys, tf.int64))[1]
    table.apply_op(found, tf.ones([len(keys), WIDTH]), tf.constant(rate), "error")


@pytest.fixture
def held(monkeypatch):
    """An event that the writing of rows waits for."""
    event, save = threading.Event(), het_tf.ops.table_save

    def slow(*args, **kwargs):
        assert event.wait(60)
        return save(*args, **kwargs)

    monkeypatch.setattr(het_tf.ops, "table_save", slow)
    yield event
    event.set()


def test_what_is_saved_is_what_there_was_when_it_began(tmp_path, held):
    table = make_table()
    manager = manager_of(table, tmp_path)
    manager.checkpoint.number.assign(7)
    saved = sorted_rows(table)
    path = manager.save()
    # Training goes on while nothing of the rows is written.
    manager.checkpoint.number.assign(8)
    for _ in range(3):
        step(table, range(50, 150))
    assert manager.latest_checkpoint is None
    assert not list(tmp_path.glob("*.index"))
    held.set()
    manager.wait()
    assert manager.checkpoints == [path] == [tf.train.latest_checkpoint(str(tmp_path))]
    assert {file.name.split(".")[0] for file in tmp_path.iterdir()} == {"ckpt-1", "checkpoint"}
    assert manager.restore_or_initialize() == path
    assert_same_rows(sorted_rows(table), saved)
    assert int(manager.checkpoint.number) == 7
    # It is a checkpoint like any other.
    other = make_table(3)
    checkpoint = manager_of(other, tmp_path).checkpoint
    checkpoint.restore(path).assert_consumed()
    assert_same_rows(sorted_rows(other), saved)


def test_the_next_save_waits_for_the_one_before(tmp_path, held):
    table = make_table()
    manager = manager_of(table, tmp_path)
    manager.save()
    step(table, range(10))
    second = sorted_rows(table)
    saving = threading.Thread(target=manager.save)
    saving.start()
    saving.join(0.2)
    assert saving.is_alive()
    held.set()
    saving.join()
    step(table, range(10))
    assert manager.restore_or_initialize().endswith("ckpt-2")
    assert_same_rows(sorted_rows(table), second)


def test_a_new_manager_waits_for_what_is_written_into_its_folder(tmp_path, held):
    table = make_table()
    path = manager_of(table, tmp_path / "a").save()
    assert manager_of(table, tmp_path / "b").latest_checkpoint is None
    found = []
    looking = threading.Thread(
        target=lambda: found.append(manager_of(table, tmp_path / "a").latest_checkpoint)
    )
    looking.start()
    looking.join(0.2)
    assert looking.is_alive()
    held.set()
    looking.join()
    assert found == [path]


def test_other_checkpoints_wait_for_the_one_that_is_written(tmp_path, held):
    table = make_table()
    manager = manager_of(table, tmp_path / "managed")
    manager.save()
    other = tf.train.Checkpoint(table=TableState(table, lambda: None))
    writing = threading.Thread(target=other.write, args=[str(tmp_path / "other")])
    writing.start()
    writing.join(0.2)
    assert writing.is_alive()
    held.set()
    writing.join()
    manager.wait()
    other.read(str(tmp_path / "other")).assert_consumed()


def test_an_error_is_logged_at_once_and_raised_by_the_next_call(tmp_path, monkeypatch, caplog):
    table = make_table()
    manager = manager_of(table, tmp_path)
    path = manager.save()
    manager.wait()
    rows = sorted_rows(table)
    step(table, range(10))
    save = het_tf.ops.table_save

    def full(table, snapshot, prefix, **others):
        return save(table, snapshot, prefix=f"{tmp_path}/ckpt-1.index/x", **others)

    files = sorted(tmp_path.iterdir())
    for call in (manager.save, manager.wait):
        monkeypatch.setattr(het_tf.ops, "table_save", full)
        with caplog.at_level(logging.ERROR, logger="absl"):
            failed = manager.save()
            with pytest.raises(tf.errors.OpError, match=r"ckpt-1\.index"):
                call()
        assert f"{failed} was not written" in caplog.text
        assert manager.latest_checkpoint == path
        assert sorted(tmp_path.iterdir()) == files
        monkeypatch.setattr(het_tf.ops, "table_save", save)
        manager.wait()
    # One that goes back does not stop at what was logged.
    monkeypatch.setattr(het_tf.ops, "table_save", full)
    manager.save()
    assert manager.restore_or_initialize() == path
    assert_same_rows(sorted_rows(table), rows)
    monkeypatch.setattr(het_tf.ops, "table_save", save)
    manager.save()
    manager.wait()
    assert len(manager.checkpoints) == 2


def test_an_optimizer_that_is_not_built_is_named_when_it_is_restored(tmp_path, caplog):
    def made(built: bool) -> Manager:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(name="late"))
        if built:
            model.optimizer.build(model.trainable_variables)
        return Manager(tf.train.Checkpoint(model=model), tmp_path)

    saving = made(built=True)
    saving.save()
    saving.wait()
    with caplog.at_level(logging.WARNING, logger="absl"):
        made(built=True).restore_or_initialize()
        assert "is not built" not in caplog.text
        made(built=False).restore_or_initialize()
    assert "optimizer late is not built" in caplog.text


def test_variables_that_cannot_be_written_hold_nothing_up(tmp_path):
    table = make_table()
    (tmp_path / "ckpt-1_temp").write_text("no folder")
    manager = manager_of(table, tmp_path)
    with pytest.raises(tf.errors.OpError, match="ckpt-1_temp"):
        manager.save()
    assert manager.checkpoints == []
    table.clear()  # waits for snapshots
    manager.save()
    manager.wait()
    assert manager.latest_checkpoint == f"{tmp_path}/ckpt-2"


def test_so_many_checkpoints_stay_also_of_a_program_before(tmp_path):
    table = make_table()
    manager = manager_of(table, tmp_path, max_to_keep=2)
    for _ in range(3):
        manager.save()
    manager.wait()
    assert [path.rpartition("/")[2] for path in manager.checkpoints] == ["ckpt-2", "ckpt-3"]
    later = manager_of(table, tmp_path, max_to_keep=2)
    assert later.checkpoints == manager.checkpoints
    # Though it was not restored, its checkpoint does not take the place of another.
    later.save()
    later.wait()
    names = {file.name.split(".")[0] for file in tmp_path.iterdir()}
    assert names == {"checkpoint", "ckpt-3", "ckpt-4"}
    assert tf.train.latest_checkpoint(str(tmp_path)) == later.latest_checkpoint
    every = manager_of(table, tmp_path, max_to_keep=None)
    for _ in range(3):
        every.save()
    every.wait()
    assert [path.rpartition("-")[2] for path in every.checkpoints] == ["3", "4", "5", "6", "7"]
    # TensorFlow's manager finds them.
    theirs = tf.train.CheckpointManager(every.checkpoint, str(tmp_path), max_to_keep=None)
    assert theirs.checkpoints == every.checkpoints


@pytest.mark.parametrize("content", [None, b"model_checkpoint_p"])
def test_checkpoints_are_found_where_nothing_says_which_there_are(tmp_path, caplog, content):
    table = make_table()
    manager = manager_of(table, tmp_path, max_to_keep=None)
    for _ in range(10):
        manager.save()
    manager.wait()
    (tmp_path / "ckpt-11.data-00000-of-00001").write_text("begun, not ended")
    (tmp_path / "others-12.index").write_text("of another manager")
    if content is None:
        (tmp_path / "checkpoint").unlink()
    else:
        (tmp_path / "checkpoint").write_bytes(content)
    caplog.clear()
    emptied = make_table(0)
    later = manager_of(emptied, tmp_path, max_to_keep=None)
    assert later.checkpoints == manager.checkpoints
    assert "checkpoint is missing or damaged, or names no ckpt-*" in caplog.text
    assert later.restore_or_initialize() == f"{tmp_path}/ckpt-10"
    assert_same_rows(sorted_rows(emptied), sorted_rows(table))
    assert later.save() == f"{tmp_path}/ckpt-11"
    later.wait()
    assert manager_of(table, tmp_path).latest_checkpoint == f"{tmp_path}/ckpt-11"


def test_a_checkpoint_whose_index_is_missing_is_named(tmp_path, caplog):
    table = make_table()
    manager = manager_of(table, tmp_path)
    for _ in range(2):
        manager.save()
    manager.wait()
    (tmp_path / "ckpt-2.index").unlink()
    caplog.clear()
    assert manager_of(table, tmp_path).checkpoints == [f"{tmp_path}/ckpt-1"]
    assert f"{tmp_path}/ckpt-2.index is missing" in caplog.text


def test_wrong_arguments_are_named(tmp_path, subtests):
    for arguments, error, message in [
        ({"checkpoint": "model"}, TypeError, "must be a tf.train.Checkpoint, not 'model'"),
        ({"max_to_keep": 0}, ValueError, "max_to_keep must be an integer from 1 .* not 0"),
        ({"full_every": 0}, ValueError, "full_every must be an integer from 1 .* not 0"),
        ({"checkpoint_name": "a/b"}, ValueError, "checkpoint_name .* not 'a/b'"),
        ({"checkpoint_name": 3}, ValueError, "checkpoint_name .* not 3"),
    ]:
        with subtests.test(message), pytest.raises(error, match=message):
            Manager(**{"checkpoint": tf.train.Checkpoint(), "directory": tmp_path} | arguments)


def test_no_directory_is_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manager = manager_of(make_table(), "")
    manager.save()
    manager.wait()
    assert (tmp_path / "ckpt-1.index").exists()


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[2])
import test_manager as t
manager = t.manager_of(t.make_table(50_000), sys.argv[1])
manager.save()
print(manager.latest_checkpoint)
"""


def test_the_end_of_the_program_waits(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    saved = tmp_path / "saved"
    ended = program_runner.run(tmp_path / "program.py", str(saved), __file__.rpartition("/")[0])
    assert ended.returncode == 0, ended.stderr[-3000:]
    table = make_table(3)
    assert manager_of(table, saved).restore_or_initialize() is not None
    assert table.size() == 50_000


# Backups of fit.


def build_model() -> tuple[keras.Model, het_tf.layers.HetEmbedding]:
    keras.utils.set_random_seed(1)
    embedding = het_tf.layers.HetEmbedding(4, optimizer=het_tf.optimizers.Adam(0.01), seed=1)
    ids = keras.Input((3,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(embedding(ids))))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model, embedding


IDS = np.arange(480).reshape(160, 3) % 100
TARGETS = np.ones(160)


class Interrupt(keras.callbacks.Callback):
    """Ends `fit` with an error after so many batches."""

    def __init__(self, after: int, held: threading.Event | None = None):
        super().__init__()
        self.batches, self.after, self.held, self.epochs = 0, after, held, []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == self.after:
            if self.held is not None:
                self.held.set()
            raise KeyboardInterrupt


def fit(model, *callbacks, **arguments):
    model.fit(
        IDS, TARGETS, batch_size=16, shuffle=False, verbose=0, callbacks=callbacks, **arguments
    )


def state_of(model, embedding) -> list[np.ndarray]:
    weights = [*model.layers[-1].weights, *model.optimizer.variables]
    return [*sorted_rows(embedding.table), *(weight.numpy() for weight in weights)]


def backup(folder, **arguments):
    return het_tf.keras.callbacks.BackupAndRestore(folder, **arguments)


def test_fit_goes_on_from_the_last_backup(tmp_path):
    model, embedding = build_model()
    fit(model, epochs=3)
    expected = state_of(model, embedding)

    model, embedding = build_model()
    with pytest.raises(KeyboardInterrupt):
        # Of the second epoch's end.
        fit(model, backup(tmp_path / "backup", full_every=2), Interrupt(25), epochs=3)
    model, embedding = build_model()
    seen = Interrupt(-1)
    fit(model, backup(tmp_path / "backup"), seen, epochs=3)
    assert seen.epochs == [2]
    assert_same_rows(state_of(model, embedding), expected)
    assert not (tmp_path / "backup").exists()
    again = Interrupt(-1)
    fit(model, again, epochs=2)
    assert again.epochs == [0, 1]


def test_batches_go_on_while_a_backup_is_written(tmp_path, held):
    """The one of batch 4 is written when batch 7 has been made."""
    model, embedding = build_model()
    fit(model, steps_per_epoch=4)
    expected = state_of(model, embedding)
    model, _ = build_model()
    saved = backup(tmp_path, save_freq=4)
    with pytest.raises(KeyboardInterrupt):
        fit(model, saved, Interrupt(7, held))
    saved.manager.wait()
    model, embedding = build_model()
    again = backup(tmp_path)
    again.set_model(model)
    again.on_train_begin()
    assert_same_rows(state_of(model, embedding), expected)


def test_fit_raises_what_went_wrong_with_its_last_backup(tmp_path, monkeypatch):
    model, _ = build_model()

    def full(*args, **kwargs):
        raise tf.errors.ResourceExhaustedError(None, None, "the disk is full")

    monkeypatch.setattr(het_tf.ops, "table_save", full)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="the disk is full"):
        fit(model, backup(tmp_path / "backup"), epochs=1)


def test_a_model_without_variables_is_refused(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="variables of the model 'sequential"):
        model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[backup(tmp_path)])


def test_wrong_arguments_of_backups_are_named(tmp_path, subtests):
    for arguments, message in [
        ({"backup_dir": ""}, "backup_dir must be"),
        ({"save_freq": 0}, 'save_freq must be an integer from 1 .* or "epoch", not 0'),
        ({"max_to_keep": 0}, "max_to_keep must be an integer from 1 .* not 0"),
        ({"full_every": 0}, "full_every must be an integer from 1 .* not 0"),
    ]:
        with subtests.test(message), pytest.raises(ValueError, match=message):
            het_tf.keras.callbacks.BackupAndRestore(**{"backup_dir": tmp_path} | arguments)
