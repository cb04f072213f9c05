"""A local EmbeddingTable: what rows start as, and the optimizers against those of Keras."""

import dataclasses
import gc
import pathlib

import keras
import numpy as np
import program_runner
import pytest
import tensorflow as tf

import het_tf
from het_tf import ops, optimizers
from het_tf.tables.worker_cache import WorkerCache

KEYS = np.array([0, 1, -1, 2**31, 2**32 + 1, 2**53 + 1, 2**63 - 1, -(2**63)])


# Initial values: a function of seed, key and column.


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox 4x32-10 (Salmon et al., SC 2011). counter: uint64 [n, 4]; key: uint64 [2]."""
    words, key, mask = counter.copy(), key.copy(), np.uint64(0xFFFFFFFF)
    for _ in range(10):
        low = words[:, 0] * np.uint64(0xD2511F53)
        high = words[:, 2] * np.uint64(0xCD9E8D57)
        words = np.stack(
            [
                high >> 32 ^ words[:, 1] ^ key[0],
                high & mask,
                low >> 32 ^ words[:, 3] ^ key[1],
                low & mask,
            ],
            axis=1,
        )
        key = key + np.array([0x9E3779B9, 0xBB67AE85], np.uint64) & mask
    return words


def halves(number) -> np.ndarray:
    """Low and high 32 bits."""
    number = np.asarray(number, np.int64).astype(np.uint64)
    return np.stack([number & np.uint64(0xFFFFFFFF), number >> np.uint64(32)], axis=-1)


def random_words(seed: int, keys: np.ndarray, dim: int) -> np.ndarray:
    """uint32 [keys, dim]: four columns from each counter (key, column / 4)."""
    blocks = -(-dim // 4)
    counter = np.zeros((len(keys), blocks, 4), np.uint64)
    counter[..., :2] = halves(keys)[:, None]
    counter[..., 2] = np.arange(blocks)
    words = philox(counter.reshape(-1, 4), halves(seed))
    return words.reshape(len(keys), -1)[:, :dim]


def uniform(seed: int, keys: np.ndarray, dim: int, low: float, high: float) -> np.ndarray:
    """In fp32, with the 24 bits that it holds."""
    low, high = np.float32(low), np.float32(high)
    unit = (random_words(seed, keys, dim) >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)
    return low + unit * (high - low)


def test_moments_of_initial_values(subtests):
    """Those that come from Keras's by name or as an object. C++ tests have the distributions."""
    kinds = keras.initializers
    for initializer, mean, stddev, furthest in [
        ("zeros", 0, 0, 0),
        ("ones", 1, 0, 0),
        (kinds.Constant(-2.5), -2.5, 0, 0),
        (kinds.RandomUniform(-3, 3), 0, 3**0.5, 3),
        (kinds.RandomNormal(1, 2), 1, 2, 14),
        # Truncated at two standard deviations, 0.8796 remains of it.
        (kinds.TruncatedNormal(0, 1), 0, 0.87962566, 2),
    ]:
        table = het_tf.EmbeddingTable(16, optimizers.SGD(), initializer=initializer, seed=1)
        values = table.lookup(np.arange(20000)).astype(np.float64)
        with subtests.test(table.row_attributes["initializer"]):
            assert np.abs(values.mean() - mean) <= 0.01 * stddev
            assert np.abs(values.std() - stddev) <= 0.01 * stddev
            assert np.abs(values - mean).max() <= furthest
            for axis in (0, 1):  # no row and no column is far off
                off = np.abs(values.mean(axis=axis) - mean).max()
                assert off <= 6 * stddev / np.sqrt(values.shape[axis])


class LocalShards(het_tf.EmbeddingTable):
    """Several shards in this process, as parameter servers have one each."""

    num_shards = 3


