"""Rows from and for other programs."""

import io
import pathlib
import re
import struct
import sys
import zipfile

import keras
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf

import het_tf
from het_tf import interop

DIM = 3
KEYS = np.array([7, -(2**63), 2**63 - 1, 2**53 + 1, 0])
VALUES = np.arange(15, dtype=np.float32).reshape(5, DIM) / 7


def make_layer(**arguments) -> het_tf.layers.HetEmbedding:
    layer = het_tf.layers.HetEmbedding(
        output_dim=DIM, optimizer=het_tf.optimizers.Adam(), seed=1, **arguments
    )
    layer.build()
    return layer


def trained_layer(rows: int = 300) -> het_tf.layers.HetEmbedding:
    layer = make_layer()
    values = np.random.default_rng(0).normal(size=(rows, DIM)).astype(np.float32)
    layer.table.assign(np.arange(rows) * 2**50 - 2**57, values)
    return layer


def rows_of(layer) -> dict:
    rows = layer.table.export()
    columns = (rows.values, rows.slots, rows.clocks)
    return {
        int(key): tuple(np.asarray(column[i]).tobytes() for column in columns)
        for i, key in enumerate(rows.keys)
    }


FORMATS = {
    "npz": lambda folder: interop.Npz(folder / "rows.npz"),
    "parquet": lambda folder: interop.Parquet(folder / "rows.parquet"),
    "tfra": lambda folder: interop.Tfra(folder, "a/table", DIM),
}


def test_rows_come_back_from_every_format_in_many_blocks(tmp_path, monkeypatch, subtests):
    monkeypatch.setattr("het_tf.storage.row_files._BLOCK_BYTES", 200)
    monkeypatch.setattr("het_tf.tables.table._EXPORT_PART_BYTES", 500)
    for rows in (0, 1, 300):
        layer = trained_layer(rows)
        for name, make in FORMATS.items():
            with subtests.test(f"{name}, {rows=}"):
                assert interop.save(layer, make(tmp_path)) == rows
                assert not [*tmp_path.glob(".*")]
                other = make_layer()
                other.table.assign(np.array([1]), np.ones((1, DIM), np.float32))
                kept = rows_of(other)
                assert interop.load(other, make(tmp_path)) == rows
                assert rows_of(other) == rows_of(layer) | kept


class Ram:
    """A folder in TensorFlow's file system in memory, which stands for a bucket."""

    def __init__(self, path: str = "ram://interop"):
        self.path = path

    def __truediv__(self, name: str) -> str:
        return f"{self.path}/{name}"

    def __fspath__(self) -> str:
        return self.path


def test_any_file_system_of_tensorflow_will_do(monkeypatch, subtests):
    monkeypatch.setattr("het_tf.storage.row_files._BLOCK_BYTES", 200)
    layer = trained_layer()
    for name, make in FORMATS.items():
        with subtests.test(name):
            other = make_layer()
            for _ in range(2):  # over what is there, too
                assert interop.save(layer, make(Ram())) == 300
            assert interop.load(other, make(Ram())) == 300
            assert rows_of(other) == rows_of(layer)
            files = tf.io.gfile.listdir("ram://interop")
            assert not [file for file in files if file.startswith(".")]
            with pytest.raises(FileNotFoundError, match="ram://nowhere"):
                interop.load(other, make(Ram("ram://nowhere")))


def test_other_programs_read_and_write_the_files(tmp_path):
    layer = trained_layer()
    table = layer.table.export()
    interop.save(layer.table, interop.Npz(tmp_path / "a.npz"))
    with np.load(tmp_path / "a.npz") as arrays:
        np.testing.assert_array_equal(arrays["keys"], table.keys)
        np.testing.assert_array_equal(arrays["values"], table.values)
    interop.save(layer, interop.Parquet(tmp_path / "a.parquet", "id", "vector"))
    read = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    np.testing.assert_array_equal(read["id"].to_numpy(), table.keys)
    np.testing.assert_array_equal(np.stack(read["vector"].to_numpy()), table.values)
    interop.save(layer, interop.Tfra(tmp_path, "t", DIM))
    keys = np.fromfile(tmp_path / "t_mht_1of1_rank0_size1-keys", "<i8")
    np.testing.assert_array_equal(keys, table.keys)
    # And what they write, in types of their own.
    for dtype in (np.float16, np.float32, np.float64):
        values = VALUES.astype(dtype)
        np.savez_compressed(tmp_path / "b.npz", keys=KEYS, values=values)
        lists = pyarrow.array(list(values))
        columns = {"key": KEYS, "values": lists}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "b.parquet")
        for source in (
            interop.Npz(tmp_path / "b.npz"),
            interop.Parquet(tmp_path / "b.parquet"),
            interop.Weights(values, KEYS),
        ):
            other = make_layer()
            assert interop.load(other, source) == 5
            np.testing.assert_array_equal(other.table.lookup(KEYS), values.astype(np.float32))


