"""HetEmbedding in saved models, weights and configs, without a strategy."""

import contextlib
import copy
import dataclasses
import json
import logging
import pickle
import resource

import keras
import numpy as np
import pytest
import tensorflow as tf

import het_tf
from het_tf import optimizers

SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)
IDS = np.array([[0, -1, 5], [2**53 + 1, 2**63 - 1, 5], [2**24 + 1, 7, 7]])
LABELS = np.array([1.0, -1.0, 0.5])


def build(optimizer=None, **arguments) -> keras.Model:
    arguments = {"seed": 11, "name": "users", **arguments}
    inputs = keras.Input((3,), dtype="int64")
    width = arguments.pop("output_dim", 2)
    embedded = het_tf.layers.HetEmbedding(width, optimizer=optimizer, **arguments)(inputs)
    model = het_tf.keras.Model(inputs, keras.layers.Dense(1)(keras.ops.sum(embedded, axis=1)))
    model.compile(keras.optimizers.SGD(0.01), loss="mse")
    return model


def fit(model: keras.Model, epochs: int = 3) -> list[float]:
    return model.fit(IDS, LABELS, batch_size=1, epochs=epochs, shuffle=False, verbose=0).history[
        "loss"
    ]


def table_of(model: keras.Model) -> het_tf.EmbeddingTable:
    return model.get_layer("users").table