def test_unknown_keys_leave_no_row_and_read_alike_on_any_number_of_shards():
    keys = np.random.default_rng(4).integers(-(2**63), 2**63 - 1, 100_000)
    arguments = {"optimizer": optimizers.RowWiseAdagrad(), "initializer": "uniform", "seed": 77}
    whole, sharded = het_tf.EmbeddingTable(4, **arguments), LocalShards(4, **arguments)
    values = whole.lookup(keys)
    np.testing.assert_array_equal(values[::10], uniform(77, keys[::10], 4, -0.05, 0.05))
    batch = het_tf.ops.unique_ids(tf.constant(keys))
    for cache in (None, het_tf.CacheConfig(capacity=1000)):
        rows, _ = WorkerCache(sharded, cache).lookup_op(batch)
        np.testing.assert_array_equal(rows, values)
    assert whole.size() == sharded.size() == 0
    assert whole.export().keys.shape == sharded.export().keys.shape == (0,)


def test_shards_share_the_keys_evenly():
    keys = np.concatenate([np.arange(30000), np.arange(30000) * 2**20, -np.arange(1, 30001)])
    for num_shards in (2, 3, 5):
        counts = np.bincount(het_tf.ops.shard_of(keys, num_shards=num_shards))
        np.testing.assert_allclose(counts, len(keys) / num_shards, rtol=0.03)


# Rows out and in.


def train(table: het_tf.EmbeddingTable, keys: np.ndarray, gradients: np.ndarray, rate=0.1) -> None:
    batch = het_tf.ops.unique_ids(tf.constant(keys, tf.int64))
    table.apply_op(batch, tf.constant(gradients, tf.float32), tf.constant(rate), "error")


def test_rows_move_to_a_table_of_another_number_of_shards_and_back():
    source = het_tf.EmbeddingTable(3, optimizers.Adam())
    for step in range(1, 4):
        train(source, KEYS[: 2 * step], np.full((2 * step, 3), step))
    sharded = LocalShards(3, optimizers.Adam())
    back = het_tf.EmbeddingTable(3, optimizers.Adam())
    sharded.import_(source.export())
    back.import_(sharded.export())
    assert source.size() == sharded.size() == back.size() == 6
    one, other = source.export(), back.export()
    for field in dataclasses.fields(het_tf.TableExport):
        np.testing.assert_array_equal(
            getattr(one, field.name)[np.argsort(one.keys)],
            getattr(other, field.name)[np.argsort(other.keys)],
        )
    back.clear()
    assert back.size() == 0


def test_an_export_in_parts_is_the_whole(monkeypatch):
    table = het_tf.EmbeddingTable(2, optimizers.SGD())
    train(table, np.arange(1000), np.ones((1000, 2)))
    monkeypatch.setattr("het_tf.tables.table._EXPORT_PART_BYTES", 500)
    rows = table.export()
    assert sorted(rows.keys) == list(range(1000))
    np.testing.assert_array_equal(rows.values, table.lookup(rows.keys))


def test_parts_of_an_export_are_of_one_size_whatever_the_tables(monkeypatch):
    monkeypatch.setattr("het_tf.tables.table._EXPORT_PART_BYTES", 20_000)
    table = het_tf.EmbeddingTable(2, optimizers.Adagrad())
    for rows in (1_000, 100_000):
        table.assign(np.arange(rows), np.zeros((rows, 2), np.float32))
        parts = [
            sum(getattr(part, column.name).nbytes for column in dataclasses.fields(part))
            for part in table.export_parts()
        ]
        assert sum(parts) == rows * 32
        assert max(parts) < 25_000  # Rows are spread over parts by their hash.


def test_an_export_for_which_there_is_no_memory_is_an_error():
    program = pathlib.Path(__file__).with_name("export_memory_program.py")
    ended = program_runner.run(program)
    assert ended.returncode == 0, ended.stderr[-5000:]
    error, size = ended.stdout.splitlines()
    assert "Het>TableExport: out of memory" in error
    assert size == "10"


# Optimizers: as Keras's, on a dense problem in which every row is updated in every step.

