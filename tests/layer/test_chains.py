"""Checkpoints of the rows that changed since the one before, in one process."""

import functools
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf
from test_checkpoint import PART, assert_same_rows, error_of, sorted_rows
from test_manager import manager_of

import het_tf
from het_tf import lifetimes
from het_tf.checkpoint import Manager, TableState
from het_tf.tables.table import EmbeddingTable, TableExport

WIDTH = 4


def make_table(rows: int = 1000, optimizer=None, **arguments) -> EmbeddingTable:
    table = EmbeddingTable(WIDTH, optimizer or het_tf.optimizers.Adagrad(0.1), **arguments)
    values = np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH)
    slots = np.ones((rows, table.slot_dim), np.float32)
    table.import_(TableExport(np.arange(rows), values, slots, np.ones(rows, np.int64)))
    return table


def step(table: EmbeddingTable, keys) -> None:
    keys = tf.constant(np.asarray(keys), tf.int64)
    found = table.lookup_op(keys)[1]
    table.apply_op(found, tf.ones([len(keys), WIDTH]), tf.constant(0.1), "error")


def save(manager: Manager) -> str:
    path = manager.save()
    manager.wait()
    return path


def config_of(path: str) -> dict:
    return json.loads(tf.train.load_checkpoint(path).get_tensor(f"{PART}/config"))


def bytes_of(path: str) -> int:
    path = pathlib.Path(path)
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}.*"))


def restored(path: str, **arguments) -> EmbeddingTable:
    table = make_table(7, **arguments)
    tf.train.Checkpoint(table=TableState(table, lambda: None)).restore(path).expect_partial()
    return table


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.index"))


def test_each_checkpoint_of_a_chain_has_all_rows_of_its_moment(tmp_path):
    table = make_table()
    manager = manager_of(table, tmp_path, max_to_keep=4, full_every=4)
    saved = {}
    rng = np.random.default_rng(1)
    for number in range(10):
        for _ in range(3):
            step(table, rng.integers(0, 1000 + 10 * number, 30))
        saved[save(manager)] = sorted_rows(table)
    whole = ["since" not in config_of(path) for path in manager.checkpoints]
    # Four are to stay; 7 builds on 6, and that on 5.
    numbers = [int(path.rpartition("-")[2]) for path in manager.checkpoints]
    assert numbers == [5, 6, 7, 8, 9, 10]
    assert whole == [True, False, False, False, True, False]
    for path in manager.checkpoints:
        assert_same_rows(sorted_rows(restored(path)), saved[path])


EXPIRES = lifetimes.spec(None, het_tf.Expiry(5, time="given"))


def columns_of(table: EmbeddingTable, folder: pathlib.Path) -> list[np.ndarray]:
    """All that a checkpoint has of it, by key."""
    path = tf.train.Checkpoint(table=TableState(table, lambda: None)).write(str(folder / "all"))
    reader = tf.train.load_checkpoint(path)
    columns = [
        reader.get_tensor(f"{PART}/{x}") for x in ("keys", "values", "slots", "clocks", "ages")
    ]
    order = np.argsort(columns[0])
    return [column[order] for column in columns] + [np.array(config_of(path)["time"])]


def test_it_is_byte_identical_to_a_full_one_with_rows_that_expire(tmp_path):
    """Rows go, come again, and grow older without being touched."""
    table = make_table(0, lifetimes=EXPIRES)
    manager = manager_of(table, tmp_path / "chain", max_to_keep=100, full_every=100)
    rng = np.random.default_rng(2)
    table.expire(10)
    step(table, range(5000))
    dropped = again = 0
    expired: set[int] = set()
    for now in range(10, 24):
        table.expire(now)
        before = set(table.export().keys.tolist())
        # Fewer and fewer keep coming.
        step(table, rng.integers(0, 5000 - 300 * (now - 10), 100))
        after = set(table.export().keys.tolist())
        again += len((after - before) & expired)
        path = save(manager)
        expired = set(range(5000)) - after
        dropped += config_of(path).get("dropped", 0)
        (expected, found) = (tmp_path / f"expected-{now}", tmp_path / f"found-{now}")
        expected.mkdir(), found.mkdir()
        other = restored(path, lifetimes=EXPIRES)
        for one, two in zip(columns_of(table, expected), columns_of(other, found), strict=True):
            np.testing.assert_array_equal(one, two)
    assert dropped > 1000
    assert again > 10
    assert sum("since" in config_of(each) for each in manager.checkpoints) > 5