def sorted_rows(model: keras.Model) -> list[np.ndarray]:
    rows = table_of(model).export()
    order = np.argsort(rows.keys)
    return [getattr(rows, field.name)[order] for field in dataclasses.fields(rows)]


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("keras", optimizers.Adam(SCHEDULE, clipnorm=1.0, max_norm=2.0)),
        pytest.param("keras", optimizers.RowWiseAdagrad(0.1), marks=pytest.mark.exhaustive),
        ("weights.h5", optimizers.Adagrad(SCHEDULE)),
        pytest.param(
            "weights.h5",
            optimizers.Momentum(0.1, momentum=0.5, nesterov=True),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_saved_model_goes_on_as_if_it_had_not_been_saved(tmp_path, kind, optimizer):
    model = build(optimizer)
    fit(model)
    rows, predicted = sorted_rows(model), model.predict(IDS, verbose=0)
    path = tmp_path / f"model.{kind}"
    if kind == "keras":
        model.save(path)
        loaded = keras.models.load_model(path)
    else:
        model.save_weights(path)
        loaded = build(optimizer)
        fit(loaded, epochs=1)  # to be forgotten
        loaded.load_weights(path)
    assert table_of(loaded) is not table_of(model)
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), predicted)
    for saved, read in zip(rows, sorted_rows(loaded), strict=True):
        np.testing.assert_array_equal(read, saved)
    # Keys never updated, slots, iterations of the schedule: the same from here on.
    unknown = table_of(loaded).lookup([123456789])
    np.testing.assert_array_equal(unknown, table_of(model).lookup([123456789]))
    assert fit(model) == fit(loaded)
    for one, other in zip(sorted_rows(model), sorted_rows(loaded), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_table_without_rows_is_saved_and_loaded(tmp_path):
    model = build()
    predicted = model.predict(IDS, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    fit(model)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    model.load_weights(tmp_path / "model.weights.h5")
    for each in (loaded, model):
        assert table_of(each).size() == 0
        np.testing.assert_array_equal(each.predict(IDS, verbose=0), predicted)


class WithSpare(het_tf.keras.Model):
    """One layer that its call uses, and one that nothing has called."""

    def __init__(self):
        super().__init__()
        self.used = het_tf.layers.HetEmbedding(2, seed=11, name="users")
        self.spare = het_tf.layers.HetEmbedding(2, name="spare")
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(keras.ops.sum(self.used(inputs), axis=1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_one_file", [True, False])
def test_a_layer_that_nothing_has_called_has_nothing_to_save(tmp_path, in_one_file):
    model, loaded = WithSpare(), WithSpare()
    for each in (model, loaded):
        each.compile("sgd", "mse")
        fit(each)
    where = {} if in_one_file else {"max_shard_size": 1.0}
    path = tmp_path / ("model.weights.h5" if in_one_file else "model.weights.json")
    model.save_weights(path, **where)
    fit(loaded)
    loaded.load_weights(path)
    for one, other in zip(sorted_rows(loaded), sorted_rows(model), strict=True):
        np.testing.assert_array_equal(one, other)
    model.spare.flush()
    with pytest.raises(ValueError, match="layer spare has no table until it is built or called"):
        model.spare.cache_stats()
    loaded.spare(IDS)
    before = sorted_rows(loaded)
    with pytest.raises(ValueError, match="no rows for the table of layer spare"):
        loaded.load_weights(path)
    for one, other in zip(sorted_rows(loaded), before, strict=True):
        np.testing.assert_array_equal(one, other)
    model.spare(IDS)
    model.save_weights(path, **where)
    with pytest.raises(ValueError, match="layer spare has no table until it is built or called"):
        WithSpare().spare.load_own_variables({"table": 0})


def test_copies_of_layers_have_rows_of_their_own():
    """By `copy.deepcopy` and `pickle`, for which Keras saves and loads."""
    for copied in (copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))):
        layer = het_tf.layers.HetEmbedding(2, seed=11)
        assert not copied(layer).built
        layer(IDS)
        layer.table.assign([5], [[1.0, 2.0]])
        other = copied(layer)
        np.testing.assert_array_equal(other(IDS), layer(IDS))
        other.table.assign([5], [[3.0, 4.0]])
        np.testing.assert_array_equal(layer.table.lookup([5]), [[1.0, 2.0]])


def test_a_seed_that_was_drawn_and_a_rate_that_was_assigned_are_saved(tmp_path):
    """Rows never updated are not in the file, so they must come out of the seed again."""
    model, other = (build(optimizers.SGD(0.1), seed=None) for _ in range(2))
    assert (table_of(model).lookup([1]) != table_of(other).lookup([1])).any()
    model.get_layer("users").learning_rate = 0.25
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(table_of(loaded).lookup([1]), table_of(model).lookup([1]))
    assert float(loaded.get_layer("users").learning_rate.value) == 0.25


CONFIGS = [
    {},
    {"optimizer": optimizers.Adam(SCHEDULE, beta_1=0.5), "seed": -3, "mask_zero": True},
    {"cache": het_tf.CacheConfig(capacity=10, policy="lru", staleness=None, clock="lamport")},
    {"cache": het_tf.CacheConfig(capacity=10, read_bound=0, write_bound=None)},
    {"embeddings_initializer": keras.initializers.TruncatedNormal(0.1, 0.2), "nonfinite": "skip"},
    {"embeddings_initializer": "zeros", "name": "users", "dtype": "mixed_bfloat16"},
]


def test_config_round_trip():
    for arguments in CONFIGS:
        layer = het_tf.layers.HetEmbedding(4, **{"optimizer": optimizers.SGD(0.3), **arguments})
        config = layer.get_config()
        again = het_tf.layers.HetEmbedding.from_config(json.loads(json.dumps(config)))
        assert again.get_config() == config
        assert again.cache == layer.cache
        assert again.optimizer.spec() == layer.optimizer.spec()
        serialized = keras.saving.serialize_keras_object(layer)
        assert keras.saving.deserialize_keras_object(serialized).get_config() == config
        if "cache" in arguments:
            assert again.cache == arguments["cache"]


@pytest.mark.parametrize("model_class", [keras.Model, het_tf.keras.Model])
def test_what_has_no_place_for_the_table_says_what_has(model_class, tmp_path):
    inputs = keras.Input((3,), dtype="int64")
    embedded = het_tf.layers.HetEmbedding(2, optimizer="sgd", name="users")(inputs)
    model = model_class(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(embedded)))
    model.compile("sgd", "mse")
    fit(model)
    values = [variable.value.numpy() for variable in model.weights]
    restore = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    for ask in (
        model.get_weights,
        lambda: model.set_weights(values),
        lambda: model.get_layer("users").get_weights(),
        lambda: model.save(tmp_path / "model.h5"),
        lambda: model.fit(IDS, LABELS, callbacks=[restore], verbose=0),
    ):
        with pytest.raises(ValueError, match=r"layer users is no Keras weight.*save_weights"):
            ask()
    with pytest.raises(ValueError, match=r"filename must end in `.weights.h5`.*/other\.h5"):
        model.save_weights(tmp_path / "other.h5")
    before = sorted_rows(model)
    model.save_weights(tmp_path / "model.weights.h5")
    model.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(sorted_rows(model)[1], before[1])


def test_another_optimizer_takes_the_values_and_starts_with_fresh_slots(tmp_path, caplog):
    model = build(optimizers.SGD(0.1))
    fit(model)
    model.save_weights(tmp_path / "model.weights.h5")
    other = build(optimizers.Adagrad(0.1, initial_accumulator_value=0.5))
    fit(other, epochs=1)
    with caplog.at_level(logging.WARNING, logger="absl"):
        other.load_weights(tmp_path / "model.weights.h5")
    assert "was saved with optimizer 'sgd" in caplog.text
    assert "values are kept, and the slots of 'adagrad" in caplog.text
    keys, values, slots, clocks = sorted_rows(other)
    saved = sorted_rows(model)
    for one, two in ((keys, saved[0]), (values, saved[1]), (clocks, saved[3])):
        np.testing.assert_array_equal(one, two)
    assert slots.shape == values.shape
    assert (slots == 0.5).all()


def test_weights_of_another_width_are_refused(tmp_path):
    model = build(optimizers.SGD(0.1))
    fit(model)
    other = het_tf.layers.HetEmbedding(3)
    other.build()
    for context in (contextlib.nullcontext(), het_tf.checkpoint.rows_in(tmp_path)):
        store = {}
        with context:
            model.get_layer("users").save_own_variables(store)
        with pytest.raises(ValueError, match="rows of 2 columns, the table 3"):
            other.load_own_variables(store)
    assert other.table.size() == 0


class StopAfter(keras.callbacks.Callback):
    def __init__(self, epoch: int):
        super().__init__()
        self.last = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch > self.last:
            raise KeyboardInterrupt


@pytest.mark.exhaustive
def test_fit_goes_on_where_backup_and_restore_stopped(tmp_path):
    keras.utils.set_random_seed(1)
    whole = build(optimizers.Adam(0.1))
    fit(whole, epochs=4)
    for stop in (1, 4):
        keras.utils.set_random_seed(stop)
        model = build(optimizers.Adam(0.1))
        callbacks = [keras.callbacks.BackupAndRestore(tmp_path / "backup"), StopAfter(stop)]
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(
                IDS,
                LABELS,
                batch_size=1,
                epochs=4,
                shuffle=False,
                verbose=0,
                callbacks=callbacks,
            )
    for one, other in zip(sorted_rows(model), sorted_rows(whole), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["keras", "weights.h5"])
def test_rows_beside_the_file(tmp_path, kind):
    """The file holds a pointer, which leads to the rows as long as they are where it says."""
    model, folder = build(optimizers.Adam(0.1)), tmp_path / "rows"
    path = tmp_path / f"model.{kind}"
    save = model.save if kind == "keras" else model.save_weights
    fit(model)
    save(path)
    inside = path.stat().st_size
    fit(model)
    rows = sorted_rows(model)
    with het_tf.checkpoint.rows_in(folder):
        save(path)
    assert path.stat().st_size < inside
    files = sorted(file.name for file in folder.iterdir())
    assert [name.partition(".")[2] for name in files] == ["data-00000-of-00001", "index"]
    assert files[0].startswith("users-")

    def load():
        if kind == "keras":
            return keras.models.load_model(path)
        loaded = build(optimizers.Adam(0.1))
        fit(loaded, epochs=1)
        loaded.load_weights(path)
        return loaded

    for one, other in zip(sorted_rows(load()), rows, strict=True):
        np.testing.assert_array_equal(one, other)
    moved = folder.rename(tmp_path / "moved")
    errors = (ValueError, tf.errors.OpError)  # Keras makes the first of the second
    with pytest.raises(errors, match=rf"users, but a pointer to {folder}/users-"):
        load()
    with het_tf.checkpoint.rows_in(moved):
        loaded = load()
    for one, other in zip(sorted_rows(loaded), rows, strict=True):
        np.testing.assert_array_equal(one, other)
    (moved / files[0]).unlink()
    before = sorted_rows(model)
    with (
        het_tf.checkpoint.rows_in(moved),
        pytest.raises(errors, match="data-00000-of-00001"),
    ):
        model.load_weights(path) if kind == "weights.h5" else load()
    for one, other in zip(sorted_rows(model), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_each_save_beside_the_file_has_a_name_of_its_own_and_stays(tmp_path):
    layer = build(optimizers.SGD(0.1)).get_layer("users")
    stores = [{}, {}]
    for number, store in enumerate(stores):
        layer.table.assign([1], np.full((1, layer.output_dim), number, np.float32))
        with het_tf.checkpoint.rows_in(tmp_path):
            layer.save_own_variables(store)
    assert len(list(tmp_path.glob("*.index"))) == 2
    for number, store in enumerate(stores):
        layer.load_own_variables(store)
        np.testing.assert_array_equal(layer.table.lookup([1]), [[number, number]])


def test_a_pointer_leads_only_into_folders_that_the_program_has_named(tmp_path):
    layer = build(optimizers.SGD(0.1)).get_layer("users")
    layer.table.assign([1], np.ones((1, layer.output_dim), np.float32))
    store = {}
    with het_tf.checkpoint.rows_in(tmp_path / "rows"):
        layer.save_own_variables(store)
    folder = (tmp_path / "rows").rename(tmp_path / "other")
    pointer = np.asarray(store["table"], np.uint8).tobytes().replace(b"/rows/", b"/other/")
    store["table"] = np.frombuffer(pointer, np.uint8)
    with pytest.raises(ValueError, match=rf"in '{folder}': .*rows_in\('{folder}'\)"):
        layer.load_own_variables(store)
    with het_tf.checkpoint.rows_in(folder):
        layer.load_own_variables(store)
    layer.load_own_variables(store)
    assert layer.table.size() == 1


def test_a_config_runs_no_code(subtests):
    code = keras.saving.serialize_keras_object(lambda *_: pytest.fail("it was run"))
    arguments = ["embeddings_initializer", "embeddings_regularizer", "embeddings_constraint"]
    for argument in [*arguments, "optimizer"]:
        config = het_tf.layers.HetEmbedding(2).get_config() | {argument: code}
        with (
            subtests.test(argument),
            pytest.raises((TypeError, ValueError), match=r"safe_mode|Could not interpret"),
        ):
            het_tf.layers.HetEmbedding.from_config(config)


@pytest.mark.parametrize("file", ["model.weights.h5", "model.keras"])
def test_a_full_disk_leaves_what_was_there(tmp_path, file):
    ids = keras.Input((1,), dtype="int64")
    embedding = het_tf.layers.HetEmbedding(64, name="rows")
    model = het_tf.keras.Model(ids, embedding(ids))
    model.compile("sgd", "mse")
    save = model.save if file.endswith(".keras") else model.save_weights
    save(tmp_path / file)
    before = (tmp_path / file).read_bytes()
    values = np.random.default_rng(1).normal(size=(20_000, 64)).astype(np.float32)
    embedding.table.assign(np.arange(20_000), values)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path / file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_bytes() == before
    np.testing.assert_array_equal(embedding.table.lookup(np.arange(20_000)), values)
    save(tmp_path / file)
    assert (tmp_path / file).stat().st_size > values.nbytes / 2