def test_tables_of_tfra_in_shards_are_read(tmp_path):
    for number, end in enumerate(("", "_rank0_size1")):
        folder = tmp_path / str(number)
        folder.mkdir()
        for shard, part in enumerate([slice(0, 2), slice(2, 5)]):
            path = folder / f"t_mht_{shard + 1}of2{end}"
            KEYS[part].astype("<i8").tofile(f"{path}-keys")
            VALUES[part].astype("<f4").tofile(f"{path}-values")
        (folder / "t_mht_momentum_mht_1of1-keys").write_bytes(b"another table")
        layer = make_layer()
        assert interop.load(layer, interop.Tfra(folder, "t", DIM)) == 5
        np.testing.assert_array_equal(layer.table.lookup(KEYS), VALUES)


WRITTEN_BY_TFRA = pathlib.Path(__file__).parent / "tfra_files"


def test_what_tfra_wrote_is_read(subtests):
    # As tfra_files/write.py says.
    keys = np.array([5, 7, -3, 2**40, 12, 90, 8])
    values = np.arange(28, dtype=np.float32).reshape(7, 4) / np.float32(7)
    with np.load(WRITTEN_BY_TFRA / "keras.npz") as trained:
        of_keras = trained["keys"], trained["values"]
    assert len(of_keras[0]) == 30
    for source, (wanted_keys, wanted_values) in [
        (interop.Tfra(WRITTEN_BY_TFRA / "folder", "rows", 4), (keys, values)),
        (interop.TfraCheckpoint(WRITTEN_BY_TFRA / "saver", "scope/rows"), (keys, values)),
        (interop.TfraCheckpoint(WRITTEN_BY_TFRA / "keras", "user-parameter"), of_keras),
    ]:
        layer = het_tf.layers.HetEmbedding(4)
        layer.build()
        with subtests.test(str(source)):
            assert interop.load(layer, source) == layer.table.size() == len(wanted_keys)
            np.testing.assert_array_equal(layer.table.lookup(wanted_keys), wanted_values)


def _checkpoint(path, name, shards) -> str:
    """As TFRA's: TensorFlow's own tables of a variable are saved alike."""

    def table(keys, values):
        made = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, [0.0] * DIM)
        made.insert(keys, values)
        return made

    model = tf.train.Checkpoint(layer=tf.train.Checkpoint(), dense=tf.Variable([1.0]))
    slots = [table([1], [[9.0] * DIM])]
    for each, tables in ((name, [table(*shard) for shard in shards]), (f"{name}_slot", slots)):
        setattr(model.layer, f"tables_of_{each}", tables)
    return model.write(str(path / "model"))


def _saved_by_saver(path, tensors) -> str:
    prefix = str(path / "model")
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )
    return prefix


@pytest.mark.parametrize(("name", "cuts"), [("t", [2, 2, 3]), ("a/t.1", [])])
def test_tables_of_tfra_in_a_checkpoint_are_read(name, cuts, tmp_path, monkeypatch):
    monkeypatch.setattr("het_tf.storage.row_files._BLOCK_BYTES", 20)
    shards = [*zip(*(np.split(each, cuts) for each in (KEYS, VALUES)), strict=True)]
    checkpoint = _checkpoint(tmp_path, name, shards)
    tensors = {"dense": np.ones(1), "t_slot_mht_1of1-keys": KEYS, "t_slot_mht_1of1-values": VALUES}
    for i, shard in enumerate(shards):
        start = f"scope/{name.replace('/', '_')}_mht_{i + 1}of{len(shards)}"
        tensors |= zip((f"{start}-keys", f"{start}-values"), shard, strict=True)
    (tmp_path / "saver").mkdir()
    for path in (checkpoint, _saved_by_saver(tmp_path / "saver", tensors)):
        layer = make_layer()
        assert interop.load(layer, interop.TfraCheckpoint(path, name)) == 5
        assert layer.table.size() == 5
        np.testing.assert_array_equal(layer.table.lookup(KEYS), VALUES)


