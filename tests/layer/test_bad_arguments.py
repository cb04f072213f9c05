"""Bad arguments of classes and functions: an error that names the argument and what it was."""

import json
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf import initializers, ops, optimizers
from het_tf.cache import WorkerCache

SGD = optimizers.SGD(1.0)


def config(**changes) -> het_tf.CacheConfig:
    return het_tf.CacheConfig(**{"capacity": 10, **changes})


def layer(output_dim=2, **arguments) -> het_tf.layers.HetEmbedding:
    return het_tf.layers.HetEmbedding(output_dim, **arguments)


def table(dim=2, optimizer=SGD, **arguments) -> het_tf.EmbeddingTable:
    return het_tf.EmbeddingTable(dim, optimizer, **arguments)


ARGUMENTS = [
    (lambda: config(capacity=0), "capacity must be at least 1 row, not 0"),
    (lambda: config(capacity=-3), "capacity must be at least 1 row, not -3"),
    (lambda: config(policy="fifo"), 'policy must be "lfu" or "lru", not \'fifo\''),
    (lambda: config(clock="vector"), 'clock must be "count" or "lamport", not \'vector\''),
    (lambda: config(staleness=-1), "staleness must not be negative (None: unbounded), not -1"),
    (lambda: config(read_bound=-1), "read_bound must not be negative (None: unbounded), not -1"),
    (lambda: config(write_bound=-7), "write_bound must not be negative (None: unbounded), not -7"),
    (lambda: config(capacity=1.5), "capacity must be an integer, not 1.5"),
    (lambda: config(capacity=None), "capacity must be an integer, not None"),
    (lambda: config(staleness="10"), "staleness must be an integer, not '10'"),
    (lambda: config(read_bound=0.5), "read_bound must be an integer, not 0.5"),
    (lambda: config(write_bound="a"), "write_bound must be an integer, not 'a'"),
    (lambda: layer(0), "output_dim must be an integer of at least 1, not 0"),
    (lambda: layer(1.5), "output_dim must be an integer of at least 1, not 1.5"),
    (lambda: layer(nonfinite="no"), 'nonfinite must be "error" or "skip", not \'no\''),
    (lambda: layer(cache=100), "cache must be a het_tf.CacheConfig or None, not 100"),
    (lambda: layer(optimizer="adam"), "optimizer must be one of het_tf.optimizers, for example"),
    (lambda: layer(optimizer=keras.optimizers.SGD()), "optimizer must be one of het_tf.optimizers"),
    (
        lambda: layer(embeddings_initializer="he_normal"),
        "embeddings_initializer must be zeros, ones",
    ),
    (
        lambda: initializers.spec("orthogonal"),
        "embeddings_initializer must be zeros, ones, constant",
    ),
    (lambda: table(0), "dim must be at least 1, not 0"),
    (lambda: table(clock="vector"), 'clock must be "count" or "lamport", not \'vector\''),
    (lambda: WorkerCache(table(), None, nonfinite="no"), 'nonfinite must be "error" or "skip"'),
    (lambda: optimizers.SGD(-0.1), "learning_rate must be a number that is not negative"),
    (lambda: optimizers.Adam(float("nan")), "learning_rate must be a number that is not negative"),
    (lambda: optimizers.Ftrl("fast"), "or a LearningRateSchedule, not 'fast'"),
    (lambda: optimizers.get("sgd"), "optimizer must be one of het_tf.optimizers"),
    (lambda: layer(name="users").table, "layer users has no table until it is built or called"),
    (
        lambda: layer(name="users").learning_rate,
        "layer users has no learning rate until it is built",
    ),
]


