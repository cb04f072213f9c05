"""Checkpoints of tables on parameter servers."""

from __future__ import annotations

import dataclasses
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf import lifetimes
from het_tf.checkpoint import TableState
from het_tf.runtime.broadcast import cluster_devices
from het_tf.runtime.threads import call_in_daemon
from het_tf.storage.checkpoints.snapshots import Cut
from het_tf.tables.table import EmbeddingTable
from het_tf.tables.worker_cache import WorkerCache

ROWS = 3000


def make_table(
    optimizer, num_shards: int, **arguments
) -> tuple[EmbeddingTable, WorkerCache | None]:
    """A table of so many shards on the parameter servers, several on one of them; 0: here."""
    devices = cluster_devices("ps")
    devices = [devices[s % len(devices)] for s in range(num_shards)]
    table = EmbeddingTable(4, optimizer, seed=3, devices=devices, **arguments)
    return table, WorkerCache(table, None) if num_shards else None


def train(table: EmbeddingTable, cache: WorkerCache | None, steps: range) -> None:
    """Steps of this process. Each is merged by itself: sums of several would be rounded."""
    rate = tf.constant(0.1)
    for step in steps:
        rng = np.random.default_rng(step)
        keys = tf.constant(rng.choice(ROWS, 500, replace=False) - 100, tf.int64)
        gradients = tf.constant(rng.normal(size=(500, 4)), tf.float32)
        if cache is None:
            table.apply_op(table.lookup_op(keys)[1], gradients, rate, "error")
        else:
            _, ticket = cache.lookup_op(cache.unique_ids_op(keys))
            cache.update_op(ticket, gradients, rate)
            cache.flush_op()


def sorted_rows(table: EmbeddingTable) -> list[np.ndarray]:
    rows = table.export()
    order = np.argsort(rows.keys)
    return [getattr(rows, field.name)[order] for field in dataclasses.fields(rows)]


def assert_same_rows(one, other) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def checkpoint(table: EmbeddingTable) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(table=TableState(table, lambda: None))


@pytest.mark.parametrize(
    "optimizer", [het_tf.optimizers.SGD(0.1), het_tf.optimizers.Adam(0.1)], ids=lambda x: x.name
)
def test_any_number_of_servers_goes_on_where_another_stopped(strategy, tmp_path, optimizer):
    table, cache = make_table(optimizer, 3)
    train(table, cache, range(8))
    path = checkpoint(table).write(str(tmp_path / "three"))
    saved = sorted_rows(table)
    train(table, cache, range(8, 16))
    expected = sorted_rows(table)
    for num_shards in (1, 2, 5, 0):
        other, other_cache = make_table(optimizer, num_shards)
        train(other, other_cache, range(100, 102))  # to be forgotten
        checkpoint(other).read(path).assert_consumed()
        assert_same_rows(sorted_rows(other), saved)
        train(other, other_cache, range(8, 16))
        assert_same_rows(sorted_rows(other), expected)
    # From this process back to servers.
    path = checkpoint(other).write(str(tmp_path / "none"))
    checkpoint(table).read(path).assert_consumed()
    assert_same_rows(sorted_rows(table), expected)


def test_any_number_of_servers_restores_a_chain(strategy, tmp_path):
    table, cache = make_table(het_tf.optimizers.Adam(0.1), 3)
    manager = het_tf.checkpoint.Manager(checkpoint(table), tmp_path, full_every=10)
    for step in range(4):
        train(table, cache, range(20 * step, 20 * step + (1 if step else 20)))
        path = manager.save()
        manager.wait()
    assert len(manager.checkpoints) == 4  # none of which has all rows but the first
    expected = sorted_rows(table)
    full = checkpoint(table).write(str(tmp_path / "full"))
    for num_shards in (1, 2, 3, 5, 0):
        for saved in (path, full):
            other, _ = make_table(het_tf.optimizers.Adam(0.1), num_shards)
            checkpoint(other).restore(saved).expect_partial()
            assert_same_rows(sorted_rows(other), expected)
    # From this process to servers, with another optimizer.
    manager = het_tf.checkpoint.Manager(checkpoint(other), tmp_path / "none", full_every=10)
    for step in range(2):
        train(other, None, range(step, step + 1))
        path = manager.save()
        manager.wait()
    assert len(manager.checkpoints) == 2
    table, _ = make_table(het_tf.optimizers.SGD(0.1), 2)
    checkpoint(table).restore(path).expect_partial()
    assert_same_rows(sorted_rows(table)[:2], sorted_rows(other)[:2])


