"""Bad arguments of classes and functions: an error that names the argument and what it was."""

import dataclasses
import json
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf import initializers, ops, optimizers
from het_tf.tables.worker_cache import WorkerCache

SGD = optimizers.SGD(1.0)


def config(**changes) -> het_tf.CacheConfig:
    return het_tf.CacheConfig(**{"capacity": 10, **changes})


def layer(output_dim=2, **arguments) -> het_tf.layers.HetEmbedding:
    return het_tf.layers.HetEmbedding(output_dim, **arguments)


def table(dim=2, optimizer=SGD, **arguments) -> het_tf.EmbeddingTable:
    return het_tf.EmbeddingTable(dim, optimizer, **arguments)


def set_rows(keys, clocks=(1,)) -> None:
    values, slots = np.ones((1, 1), np.float32), np.ones((1, 0), np.float32)
    table(1).import_(
        het_tf.tables.table.TableExport(np.array(keys), values, slots, np.array(clocks))
    )


def drift(**changes) -> het_tf.CacheConfig:
    return config(clock="drift", **changes)


NAN, INF = float("nan"), float("inf")
ROWS = "must be an integer from 1 to 2147483647"
DIM = "must be an integer from 1 to 16777216"
COUNT = "must be an integer from 0 to 2147483647 or None (unbounded)"
LENGTH = "must be a number from 0 to 1024 or None (unbounded)"
SEED = "must be an integer from -9223372036854775808 to 9223372036854775807"
RATE = "must be a number from 0 to 3.40282e+38 or a LearningRateSchedule"

NO_INTEGERS = [0, 1.5, True, "10", 2**31, np.int64(2**40)]
NO_NUMBERS = [-0.1, NAN, INF, "1", True, 1024.5]