def test_a_delta_of_one_percent_takes_less_than_two_percent_of_the_bytes(tmp_path):
    table = make_table(200_000)
    manager = manager_of(table, tmp_path, full_every=10)
    full = bytes_of(save(manager))
    step(table, np.random.default_rng(0).choice(200_000, 2000, replace=False))
    delta = bytes_of(save(manager))
    print(f"{delta / full:.2%} of {full:,} bytes")
    assert delta <= 0.02 * full


def test_where_half_of_the_rows_changed_all_are_written(tmp_path):
    table = make_table()
    manager = manager_of(table, tmp_path, max_to_keep=1, full_every=100)
    save(manager)
    for changed in (300, 199, 2):
        step(table, range(changed))
        assert config_of(save(manager))["rows"] == changed
    assert names(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3", "ckpt-4"]
    # 501 changed since the first.
    assert config_of(save(manager))["rows"] == 1000
    assert names(tmp_path) == ["ckpt-5"]


def test_what_others_build_on_stays_also_for_a_program_that_begins_again(tmp_path):
    table = make_table()
    manager = manager_of(table, tmp_path, max_to_keep=1, full_every=10)
    for _ in range(3):
        step(table, range(10))
        save(manager)
    rows = sorted_rows(table)
    again = make_table(3)
    manager = manager_of(again, tmp_path, max_to_keep=2, full_every=10)
    assert manager.restore_or_initialize().endswith("ckpt-3")
    assert_same_rows(sorted_rows(again), rows)
    save(manager)
    assert names(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3", "ckpt-4"]
    step(again, range(10))
    save(manager)
    # The new one does not build on those of before.
    assert names(tmp_path) == ["ckpt-4", "ckpt-5"]


def test_nothing_is_removed_while_what_a_checkpoint_builds_on_is_not_known(
    tmp_path, monkeypatch, caplog
):
    """A bucket does not answer for once."""
    table = make_table()
    manager = manager_of(table, tmp_path, max_to_keep=1, full_every=10)
    for _ in range(2):
        step(table, range(10))
        save(manager)
    again = make_table(3)
    manager = manager_of(again, tmp_path, max_to_keep=2, full_every=10)

    def read(path):
        raise tf.errors.UnavailableError(None, None, f"no answer for {path}")

    monkeypatch.setattr(tf.compat.v1.train, "NewCheckpointReader", read)
    save(manager)
    monkeypatch.undo()
    assert names(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3"]
    assert "all checkpoints stay, as" in caplog.text
    assert "no answer for" in caplog.text
    assert_same_rows(sorted_rows(restored(tmp_path / "ckpt-2")), sorted_rows(table))
    save(manager)
    save(manager)
    assert names(tmp_path)[-1] == "ckpt-5"
    assert "ckpt-2" not in names(tmp_path)


def test_what_a_failed_checkpoint_had_is_in_the_next_one(tmp_path, monkeypatch):
    table = make_table()
    manager = manager_of(table, tmp_path, full_every=10)
    save(manager)
    table_save = het_tf.ops.table_save

    def full(*args, **kwargs):
        raise tf.errors.ResourceExhaustedError(None, None, "the disk is full")

    for keys in (range(10), range(20, 25)):
        step(table, keys)
        monkeypatch.setattr(het_tf.ops, "table_save", full)
        with pytest.raises(tf.errors.ResourceExhaustedError):
            save(manager)
        monkeypatch.setattr(het_tf.ops, "table_save", table_save)
    path = save(manager)
    assert config_of(path)["rows"] == 15
    assert_same_rows(sorted_rows(restored(path)), sorted_rows(table))


def test_after_rows_were_replaced_all_are_written(tmp_path):
    table = make_table()
    manager = manager_of(table, tmp_path, full_every=10)
    save(manager)
    step(table, range(10))
    manager.restore_or_initialize()
    assert "since" not in config_of(save(manager))
    table.clear()
    assert config_of(save(manager))["rows"] == 0


def test_another_optimizer_keeps_the_values(tmp_path):
    table = make_table()
    manager = manager_of(table, tmp_path, full_every=10)
    save(manager)
    step(table, range(10))
    other = restored(save(manager), optimizer=het_tf.optimizers.Adam(0.1))
    keys, values, slots, clocks = sorted_rows(other)
    saved = sorted_rows(table)
    assert_same_rows([keys, values, clocks], [saved[0], saved[1], saved[3]])
    assert slots.shape == (1000, other.slot_dim)
    assert not slots.any()


# Damage.


# Of the first, rows expire; those of the others are counted, exactly for a while, and in a sketch.
SOME_EXPIRE = lifetimes.spec(
    None,
    None,
    [
        het_tf.KeyRange(0, 99, expiry=het_tf.Expiry(2, time="given")),
        het_tf.KeyRange(
            20_000,
            29_999,
            admission=het_tf.Admission(count=3),
            expiry=het_tf.Expiry(4, time="given"),
        ),
        het_tf.KeyRange(30_000, 39_999, admission=het_tf.Admission(count=3, sketch_bytes=1 << 14)),
    ],
)


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> pathlib.Path:
    """ckpt-1 of 1000 rows; ckpt-2 and ckpt-3 of 10 rows each, and of 90 and 10 dropped keys.

    ckpt-2 and ckpt-3 have counts of 6 keys each, one of which the other has not.
    """
    folder = tmp_path_factory.mktemp("chain")
    table = make_table(1000, lifetimes=SOME_EXPIRE)
    table.expire(1)
    manager = manager_of(table, folder, max_to_keep=1, full_every=10)
    save(manager)
    for now in (4, 8):
        table.expire(now)
        step(table, range(5 * now, 5 * now + 10))
        step(table, [*range(20_000, 20_005), 20_010 + now, 30_000])
        save(manager)
    assert [config_of(f"{folder}/ckpt-{n}")["dropped"] for n in (2, 3)] == [90, 10]
    return folder


def restore(table: EmbeddingTable, folder: pathlib.Path) -> None:
    state = TableState(table, lambda: None)
    tf.train.Checkpoint(table=state).restore(str(folder / "ckpt-3")).expect_partial()


def rewrite(folder: pathlib.Path, name: str, change) -> None:
    """Puts a changed checkpoint with correct checksums in the place of one."""
    reader = tf.train.load_checkpoint(str(folder / name))
    tensors = {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}
    change(tensors)
    for file in folder.glob(f"{name}.*"):
        file.unlink()
    keys = list(tensors)
    tf.raw_ops.SaveV2(
        prefix=str(folder / name),
        tensor_names=keys,
        shape_and_slices=[""] * len(keys),
        tensors=[tf.constant(tensors[key]) for key in keys],
    )


def _config(**changes):
    def change(tensors):
        config = json.loads(tensors[f"{PART}/config"]) | changes
        tensors[f"{PART}/config"] = json.dumps({k: v for k, v in config.items() if v != "gone"})

    return change


def _since(**changes):
    def change(tensors):
        since = json.loads(tensors[f"{PART}/config"])["since"] | changes
        _config(since=since)(tensors)

    return change


def _set(name, value):
    def change(tensors):
        tensors[f"{PART}/{name}"] = value(tensors[f"{PART}/{name}"])

    return change


def test_counts_are_those_of_the_newest(chain):
    counted = {}
    for name in ("ckpt-2", "ckpt-3"):
        reader = tf.train.load_checkpoint(str(chain / name))
        columns = (reader.get_tensor(f"{PART}/{x}").tolist() for x in ("candidates", "counts"))
        counted[name] = dict(zip(*columns, strict=True))
    # What was counted for the first was forgotten before the second.
    assert counted["ckpt-2"] == dict.fromkeys([*range(20_000, 20_005), 20_014], 1)
    assert counted["ckpt-3"] == dict.fromkeys([*range(20_000, 20_005), 20_018], 1)
    table = make_table(7, lifetimes=SOME_EXPIRE)
    step(table, [20_999])
    restore(table, chain)
    assert table.stats()["candidates"] == 6
    rows = table.size()
    keys = [*range(20_000, 20_005), 20_014, 20_018, 30_000]
    step(table, keys)
    assert table.size() == rows + 1  # 30000, of which the sketch had two
    step(table, keys)
    assert table.size() == rows + 7  # without 20014
    step(table, keys)
    assert table.size() == rows + 8


WRONG = [
    ("ckpt-3", _config(time=10**30), r"ckpt-3, table/shard_0/config is damaged"),
    ("ckpt-3", _config(time=0.5), r"ckpt-3, table/shard_0/config is damaged"),
    ("ckpt-3", _config(rows=10**30), r"ckpt-3, table/shard_0/config is damaged"),
    ("ckpt-3", _config(candidates=4), r"ckpt-3, part .*: candidates: is int64 \[6\]"),
    ("ckpt-3", _config(candidates=-1), r"ckpt-3, table/shard_0/config is damaged"),
    ("ckpt-3", _config(admission=7), r"ckpt-3, table/shard_0/config is damaged"),
    ("ckpt-3", lambda t: t.pop(f"{PART}/counts"), r"ckpt-3, part .*: counts: "),
    ("ckpt-3", _set("counts", lambda x: x * 0), r"ckpt-3, part .*: counts holds 0 for key 20"),
    ("ckpt-3", _set("counts", lambda x: x[1:]), r"ckpt-3, part .*: counts: is int64 \[5\]"),
    ("ckpt-3", _set("candidate_ages", lambda x: x - 10), r"candidate_ages holds -10"),
    ("ckpt-3", _set("sketch_3", lambda x: x[1:]), r"ckpt-3, part .*: sketch_3: is int64"),
    ("ckpt-3", _set("sketch_3", lambda x: x * 0 - 1), r"part .*: sketch_3 holds -1 at 0"),
    ("ckpt-1", _config(cut=5), r"ckpt-2, table builds on .*ckpt-1, which is not what it was"),
    ("ckpt-2", _config(cut="gone"), r"ckpt-3, table builds on .*ckpt-2, which is not what"),
    ("ckpt-2", _config(rows=11), r"ckpt-2, part table/shard_0: keys: is int64 \[10\]"),
    ("ckpt-2", _config(dropped=10**6), r"ckpt-2, part .*: dropped: is int64"),
    ("ckpt-3", _config(dropped=-1), r"ckpt-3, table/shard_0/config is damaged"),
    ("ckpt-3", _config(dropped="many"), r"ckpt-3, table/shard_0/config is damaged"),
    ("ckpt-3", _config(at=0), r"ckpt-1, part .*: rows = 1000, .* elapsed = -\d+ are no"),
    ("ckpt-3", _config(at=1 << 60), r"ckpt-1, part .*: .* elapsed = \d+ are no such numbers"),
    ("ckpt-3", _config(since=3), r"ckpt-3, table/shard_0/config is damaged"),
    ("ckpt-3", _config(since={}), r"ckpt-3, table/shard_0/config is damaged"),
    ("ckpt-3", _since(checkpoint="../ckpt-2"), r"ckpt-3, table/shard_0/config is damaged"),
    ("ckpt-3", _since(checkpoint=""), r"ckpt-3, table/shard_0/config is damaged"),
    ("ckpt-3", _since(checkpoint="ckpt-9"), r"ckpt-3, table builds on .*ckpt-9: "),
    ("ckpt-3", _since(checkpoint="ckpt-3"), r"builds on .*ckpt-3, which is not what it was"),
    ("ckpt-3", _since(cut=1), r"ckpt-3, table builds on .*ckpt-2, which is not what it was"),
    ("ckpt-3", _since(cut=None), r"ckpt-3, table builds on .*ckpt-2, which is not what"),
    ("ckpt-2", lambda t: t.pop(f"{PART}/dropped"), r"ckpt-2, part .*: dropped: "),
    ("ckpt-2", _set("dropped", lambda x: x.astype(np.int32)), r"dropped: is int32"),
    ("ckpt-2", _set("dropped", lambda x: x[:, None]), r"dropped: is int64 \[\d+,1\]"),
    ("ckpt-2", _set("ages", lambda x: x - 10), r"ckpt-2, part .*: ages holds -10"),
    ("ckpt-2", _set("keys", lambda x: np.where(x == x[5], x[9], x)), r"ckpt-2, part .* twice"),
    ("ckpt-1", _set("values", lambda x: x * np.nan), r"ckpt-1, part .*: .*NaN"),
    (
        "ckpt-1",
        lambda t: t.pop(f"{PART}/config"),
        r"ckpt-2, table builds on .*ckpt-1: .*missing",
    ),
]


def test_wrong_contents_with_right_checksums_are_refused(chain, tmp_path, subtests):
    table = make_table(7, lifetimes=SOME_EXPIRE)
    for number, (name, change, message) in enumerate(WRONG):
        folder = tmp_path / str(number)
        shutil.copytree(chain, folder)
        with subtests.test(f"{name}: {message}"):
            rewrite(folder, name, lambda tensors: None)
            restore(table, folder)
            before = sorted_rows(table)
            assert len(before[0]) > 7  # so what follows is refused for the change alone
            rewrite(folder, name, change)
            with pytest.raises((tf.errors.OpError, ValueError), match=message):
                restore(table, folder)
            assert_same_rows(sorted_rows(table), before)


def test_a_circle_is_refused(chain, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(chain, folder)
    cut = config_of(str(folder / "ckpt-3"))["cut"]
    since = {"checkpoint": "ckpt-3", "cut": cut}
    rewrite(folder, "ckpt-1", _config(since=since, dropped=0))
    with pytest.raises(tf.errors.DataLossError, match="and that on it"):
        restore(make_table(7, lifetimes=SOME_EXPIRE), folder)


def test_a_missing_link_is_named(chain, tmp_path):
    table = make_table(7, lifetimes=SOME_EXPIRE)
    before = sorted_rows(table)
    for name in ("ckpt-1", "ckpt-2"):
        for suffix in ("index", "data*"):
            folder = tmp_path / f"{name}-{suffix}"
            shutil.copytree(chain, folder)
            for file in folder.glob(f"{name}.{suffix}"):
                file.unlink()
            with pytest.raises(tf.errors.OpError, match=re.escape(str(folder / name))):
                restore(table, folder)
            assert_same_rows(sorted_rows(table), before)


def test_damaged_bytes_of_a_link_are_noticed_before_a_row_is_replaced(chain, tmp_path):
    table = make_table(7, lifetimes=SOME_EXPIRE)
    before = sorted_rows(table)
    rng = np.random.default_rng(3)
    for name in ("ckpt-1", "ckpt-2"):
        sizes = {path.name: path.stat().st_size for path in chain.glob(f"{name}.data*")}
        file = max(sizes, key=sizes.get)
        for at in rng.integers(0, sizes[file], 8):
            folder = tmp_path / "copy"
            shutil.copytree(chain, folder)
            content = bytearray((folder / file).read_bytes())
            content[at] ^= 1 << rng.integers(8)
            (folder / file).write_bytes(content)
            error = error_of(functools.partial(restore, table, folder))
            assert str(folder / name) in str(error), (file, at)
            assert_same_rows(sorted_rows(table), before)
            shutil.rmtree(folder)