# Keras's keep their state in variables, which must not be made before a test runs.
SAME = [
    (optimizers.SGD(0.1), lambda: keras.optimizers.SGD(0.1)),
    (optimizers.SGD(0.1, weight_decay=0.2), lambda: keras.optimizers.SGD(0.1, weight_decay=0.2)),
    (optimizers.Momentum(0.1), lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
    (
        optimizers.Momentum(0.1, momentum=0.5, nesterov=True),
        lambda: keras.optimizers.SGD(0.1, momentum=0.5, nesterov=True),
    ),
    (optimizers.Adagrad(0.1), lambda: keras.optimizers.Adagrad(0.1)),
    (
        optimizers.Adagrad(0.1, initial_accumulator_value=0.5, epsilon=1e-3),
        lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.5, epsilon=1e-3),
    ),
    (optimizers.Adam(0.1), lambda: keras.optimizers.Adam(0.1)),
    (
        optimizers.Adam(0.1, beta_1=0.5, beta_2=0.9, epsilon=1e-3),
        lambda: keras.optimizers.Adam(0.1, beta_1=0.5, beta_2=0.9, epsilon=1e-3),
    ),
    (optimizers.AdamW(), lambda: keras.optimizers.AdamW()),
    (optimizers.AdamW(weight_decay=0.2), lambda: keras.optimizers.AdamW(weight_decay=0.2)),
    (optimizers.RMSprop(), lambda: keras.optimizers.RMSprop()),
    (
        optimizers.RMSprop(rho=0.8, momentum=0.7, epsilon=1e-3, centered=True),
        lambda: keras.optimizers.RMSprop(rho=0.8, momentum=0.7, epsilon=1e-3, centered=True),
    ),
    (optimizers.Lion(), lambda: keras.optimizers.Lion()),
    (
        optimizers.Lion(beta_1=0.5, beta_2=0.9, weight_decay=0.1),
        lambda: keras.optimizers.Lion(beta_1=0.5, beta_2=0.9, weight_decay=0.1),
    ),
    (optimizers.LAMB(), lambda: keras.optimizers.Lamb()),
    (
        optimizers.LAMB(beta_1=0.5, beta_2=0.9, epsilon=1e-3, weight_decay=0.1),
        lambda: keras.optimizers.Lamb(beta_1=0.5, beta_2=0.9, epsilon=1e-3, weight_decay=0.1),
    ),
    (optimizers.Ftrl(0.1), lambda: keras.optimizers.Ftrl(0.1)),
    (
        optimizers.Ftrl(
            0.1, initial_accumulator_value=0.5, l1=0.01, l2=0.1, l2_shrinkage=0.01, beta=0.1
        ),
        lambda: keras.optimizers.Ftrl(
            0.1,
            initial_accumulator_value=0.5,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.1,
            l2_shrinkage_regularization_strength=0.01,
            beta=0.1,
        ),
    ),
]


def test_optimizers_are_those_of_keras(subtests):
    for ours, make_theirs in SAME:
        with subtests.test(ours.spec()):
            check_is_that_of_keras(ours, make_theirs())


def check_is_that_of_keras(ours, theirs):
    random = np.random.default_rng(6)
    table = het_tf.EmbeddingTable(5, ours, initializer="uniform", seed=9)
    keys = KEYS[:2] if ours.name == "lamb" else KEYS
    start = table.lookup(keys)
    # A row is to LAMB what a variable is to Keras's.
    parts = start if ours.name == "lamb" else [start]
    weights = [keras.Variable(part, dtype="float64") for part in parts]
    theirs.learning_rate = 0.01
    for _ in range(150 if ours.name == "lamb" else 40):
        gradients = random.normal(0.3, 1, start.shape).astype(np.float32)
        train(table, keys, gradients, rate=0.01)
        parts = gradients if ours.name == "lamb" else [gradients]
        theirs.apply([tf.constant(part, tf.float64) for part in parts], weights)
    values = np.reshape([each.numpy() for each in weights], start.shape)
    np.testing.assert_allclose(table.lookup(keys), values, rtol=1e-6, atol=1e-6)
    assert np.abs(values - start).mean() > 0.01