# Each check once. Those of integers and of numbers are shared: all values that they refuse are
# given to one argument each.
ARGUMENTS = [
    *((lambda v=v: config(capacity=v), f"capacity {ROWS}, not {v!r}") for v in NO_INTEGERS),
    *((lambda v=v: drift(staleness=v), f"staleness {LENGTH}, not {v!r}") for v in NO_NUMBERS),
    (lambda: config(policy="fifo"), 'policy must be "lfu" or "lru", not \'fifo\''),
    (lambda: config(clock="vector"), 'clock must be "count", "lamport" or "drift", not \'vector\''),
    (lambda: config(staleness=-1), f"staleness {COUNT}, not -1"),
    (lambda: config(read_bound=0.5), f"read_bound {COUNT}, not 0.5"),
    (lambda: config(write_bound=-7, clock="lamport"), f"write_bound {COUNT}, not -7"),
    (lambda: drift(staleness=1, read_bound=-1), f"read_bound {LENGTH}, not -1"),
    (lambda: drift(staleness=1, write_bound=1025), f"write_bound {LENGTH}, not 1025"),
    (lambda: drift(read_bound=1), 'clock = "drift" needs staleness beside read_bound'),
    (
        lambda: config(total_staleness=0.5),
        "total_staleness must be an integer from 0 to 2147483647",
    ),
    (lambda: drift(total_staleness=-1), "total_staleness must be a number from 0 to 1024, not -1"),
    (
        lambda: config(total_staleness=8, staleness=2),
        "staleness = 2 and total_staleness = 8 exclude each other",
    ),
    (
        lambda: config(total_staleness=8, clock="lamport"),
        'total_staleness has no meaning with clock = "lamport"',
    ),
    (lambda: layer(0), f"output_dim {DIM}, not 0"),
    (lambda: layer(2**24 + 1), f"output_dim {DIM}, not 16777217"),
    *((lambda v=v: layer(seed=v), f"seed {SEED}, not {v!r}") for v in (2**63, -(2**63) - 1)),
    (lambda: layer(nonfinite="no"), 'nonfinite must be "error" or "skip", not \'no\''),
    (lambda: layer(cache=100), 'cache must be a het_tf.CacheConfig, "auto" or None, not 100'),
    (
        lambda: layer(optimizer="adan"),
        "or the name of one: adagrad, adam, adamw, ftrl, lamb, lion, momentum, rmsprop, row_wise",
    ),
    (lambda: layer(optimizer=keras.optimizers.SGD), "optimizer must be one of het_tf.optimizers"),
    (
        lambda: layer(embeddings_initializer="identity"),
        "embeddings_initializer must be zeros, ones",
    ),
    (
        lambda: initializers.spec("orthogonal", 9, 4, [(2, 3, "zeros")]),
        "embeddings_initializer Orthogonal cannot go on after keys",
    ),
    (lambda: table(0), f"dim {DIM}, not 0"),
    (lambda: table(seed=None), f"seed {SEED}, not None"),
    (lambda: table(clock="vector"), 'clock must be "count", "lamport" or "drift", not \'vector\''),
    (lambda: table().lookup([1.5]), "keys must be int64 integers, not float64"),
    (lambda: table().lookup([1, 2**70]), f"keys must be int64 integers, not [1, {2**70}]"),
    (
        lambda: table().lookup(np.array([2**63 - 1, 2**63 + 5], np.uint64)),
        "keys must be at most 2**63 - 1, not 9223372036854775813",
    ),
    (lambda: set_rows([1.7]), "keys must be int64 integers, not float64"),
    (lambda: set_rows([1], clocks=[2.9]), "clocks must be int64 integers, not float64"),
    (lambda: set_rows([1, 2]), "[rows, slot_dim] and [rows], not (2,), (1, 1), (1, 0), (1,)"),
    (lambda: table().assign([1.5], [[1.0]]), "keys must be int64 integers, not float64"),
    (lambda: WorkerCache(table(), None, nonfinite="no"), 'nonfinite must be "error" or "skip"'),
    *((lambda v=v: optimizers.SGD(v), f"learning_rate {RATE}, not {v!r}") for v in (INF, 1e39)),
    (lambda: optimizers.get("sgd"), "optimizer must be one of het_tf.optimizers"),
    (lambda: layer(name="users").table, "layer users has no table until it is built or called"),
    (
        lambda: layer(name="users").learning_rate,
        "layer users has no learning rate until it is built",
    ),
]


def test_arguments_out_of_range(subtests):
    for make, message in ARGUMENTS:
        with subtests.test(message), pytest.raises(ValueError, match=re.escape(message)):
            make()


def test_a_config_with_a_wrong_argument_is_a_type_error_as_keras_has_it():
    for kind in (keras.layers.Embedding, het_tf.layers.HetEmbedding):
        wrong = kind(3, 2).get_config() | {"output_dim": 0, "no_such": 1}
        with pytest.raises(TypeError, match=r"no_such|output_dim"):
            kind.from_config(wrong)


def test_lookup_in_a_graph_says_what_to_call():
    dataset = tf.data.Dataset.range(3)
    with pytest.raises(ValueError, match=r"lookup of table \w+ .* call the layer on the ids there"):
        dataset.map(table().lookup)


FRACTION = "must be a number from 0 to 1, not"
POSITIVE = "must be a number from 0 to 1e+30, not"
FLAG = "must be True or False, not"
# A range each.
PARAMETERS = [
    (optimizers.SGD, "weight_decay", POSITIVE, [-1, 1e31]),
    (optimizers.Ftrl, "nonnegative", FLAG, [0, "yes"]),
    (optimizers.Momentum, "momentum", FRACTION, [-0.1, 1.1]),
    (optimizers.Adam, "beta_1", FRACTION, [1.0]),
    (optimizers.Adam, "beta_2", FRACTION, [1.0]),
    (optimizers.RMSprop, "rho", FRACTION, [1.0]),
    (optimizers.Adam, "epsilon", "must be a number from 1e-30 to 1e+30, not", [0, INF]),
]