@pytest.mark.exhaustive
def test_any_number_of_servers_goes_on_counting(strategy, tmp_path):
    """Ids that have no row yet: each is admitted when it would have been."""
    rules = lifetimes.spec(het_tf.Admission(count=3), None)
    optimizer = het_tf.optimizers.SGD(0.1)
    table, cache = make_table(optimizer, 3, lifetimes=rules)
    train(table, cache, range(5))
    path = checkpoint(table).write(str(tmp_path / "three"))
    counted = table.stats()["candidates"]
    assert counted > 500
    train(table, cache, range(5, 8))
    expected = sorted_rows(table)
    for num_shards in (1, 5, 0):
        other, other_cache = make_table(optimizer, num_shards, lifetimes=rules)
        train(other, other_cache, range(100, 101))  # to be forgotten
        checkpoint(other).read(path).assert_consumed()
        assert other.stats()["candidates"] == counted
        train(other, other_cache, range(5, 8))
        assert_same_rows(sorted_rows(other), expected)


def test_a_damaged_part_leaves_all_shards_as_they_were(strategy, tmp_path):
    table, cache = make_table(het_tf.optimizers.Adam(0.1), 3)
    train(table, cache, range(4))
    path = checkpoint(table).write(str(tmp_path / "one"))
    parts = [p for p in tmp_path.glob("one.data*") if p.stat().st_size > 1000 * 4 * 4]
    assert len(parts) == 3
    content = bytearray(parts[1].read_bytes())
    content[len(content) // 2] ^= 4
    parts[1].write_bytes(content)
    other, other_cache = make_table(het_tf.optimizers.Adam(0.1), 2)
    train(other, other_cache, range(2))
    before = sorted_rows(other)
    with pytest.raises(tf.errors.OpError, match=r"one, part table/shard_\d: .*hecksum"):
        checkpoint(other).read(path)
    assert_same_rows(sorted_rows(other), before)
    parts[1].unlink()
    with pytest.raises(tf.errors.OpError, match=parts[1].name):
        checkpoint(other).read(path)
    assert_same_rows(sorted_rows(other), before)


@pytest.mark.exhaustive
def test_a_damaged_part_of_a_model_changes_nothing(strategy, tmp_path):
    """Of rows: variables are as they were, which are restored first. Of variables: so are rows."""
    ids = np.random.default_rng(0).integers(0, 500, (64, 3))
    with strategy.scope():
        inputs = keras.Input((3,), dtype="int64")
        embedding = het_tf.layers.HetEmbedding(4, optimizer=het_tf.optimizers.Adam(0.1))
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(embedding(inputs)))
        model = het_tf.keras.Model(inputs, outputs)
        model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(ids, np.ones((64, 1)), batch_size=16, verbose=0)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))
    model.fit(ids, np.ones((64, 1)), batch_size=16, verbose=0)

    def state() -> list[np.ndarray]:
        variables = [*model.optimizer.variables, *model.layers[-1].variables]
        return [*sorted_rows(embedding.table), *(each.numpy() for each in variables)]

    before = state()
    files = sorted(tmp_path.glob("ckpt-1.data*"))
    assert len(files) > 2  # rows of two servers, and what TensorFlow writes
    rng = np.random.default_rng(1)
    for file in files:
        content = file.read_bytes()
        for at in (0, 8, len(content) // 2, len(content) - 1):
            damaged = bytearray(content)
            damaged[at] ^= 1 << rng.integers(8)
            file.write_bytes(damaged)
            for restore in (tf.train.Checkpoint.restore, tf.train.Checkpoint.read):
                with pytest.raises(tf.errors.OpError):
                    restore(tf.train.Checkpoint(model=model), path)
                assert_same_rows(state(), before)
        file.write_bytes(content)
    tf.train.Checkpoint(model=model).restore(path).assert_existing_objects_matched()
    assert len(sorted_rows(embedding.table)[0]) == len(before[0])
    with pytest.raises(AssertionError):
        assert_same_rows(state(), before)


def test_shards_of_another_save_are_refused(strategy, tmp_path):
    table, cache = make_table(het_tf.optimizers.Adam(0.1), 3)
    tensors = []
    for steps in (range(4), range(4, 5)):
        train(table, cache, steps)
        path = checkpoint(table).write(str(tmp_path / f"ckpt-{len(tensors)}"))
        reader = tf.train.load_checkpoint(path)
        names = reader.get_variable_to_shape_map()
        tensors.append({name: reader.get_tensor(name) for name in names})
    other, _ = make_table(het_tf.optimizers.Adam(0.1), 2)
    for shards, message in (
        ((), None),
        ((0,), "has no part of snapshot"),
        ((1,), "shard_1/config is damaged: it is of another snapshot than the first"),
        ((0, 1, 2), "has no part of snapshot"),
    ):
        mixed = dict(tensors[1])
        for shard in shards:
            mixed |= {k: v for k, v in tensors[0].items() if f"/shard_{shard}/" in k}
        names = list(mixed)
        with tf.device("/device:CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=str(tmp_path / "mixed"),
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=[mixed[name] for name in names],
            )
        before = sorted_rows(other)
        if message is None:
            checkpoint(other).read(str(tmp_path / "mixed"))
            assert_same_rows(sorted_rows(other), sorted_rows(table))
        else:
            with pytest.raises(tf.errors.DataLossError, match=message):
                checkpoint(other).read(str(tmp_path / "mixed"))
            assert_same_rows(sorted_rows(other), before)


def test_a_failed_save_leaves_no_file(strategy, tmp_path):
    """One of two shards can be written, the other is already being saved."""
    table, cache = make_table(het_tf.optimizers.Adam(0.1), 2)
    train(table, cache, range(2))
    snapshot, *_ = het_tf.ops.table_cut(table.handle(1))
    with pytest.raises(tf.errors.FailedPreconditionError, match="already being saved"):
        checkpoint(table).write(str(tmp_path / "one"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(tf.errors.OpError, match="missing/folder"):
        het_tf.ops.table_save(
            table.handle(1),
            snapshot,
            prefix=str(tmp_path / "missing/folder/x" / ("y" * 300) / "z"),
            part="x",
            config="",
        ).numpy()
    assert list(tmp_path.rglob("*.*")) == []
    # What failed holds the rows no longer.
    checkpoint(table).write(str(tmp_path / "one"))


def test_what_is_cut_and_not_saved_is_let_go_of(strategy):
    """On the servers, and by a call: what Python drops may never be heard of there."""
    table, cache = make_table(het_tf.optimizers.Adam(0.1), 2)
    train(table, cache, range(2))
    cut = Cut({"table": table})
    snapshots = [each.snapshot for each in cut._cuts.values()]
    cut.drop()
    for shard, snapshot in enumerate(snapshots):
        with pytest.raises(tf.errors.FailedPreconditionError, match="snapshot has ended"):
            het_tf.ops.table_save(
                table.handle(shard), snapshot, prefix="x", part="x", config=""
            ).numpy()
    table.clear()
    assert len(sorted_rows(table)[0]) == 0


def test_what_is_cut_with_an_error_is_let_go_of(strategy, monkeypatch, tmp_path):
    """A shard has cut, and the op raises: TensorFlow may give it what befell another server."""
    table, cache = make_table(het_tf.optimizers.Adam(0.1), 2)
    train(table, cache, range(2))
    cut = het_tf.ops.table_cut

    def raises(handle, **kwargs):
        int(cut(handle, **kwargs).rows)
        raise tf.errors.UnavailableError(None, None, "of another server")

    monkeypatch.setattr(het_tf.ops, "table_cut", raises)
    with pytest.raises(tf.errors.UnavailableError, match="of another server"):
        checkpoint(table).write(str(tmp_path / "one"))
    monkeypatch.undo()
    call_in_daemon(table.clear).result(timeout=100)  # waits until the rows are let go of


def test_a_program_that_cuts_anew_lets_go_of_what_it_cut(strategy):
    table, cache = make_table(het_tf.optimizers.Adam(0.1), 2)
    train(table, cache, range(2))
    shard = table.handle(0)
    first = het_tf.ops.table_cut(shard, owner="a")
    with pytest.raises(tf.errors.FailedPreconditionError, match="already being saved"):
        int(het_tf.ops.table_cut(shard, owner="b").rows)
    again = het_tf.ops.table_cut_changed(shard, "reader", 0, owner="a")
    assert int(again.rows) == int(first.rows)
    het_tf.ops.table_cut_end(shard, owner="b")  # has cut nothing
    with pytest.raises(tf.errors.FailedPreconditionError, match="already being saved"):
        int(het_tf.ops.table_cut(shard).rows)
    het_tf.ops.table_cut_end(shard, owner="a")
    table.clear()


def test_servers_answer_while_they_save(strategy, tmp_path):
    """Rows are merged between the cut and the end of the save, and are not in it."""
    table, cache = make_table(het_tf.optimizers.SGD(0.1), 2)
    train(table, cache, range(4))
    before = sorted_rows(table)
    snapshots = [het_tf.ops.table_cut(table.handle(shard)) for shard in range(2)]
    assert sum(int(cut.rows) for cut in snapshots) == len(before[0])
    train(table, cache, range(4, 8))
    after = sorted_rows(table)
    assert len(after[0]) > len(before[0])
    for shard, cut in enumerate(snapshots):
        path = str(tmp_path / f"shard-{shard}")
        het_tf.ops.table_save(table.handle(shard), cut.snapshot, prefix=path, part="x", config="")
    keys, values = (
        np.concatenate(
            [
                tf.train.load_checkpoint(str(tmp_path / f"shard-{shard}")).get_tensor(f"x/{column}")
                for shard in range(2)
            ]
        )
        for column in ("keys", "values")
    )
    order = np.argsort(keys)
    assert_same_rows([keys[order], values[order]], before[:2])
    assert_same_rows(sorted_rows(table), after)
    with pytest.raises(tf.errors.OpError, match="snapshot has ended"):
        het_tf.ops.table_save(
            table.handle(1), snapshots[1].snapshot, prefix=path, part="x", config=""
        ).numpy()


def test_each_checkpoint_is_a_state_that_the_table_had_while_workers_train(strategy, tmp_path):
    """A step of worker w adds 1 to all of its rows of a shard at once: they are always equal."""
    workers, rows_each, shards = 3, 200, 2
    table, _ = make_table(het_tf.optimizers.SGD(1.0), shards)
    cache = WorkerCache(table, None)
    shard_of = het_tf.ops.shard_of(tf.range(10_000, dtype=tf.int64), num_shards=shards).numpy()
    of_shard = [np.flatnonzero(shard_of == s) for s in range(shards)]
    keys = [
        np.concatenate([of_shard[s][w * rows_each : (w + 1) * rows_each] for s in range(shards)])
        for w in range(workers)
    ]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int32)])
    def steps(ids, count):
        for _ in tf.range(count):
            _, ticket = cache.lookup_op(cache.unique_ids_op(ids))
            cache.update_op(ticket, -tf.ones([2 * rows_each, 4]), tf.constant(1.0))

    done = threading.Event()
    made = [0] * workers

    def work(worker):
        while not done.is_set():
            with tf.device(strategy.worker_device(worker)):
                steps(tf.constant(keys[worker], tf.int64), tf.constant(5))
            made[worker] += 5

    threads = [threading.Thread(target=work, args=[w]) for w in range(workers)]
    for thread in threads:
        thread.start()
    paths = []
    while len(paths) < 8:
        paths.append(checkpoint(table).write(str(tmp_path / f"ckpt-{len(paths)}")))
        before = list(made)
        while min(m - b for m, b in zip(made, before, strict=True)) < 5:
            pass
    done.set()
    for thread in threads:
        thread.join()
    last = [[0] * workers for _ in range(shards)]
    for path in paths:
        restored, _ = make_table(het_tf.optimizers.SGD(1.0), 0)
        checkpoint(restored).read(path).assert_consumed()
        rows = restored.export()
        counts = dict(zip(rows.keys.tolist(), rows.clocks.tolist(), strict=True))
        initial = make_table(het_tf.optimizers.SGD(1.0), 0)[0].lookup(rows.keys)
        for w in range(workers):
            for s in range(shards):
                mine = keys[w][s * rows_each : (s + 1) * rows_each]
                (count,) = {counts.get(int(key), 0) for key in mine}
                assert last[s][w] <= count <= made[w]
                last[s][w] = count
        moved = np.array([counts[key] for key in rows.keys.tolist()], np.float32)
        np.testing.assert_allclose(rows.values - initial, np.tile(moved[:, None], 4), atol=1e-3)
    assert min(map(min, last)) > 0