def row_wise(name: str, gradients: np.ndarray, rate: float) -> np.ndarray:
    """The change of one row by the published formulas, in float64."""
    value, moment, second = np.zeros(gradients.shape[1]), 0, 0.1 if "adagrad" in name else 0
    for step, gradient in enumerate(gradients.astype(np.float64), 1):
        square = np.mean(gradient**2)
        if name == "row_wise_adagrad":
            second += square
            value -= rate * gradient / np.sqrt(second + 1e-7)
        else:
            moment = 0.9 * moment + 0.1 * gradient
            second = 0.999 * second + 0.001 * square
            correction = np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            value -= rate * correction * moment / (np.sqrt(second) + 1e-7)
    return value


def test_row_wise_optimizers_are_their_formulas():
    gradients = np.random.default_rng(8).normal(size=(50, 13)).astype(np.float32)
    for optimizer in (optimizers.RowWiseAdagrad(), optimizers.RowWiseAdam()):
        table = het_tf.EmbeddingTable(13, optimizer, initializer="zeros")
        for gradient in gradients:
            train(table, np.array([5]), gradient[None])
        wanted = row_wise(optimizer.name, gradients, 0.1)
        np.testing.assert_allclose(table.lookup([5])[0], wanted, rtol=1e-5, atol=1e-5)


def test_clipnorm_and_max_norm():
    table = het_tf.EmbeddingTable(
        2, optimizers.SGD(clipnorm=5.0, max_norm=1.5), initializer="zeros"
    )
    train(table, np.array([1, 2, 3]), -np.array([[6, 8], [3, 4], [0.3, 0.4]]), rate=0.1)
    wanted = [[0.3, 0.4], [0.3, 0.4], [0.03, 0.04]]
    np.testing.assert_allclose(table.lookup([1, 2, 3]), wanted, rtol=1e-6)
    for _ in range(9):
        train(table, np.array([1]), -np.array([[6, 8]]), rate=0.1)
    np.testing.assert_allclose(table.lookup([1]), [[0.9, 1.2]], rtol=1e-6)


def test_no_keys_have_no_rows():
    assert het_tf.EmbeddingTable(3, optimizers.SGD()).lookup([]).shape == (0, 3)


def test_caches_drop_what_they_hold_if_a_shard_fails_that_another_one_may_precede(monkeypatch):
    table = het_tf.EmbeddingTable(1, optimizers.SGD())
    rows, cleared = table.export(), []
    monkeypatch.setattr(table, "clear_caches", lambda: cleared.append(True))
    changes = {"table_clear": table.clear, "table_import": lambda: table.import_(rows)}
    for number, (op, change) in enumerate(changes.items(), 1):
        monkeypatch.setattr(het_tf.ops, op, lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            change()
        assert len(cleared) == number


def test_an_abandoned_table_is_destroyed_when_the_next_one_is_made():
    table = het_tf.EmbeddingTable(2, optimizers.SGD())
    values, no_slots = np.ones((1, 2), np.float32), np.zeros((1, 0), np.float32)
    table.import_(het_tf.TableExport(np.array([1]), values, no_slots, np.array([1])))
    handle = table.handle(0)
    del table
    gc.collect()  # only takes note: it may run while TensorFlow builds a graph
    assert int(ops.table_size(handle)) == 1
    het_tf.EmbeddingTable(2, optimizers.SGD())
    with pytest.raises(tf.errors.NotFoundError):
        ops.table_size(handle)


def test_a_name_may_begin_with_an_underscore():
    layer = het_tf.layers.HetEmbedding(2, name="_private")
    layer(np.array([7]))
    assert layer.table.lookup([7]).shape == (1, 2)