def test_weights_of_keras_go_both_ways():
    embedding = keras.layers.Embedding(10, DIM)
    embedding.build()
    layer = make_layer(input_dim=20)
    assert interop.load(layer, interop.Weights(embedding)) == 10
    back = keras.layers.Embedding(20, DIM)
    back.build()
    back.set_weights([interop.Weights.of(layer, 20)])
    ids = np.arange(20)
    np.testing.assert_array_equal(back(ids), layer(ids))
    np.testing.assert_array_equal(back(ids[:10]), embedding(ids[:10]))
    halved = keras.layers.Embedding(10, DIM, dtype="bfloat16")
    halved.build()
    assert interop.load(layer, interop.Weights(halved)) == 10
    values = np.asarray(halved.embeddings, np.float32)
    np.testing.assert_array_equal(layer.table.lookup(np.arange(10)), values)


def test_a_large_row_group_is_read_in_parts(tmp_path, monkeypatch):
    rows = 1 << 19
    values = np.random.default_rng(0).normal(size=(rows, DIM)).astype(np.float32)
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), DIM)
    table = pyarrow.table({"key": np.arange(rows), "values": lists})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=rows)
    sizes = []

    class Counted(io.BufferedReader):
        def read(self, size=-1):
            sizes.append(size)
            return super().read(size)

    monkeypatch.setattr("het_tf.storage.files.io.BufferedReader", Counted)
    blocks = [block for _, block in interop.Parquet(tmp_path / "x.parquet").read()]
    np.testing.assert_array_equal(np.concatenate(blocks), values)
    assert 0 < max(sizes) < values.nbytes / 2


def test_pretrained_rows_train_on_and_the_others_as_before():
    layer, plain = make_layer(), make_layer()
    interop.load(layer, interop.Weights(VALUES[:2], [3, 5]))
    np.testing.assert_array_equal(layer.table.lookup([3, 5]), VALUES[:2])
    np.testing.assert_array_equal(layer.table.lookup([4]), plain.table.lookup([4]))
    ids = keras.Input((1,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(layer(ids))))
    model.compile("sgd", "mse")
    model.fit(np.array([[3], [4]]), np.ones((2, 1)), verbose=0)
    assert (layer.table.lookup([3]) != VALUES[0]).any()
    np.testing.assert_array_equal(layer.table.lookup([5]), VALUES[1:2])


def _npz(**arrays):
    def write(path):
        np.savez(path / "x.npz", **arrays)
        return interop.Npz(path / "x.npz")

    return write


def _parquet(columns):
    def write(path):
        pyarrow.parquet.write_table(pyarrow.table(columns), path / "x.parquet")
        return interop.Parquet(path / "x.parquet")

    return write


def _parquet_twice(path):
    columns = [pyarrow.array(KEYS), pyarrow.array(KEYS), pyarrow.array(list(VALUES))]
    table = pyarrow.Table.from_arrays(columns, ["key", "key", "values"])
    pyarrow.parquet.write_table(table, path / "x.parquet")
    return interop.Parquet(path / "x.parquet")


def _with(row, column, value):
    values = VALUES.astype(np.float64).copy()
    values[row, column] = value
    return values