def test_parameters_of_optimizers(subtests):
    for optimizer, name, message, values in PARAMETERS:
        for value in values:
            refused = f"{name} {message} {value!r}"
            with subtests.test(refused), pytest.raises(ValueError, match=re.escape(refused)):
                optimizer(**{name: value})


def test_every_parameter_of_every_optimizer_is_checked():
    kinds = optimizers.Optimizer.__subclasses__()
    assert len(kinds) > 8
    for kind in kinds:
        for field in dataclasses.fields(kind):
            with pytest.raises(ValueError, match=f"{field.name} must be"):
                kind(**{field.name: "high"})


def test_ftrl_takes_no_weight_decay():
    for ftrl in (optimizers.Ftrl, keras.optimizers.Ftrl):
        with pytest.raises(ValueError, match=r"Ftrl takes l2 instead of weight_decay = 0\.1"):
            layer(optimizer=ftrl(weight_decay=0.1))


def test_a_regularizer_would_count_for_cowclip():
    cowclip = optimizers.SGD(cowclip=0.5)
    with pytest.raises(ValueError, match=r"cowclip=0\.5 .* use l2 of the optimizer"):
        layer(optimizer=cowclip, embeddings_regularizer="l2")


def test_numbers_of_any_type_are_kept_as_plain_ones():
    made = optimizers.Momentum(np.float32(0.5), momentum=np.float64(0.5), nesterov=np.bool_(True))
    assert made == optimizers.Momentum(0.5, momentum=0.5, nesterov=True)
    kept = layer(np.int64(8), seed=np.uint8(3), optimizer=made)
    cached = config(capacity=np.int32(7), staleness=np.int64(5), write_bound=None)
    drifting = drift(capacity=7, staleness=1, read_bound=np.float32(0.5))
    for configuration in (made, kept, cached, drifting):
        json.dumps(configuration.get_config())
    assert (kept.output_dim, kept.seed) == (8, 3)
    assert cached == config(capacity=7, read_bound=5, staleness=5, write_bound=None)
    assert dataclasses.astuple(drifting) == (
        7,
        "lfu",
        1.0,
        0.5,
        1.0,
        "drift",
        None,
        None,
        None,
        "GPU",
    )
    assert table(np.int64(3), seed=np.int64(-5)).lookup([1]).shape == (1, 3)


def test_bounds_in_the_unit_of_the_clock():
    assert config(read_bound=3, write_bound=None).bound_attributes(2) == {
        "read_bound": 3,
        "write_bound": -1,
    }
    largest = drift(read_bound=0.5, write_bound=1024).bound_attributes(2)
    assert largest == {"read_bound": 2**13, "write_bound": 2**24}
    assert drift(staleness=None).bound_attributes(2) == {"read_bound": -1, "write_bound": -1}


def test_room_for_steps_costs_at_most_a_tenth_of_the_bound():
    for lookahead, bound, due in [
        (None, 2, 2),
        (None, 100, 93),
        (1, 100, 100),
        (5, 100, 94),
        (5, 20, 18),
        (5, 9, 9),
        (1, 0, 0),
        (1, -1, -1),
    ]:
        assert config(lookahead=lookahead).due_bound(bound, on_device=False) == due
    assert drift(staleness=1).due_bound(1000, on_device=False) == 900


def test_a_total_is_shared_by_the_workers():
    for total, workers, read_bound, write_bound in [
        (10, 1, 10, 10),
        (10, 2, 5, 5),
        (10, 3, 6, 2),
        (11, 2, 6, 5),
        (3, 8, 3, 0),
        (0, 2, 0, 0),
    ]:
        bounds = config(total_staleness=total).bound_attributes(workers)
        assert bounds == {"read_bound": read_bound, "write_bound": write_bound}
        assert read_bound + (workers - 1) * write_bound == total or workers == 1