@pytest.mark.exhaustive
def test_a_model_moves_between_cluster_and_process(strategy, tmp_path):
    """Rows, dense variables and optimizer; caches drop what they held."""
    ids = np.random.default_rng(0).integers(0, 500, (64, 3))
    targets = (ids.sum(1, keepdims=True) % 2).astype(np.float32)

    def make(model_class):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,), dtype="int64")
        embedding = het_tf.layers.HetEmbedding(
            4,
            optimizer=het_tf.optimizers.Adam(0.1),
            seed=7,
            cache=het_tf.CacheConfig(1000, staleness=None),
        )
        hidden = keras.layers.Flatten()(embedding(inputs))
        model = model_class(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
        return model, embedding

    with strategy.scope():
        model, embedding = make(het_tf.keras.Model)
    model.fit(ids, targets, batch_size=16, epochs=2, verbose=0)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))
    predicted = model.predict(ids, verbose=0)
    saved = sorted_rows(embedding.table)

    local, local_embedding = make(keras.Model)
    tf.train.Checkpoint(model=local).restore(path).assert_existing_objects_matched()
    assert_same_rows(sorted_rows(local_embedding.table), saved)
    # A cache that alone updated a row added up its steps, a shard their sums.
    np.testing.assert_allclose(local.predict(ids, verbose=0), predicted, rtol=1e-4)
    local.fit(ids, targets, batch_size=16, epochs=1, verbose=0)
    path = tf.train.Checkpoint(model=local).save(str(tmp_path / "local"))
    predicted = local.predict(ids, verbose=0)

    model.fit(ids, targets, batch_size=16, epochs=1, verbose=0)
    tf.train.Checkpoint(model=model).restore(path).expect_partial()
    assert_same_rows(sorted_rows(embedding.table), sorted_rows(local_embedding.table))
    np.testing.assert_allclose(model.predict(ids, verbose=0), predicted, rtol=1e-5)