def _cut_npz(path):
    np.savez(path / "x.npz", keys=KEYS, values=VALUES)
    content = (path / "x.npz").read_bytes()
    (path / "x.npz").write_bytes(content[: len(content) // 2])
    return interop.Npz(path / "x.npz")


def _short_npz(path):
    with zipfile.ZipFile(path / "x.npz", "w") as archive:
        for name, array in (("keys", KEYS), ("values", VALUES)):
            header = str({"descr": array.dtype.str, "fortran_order": False, "shape": array.shape})
            text = header.encode() + b"\n"
            content = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text
            archive.writestr(f"{name}.npy", content + array.tobytes()[:-4])
    return interop.Npz(path / "x.npz")


def _tfra(keys, values, name="t_mht_1of1"):
    def write(path):
        np.asarray(keys, "<i8").tofile(path / f"{name}-keys")
        if values is not None:
            np.asarray(values, "<f4").tofile(path / f"{name}-values")
        return interop.Tfra(path, "t", DIM)

    return write


def _tfra_twice(path):
    _tfra(KEYS, VALUES)(path)
    return _tfra(KEYS, VALUES, "t_mht_1of1_rank0_size1")(path)


def _in_checkpoint(shards):
    def write(path):
        tensors = {}
        for start, shard in shards.items():
            tensors |= zip((f"{start}-keys", f"{start}-values"), shard, strict=True)
        return interop.TfraCheckpoint(_saved_by_saver(path, tensors), "t")

    return write


def _damaged_checkpoint(cut):
    def write(path):
        source = _in_checkpoint({"t_mht_1of1": (KEYS, VALUES)})(path)
        (data,) = path.glob("model.data*")
        content = bytearray(data.read_bytes())
        content[3] ^= 1
        data.write_bytes(content[:-cut] if cut else content)
        return source

    return write


LISTS = pyarrow.array([list(row) for row in VALUES])
BAD = {
    "no array": (_npz(keys=KEYS), r"x\.npz: has no array values"),
    "other widths": (_npz(keys=KEYS, values=VALUES[:, :2]), r"x\.npz: values are .* \[5, 2\]"),
    "other lengths": (_npz(keys=KEYS[:4], values=VALUES), r"x\.npz: has keys \[4\] and values"),
    "keys of floats": (_npz(keys=KEYS * 1.0, values=VALUES), r"x\.npz: keys are float64 \[5\]"),
    "large keys": (
        _npz(keys=np.full(5, 2**63, np.uint64), values=VALUES),
        r"x\.npz: key 9223372036854775808 is not in",
    ),
    "NaN": (_npz(keys=KEYS, values=_with(3, 1, np.nan)), rf"x\.npz: key {2**53 + 1} has nan"),
    "infinity": (_npz(keys=KEYS, values=_with(4, 0, -np.inf)), r"x\.npz: key 0 has -inf"),
    "large": (_npz(keys=KEYS, values=_with(0, 0, 1e39)), r"x\.npz: key 7 has 1e\+39"),
    "integers": (_npz(keys=KEYS, values=VALUES.astype(int)), r"x\.npz: values are int64"),
    "objects": (_npz(keys=KEYS, values=VALUES.astype(object)), r"x\.npz: has an array of object"),
    "Fortran": (_npz(keys=KEYS, values=np.asfortranarray(VALUES)), r"x\.npz: has .* Fortran"),
    "cut off": (_cut_npz, r"x\.npz: "),
    "too short": (_short_npz, r"x\.npz: ends 4 bytes too early"),
    "no column": (_parquet({"key": KEYS}), r"x\.parquet: has columns \['key'\], expected one val"),
    "a column twice": (
        _parquet_twice,
        r"x\.parquet: has columns \['key', 'key', 'values'\], expected one key",
    ),
    "durations": (
        _parquet({"key": pyarrow.array(KEYS, pyarrow.duration("s")), "values": list(VALUES)}),
        r"x\.parquet: keys are timedelta64\[s\] \[5\], expected integers",
    ),
    "no lists": (_parquet({"key": KEYS, "values": KEYS}), r"x\.parquet: column values is of int64"),
    "no key": (
        _parquet({"key": [1, None], "values": LISTS[:2]}),
        r"x\.parquet: column key has 1 rows without",
    ),
    "no numbers": (
        _parquet({"key": KEYS[:2], "values": [[1.0, 2.0, 3.0], [1.0, None, 3.0]]}),
        r"x\.parquet: column values has 1 missing numbers",
    ),
    "unequal": (
        _parquet({"key": KEYS[:2], "values": [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0]]}),
        r"x\.parquet: column values has lists of",
    ),
    "strings": (
        _parquet({"key": ["a"], "values": [[1.0, 2.0, 3.0]]}),
        r"x\.parquet: keys are object",
    ),
    "no values": (_tfra(KEYS, None), r"t_mht_1of1-values is missing"),
    "other sizes": (_tfra(KEYS, VALUES[:, :2]), r"t_mht_1of1-keys has 40 bytes .*-values 40"),
    "a shard is missing": (_tfra(KEYS, VALUES, "t_mht_1of2"), r"t has \['t_mht_1of2-keys'\]"),
    "a process is missing": (
        _tfra(KEYS, VALUES, "t_mht_1of1_rank1_size2"),
        r"t has \['t_mht_1of1_rank1_size2-keys'\], expected one",
    ),
    "a shard twice": (
        _tfra_twice,
        r"t has \['t_mht_1of1-keys', 't_mht_1of1_rank0_size1-keys'\]",
    ),
    "no table": (_tfra(KEYS, VALUES, "u_mht_1of1"), r"t has no files t_mht_\*-keys"),
    "no checkpoint": (lambda path: interop.TfraCheckpoint(path / "model", "t"), "model: .*"),
    "no such table": (
        lambda path: interop.TfraCheckpoint(_checkpoint(path, "u", [(KEYS, VALUES)]), "t"),
        r"model, table t is not there; tables are \['u', 'u_slot'\]",
    ),
    "shards of two tables": (
        _in_checkpoint({"t_mht_1of1": (KEYS, VALUES), "b/t_mht_1of1": (KEYS, VALUES)}),
        r"shards are \['b/t_mht_1of1', 't_mht_1of1'\]",
    ),
    "a missing shard": (
        _in_checkpoint({"t_mht_1of3": (KEYS, VALUES), "t_mht_3of3": (KEYS, VALUES)}),
        r"shards are \['t_mht_1of3', 't_mht_3of3'\]",
    ),
    "other sizes in a checkpoint": (
        _in_checkpoint({"t_mht_1of1": (KEYS, VALUES[:4])}),
        r"t_mht_1of1-keys is \[5\] and t_mht_1of1-values \[4, 3\]",
    ),
    "a flipped bit": (_damaged_checkpoint(0), r"model, table t: .*[Cc]hecksum"),
    "a checkpoint cut off": (_damaged_checkpoint(7), r"model, table t: "),
    "keys of strings": (
        _in_checkpoint({"t_mht_1of1": (KEYS.astype(str), VALUES)}),
        r"table t: keys are object \[5\]",
    ),
    "keys of weights": (lambda _: interop.Weights(VALUES, KEYS[:3]), "weights: 3 keys of 5 rows"),
}


def test_bad_rows_are_named_and_change_nothing(tmp_path, subtests):
    layer = trained_layer(20)
    before = rows_of(layer)
    for case, (write, message) in BAD.items():
        (tmp_path / case).mkdir()
        with subtests.test(case):
            source = write(tmp_path / case)
            with pytest.raises((ValueError, OSError), match=message):
                interop.load(layer, source)
            assert rows_of(layer) == before


@pytest.mark.parametrize("flips", [60, pytest.param(300, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["npz", "parquet"])
def test_a_flipped_bit_is_noticed_or_means_nothing(name, flips, tmp_path):
    layer = trained_layer(60)
    source = FORMATS[name](tmp_path)
    interop.save(layer, source)
    path = tmp_path / f"rows.{name}"
    content = path.read_bytes()
    expected = rows_of(layer)
    rng = np.random.default_rng(0)
    noticed = 0
    for place in rng.integers(0, len(content), flips):
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        other = make_layer()
        said = None
        try:
            interop.load(other, source)
        except (ValueError, OSError) as error:
            said = str(error)
        if said is None:
            assert rows_of(other) == expected, place
            continue
        noticed += 1
        assert str(path) in said, place
        assert other.table.size() == 0, place
    assert noticed > flips / 3


def test_what_is_bad_in_the_last_block_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("het_tf.storage.row_files._BLOCK_BYTES", 12)
    layer = make_layer()
    with pytest.raises(ValueError, match=r"x\.npz: key 0 has nan"):
        interop.load(layer, _npz(keys=KEYS, values=_with(4, 2, np.nan))(tmp_path))
    assert layer.table.size() == 0


def test_keys_of_a_layer_are_bounded_as_its_ids_are():
    layer = make_layer(input_dim=5)
    for key in (-1, 5):
        with pytest.raises(ValueError, match=rf"weights: key {key} is not in \[0, 4\]"):
            interop.load(layer, interop.Weights(VALUES[:1], [key]))


def make_collection() -> het_tf.layers.HetEmbeddingCollection:
    """Of three tables, of which two share one."""
    tables = [
        het_tf.layers.TableConfig(name, size, dim)
        for name, size, dim in (("users", 6, DIM), ("shops", 9, DIM), ("words", 6, DIM + 1))
    ]
    layer = het_tf.layers.HetEmbeddingCollection(
        {
            each.name: het_tf.layers.FeatureConfig(
                each.name, each, (2, 1), (2, 1, each.embedding_dim)
            )
            for each in tables
        },
        seed=1,
    )
    layer.build()
    return layer


def test_each_table_of_a_collection_has_its_rows_by_its_own_ids(tmp_path):
    layer, other = make_collection(), make_collection()
    shops = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32)
    assert interop.load(layer, interop.Weights(shops, [0, 8, 4]), table="shops") == 3
    assert interop.load(layer, interop.Weights(-shops, [0, 1, 5]), table="users") == 3
    before = other.get_embedding_tables()
    read = layer.get_embedding_tables()
    np.testing.assert_array_equal(read["shops"][[0, 8, 4]], shops)
    np.testing.assert_array_equal(read["users"][[0, 1, 5]], -shops)
    np.testing.assert_array_equal(interop.Weights.of(layer, 9, table="shops"), read["shops"])
    assert interop.save(layer, interop.Npz(tmp_path / "rows.npz"), table="shops") == 3
    assert interop.load(other, interop.Npz(tmp_path / "rows.npz"), table="shops") == 3
    expected = {**before, "shops": read["shops"]}
    for table, values in other.get_embedding_tables().items():
        np.testing.assert_array_equal(values, expected[table])


WRONG_TABLES = [
    (
        lambda c, s: interop.load(c, s),
        r"table = None, but layer .* has \['shops', 'users', 'wo",
    ),
    (lambda c, s: interop.load(c, s, table="x"), r"table = 'x', but layer .* has \['shops'"),
    (lambda c, s: interop.load(c, s, table="users"), r"weights: key 6 is not in \[0, 5\]"),
    (lambda c, s: interop.load(c, s, table="words"), r"weights: values are .* \[1, 4\]"),
    (lambda c, s: interop.Weights.of(c, 7, table="users"), "rows must be .* to 6, not 7"),
    (
        lambda c, s: interop.save(c.layers[0], interop.Npz("x"), table="users"),
        "table = 'users' is for a HetEmbeddingCollection, not for <HetEmbedding",
    ),
]


def test_wrong_tables_of_a_collection_are_named(subtests):
    collection = make_collection()
    for call, message in WRONG_TABLES:
        with subtests.test(message), pytest.raises(ValueError, match=message):
            call(collection, interop.Weights(VALUES[:1], [6]))


WRONG_ARGUMENTS = [
    (lambda t: interop.load(t, "x.npz"), r"source must be a format, .*Npz.* not 'x.npz'"),
    (lambda t: interop.save(t, {}), r"target must be a format, .* not \{\}"),
    (lambda _: interop.Tfra("t", "t", 0), "dim must be an integer from 1 .* not 0"),
    (lambda _: interop.Parquet("x", "a", "a"), "two names, not 'a' and 'a'"),
    (lambda _: interop.Parquet("x", 3), "two names, not 3 and 'values'"),
    (lambda _: interop.Weights(3.0), "values must be .* not 3.0"),
    (
        lambda _: interop.Weights(keras.layers.Embedding(2, 3)),
        "values must be .* not <Embedding",
    ),
    (lambda t: interop.Weights.of(t, -1), "rows must be an integer from 0 .* not -1"),
    (lambda t: interop.Weights.of(t, 2.0), "rows must be an integer from 0 .* not 2.0"),
    (lambda t: interop.load(t, Once()), "once: 5 rows were read first, and 0 the next time"),
]


def test_wrong_arguments_are_named(subtests):
    layer = make_layer()
    for call, message in WRONG_ARGUMENTS:
        with subtests.test(message), pytest.raises(ValueError, match=message):
            call(layer)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "nowhere/rows.npz"
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(str(path))}: "):
        interop.save(trained_layer(3), interop.Npz(path))


class Once:
    """A source that is used up when it was read."""

    def __init__(self):
        self._blocks = iter([(KEYS, VALUES)])

    def __str__(self):
        return "once"

    def read(self):
        return self._blocks


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in (interop.load, interop.save):
        with pytest.raises(ImportError, match=re.escape("Parquet needs pyarrow: pip install")):
            use(trained_layer(2), interop.Parquet(tmp_path / "x.parquet"))
    with pytest.raises(ValueError, match="rows are of a HetEmbedding or an EmbeddingTable"):
        interop.save(keras.layers.Dense(3), interop.Npz(tmp_path / "x.npz"))