def test_what_bounds_are_without_any():
    assert config() == config(clock="count", total_staleness=4)
    assert drift() == drift(total_staleness=0.1)
    assert config(clock="lamport") == config(clock="lamport", staleness=100)
    for each in (config(), drift(), config(staleness=3), config(write_bound=None)):
        assert het_tf.CacheConfig.from_config(each.get_config()) == each


def test_inputs_of_the_layer():
    users = layer(name="users")
    for inputs, dtype in (([True], "bool"), (["a"], "string")):
        with pytest.raises(
            ValueError, match=f"inputs of layer users must be integers, not {dtype}"
        ):
            users(tf.constant(inputs))
    assert users.table.size() == 0


def test_a_learning_rate_that_follows_a_schedule_is_not_assigned():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    users = layer(name="users", optimizer=optimizers.SGD(schedule))
    users.build()
    with pytest.raises(ValueError, match=r"no learning rate .*, nor with a schedule"):
        users.learning_rate = 0.5


def test_a_learning_rate_assigned_out_of_range():
    users = layer(optimizer=SGD)
    users.build()
    for rate in (-1.0, NAN, INF):
        users.learning_rate = rate
        with (
            tf.GradientTape() as tape,
            pytest.raises(tf.errors.InvalidArgumentError, match="must be finite and not negative"),
        ):
            train_rows(tape, tf.reduce_sum(users(np.array([1]))), users)
    assert users.table.size() == 0


# Rows of another table.


def exported(keys, values, slots, clocks) -> het_tf.TableExport:
    floats = (np.asarray(each, np.float32) for each in (values, slots))
    return het_tf.TableExport(np.array(keys, np.int64), *floats, np.array(clocks, np.int64))


def test_rows_that_do_not_fit_are_not_imported():
    users, no_slots = table(initializer="zeros"), np.zeros((1, 0))
    users.import_(exported([7], [[1, 2]], no_slots, [3]))
    for rows, message in [
        (exported([1], [[1, 2, 3]], no_slots, [1]), r"values has shape \[1,3\], expected"),
        (exported([1], [[1, 2]], [[0.5]], [1]), r"slots has shape \[1,1\], expected \[1,0\]"),
        (exported([1], [[1, 2]], no_slots, [-1]), "clocks holds -1 for key 1"),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            users.import_(rows)
    assert users.export().keys.tolist() == [7]
    assert users.lookup([7]).tolist() == [[1, 2]]


# The op library.


def library(folder: pathlib.Path, description: str | None, content: bytes = b"") -> pathlib.Path:
    path = folder / "_het_ops.so"
    path.write_bytes(content)
    if description is not None:
        path.with_suffix(".json").write_text(description)
    return path


REMEDY = "build it for this TensorFlow: `make ops` in a checkout, or `pip install --no-build-isol"


def test_a_library_for_another_tensorflow(tmp_path):
    built_for = "2.22.0-rc1"
    path = library(tmp_path, json.dumps({"tensorflow": built_for}))
    with pytest.raises(ImportError, match=r"\.so are built for TensorFlow") as error:
        ops.load(path)
    message = str(error.value)
    assert f"built for TensorFlow {built_for}, but this is TensorFlow {tf.__version__}" in message
    assert REMEDY in message
    assert message.endswith(f"or install tensorflow=={built_for}")


def test_a_library_that_does_not_say_what_it_is_for_or_does_not_load(tmp_path):
    for description in (None, "{}", '{"tensorflow": '):
        with pytest.raises(
            ImportError, match=r"_het_ops\.so are missing or incomplete; build"
        ) as error:
            ops.load(library(tmp_path, description))
        assert REMEDY in str(error.value)
    path = library(tmp_path, json.dumps({"tensorflow": tf.__version__}), b"\x7fELF and no more")
    for _ in range(2):
        with pytest.raises(ImportError, match=r"do not load \(.*\); build it for this TensorFlow"):
            ops.load(path)
        path.unlink(missing_ok=True)  # only what describes it is there


def test_loading_again_has_no_effect():
    assert ops.load().het_table_size is not None