@pytest.mark.parametrize(("make", "message"), ARGUMENTS)
def test_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optimizers.Momentum(momentum=1.5), "optimizer = 'momentum .*momentum is out of range"),
        (optimizers.SGD(clipnorm=-1.0), "clipnorm is out of range"),
        (optimizers.Ftrl(weight_decay=0.1), "ftrl takes l2 instead of weight_decay"),
    ],
)
def test_parameters_that_the_ops_refuse(optimizer, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        layer(optimizer=optimizer).build()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (tf.constant([1.0]), "inputs of layer users must be integers, not float32"),
        (np.array([1.0]), "inputs of layer users must be integers, not float64"),
        (tf.constant([True]), "inputs of layer users must be integers, not bool"),
        (tf.constant(["a"]), "inputs of layer users must be integers, not string"),
        (tf.ragged.constant([[1, 2], [3]]), "must be a dense tensor, not a RaggedTensor: pad it"),
        (tf.sparse.from_dense([[1, 0]]), "must be a dense tensor, not a SparseTensor: pad it"),
    ],
)
def test_inputs_of_the_layer(inputs, message):
    users = layer(name="users")
    with pytest.raises(ValueError, match=message):
        users(inputs)
    assert users.table.size() == 0


def test_a_learning_rate_that_follows_a_schedule_is_not_assigned():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    users = layer(name="users", optimizer=optimizers.SGD(schedule))
    users.build()
    with pytest.raises(ValueError, match=r"no learning rate .*, nor with a schedule"):
        users.learning_rate = 0.5


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_learning_rate_assigned_out_of_range(rate):
    users = layer(optimizer=SGD)
    users.build()
    users.learning_rate = rate
    with (
        tf.GradientTape() as tape,
        pytest.raises(tf.errors.InvalidArgumentError, match="must be finite and not negative"),
    ):
        tape.gradient(tf.reduce_sum(users(np.array([1]))), users.trainable_variables)
    assert users.table.size() == 0


# Rows of another table.


def exported(keys, values, slots, clocks) -> het_tf.TableExport:
    floats = (np.asarray(each, np.float32) for each in (values, slots))
    return het_tf.TableExport(np.array(keys, np.int64), *floats, np.array(clocks, np.int64))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (exported([1], [[1, 2, 3]], np.zeros((1, 0)), [1]), r"values has shape \[1,3\], expected"),
        (exported([1], [[1, 2]], [[0.5]], [1]), r"slots has shape \[1,1\], expected \[1,0\]"),
        (exported([1], [[1, 2]], np.zeros((1, 0)), [-1]), "clocks holds -1 for key 1"),
    ],
)
def test_rows_that_do_not_fit_are_not_imported(rows, message):
    users = table(initializer="zeros")
    users.import_(exported([7], [[1, 2]], np.zeros((1, 0)), [3]))
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


@pytest.mark.parametrize("built_for", ["2.20.0", "2.22.0-rc1", "3.0.0"])
def test_a_library_for_another_tensorflow(tmp_path, built_for):
    path = library(tmp_path, json.dumps({"tensorflow": built_for}))
    with pytest.raises(ImportError, match=r"\.so are built for TensorFlow") as error:
        ops.load(path)
    message = str(error.value)
    assert f"built for TensorFlow {built_for}, but this is TensorFlow {tf.__version__}" in message
    assert REMEDY in message
    assert message.endswith(f"or install tensorflow=={built_for}")


@pytest.mark.parametrize("description", [None, "", "{}", '{"tensorflow": '])
def test_a_library_that_does_not_say_what_it_is_for(tmp_path, description):
    with pytest.raises(
        ImportError, match=r"_het_ops\.so are missing or incomplete; build"
    ) as error:
        ops.load(library(tmp_path, description))
    assert REMEDY in str(error.value)


def test_no_library(tmp_path):
    with pytest.raises(ImportError, match=r"_het_ops\.so are missing or incomplete; build it for"):
        ops.load(tmp_path / "_het_ops.so")
    only_json = library(tmp_path, json.dumps({"tensorflow": tf.__version__}))
    only_json.unlink()
    with pytest.raises(ImportError, match=r"do not load \(.*\); build it for this TensorFlow"):
        ops.load(only_json)


def test_a_library_that_does_not_load(tmp_path):
    path = library(tmp_path, json.dumps({"tensorflow": tf.__version__}), b"\x7fELF and no more")
    with pytest.raises(ImportError, match=r"do not load \(.*\); build it for this TensorFlow"):
        ops.load(path)


def test_loading_again_has_no_effect():
    assert ops.load().het_table_size is not None
