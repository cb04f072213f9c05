"""The parts of examples/ctr that need no cluster: the model, the meter, the table, the picture."""

import importlib.util
import pathlib

import keras
import numpy as np
import pytest
from schedules import KEYS

import het_tf
from het_tf.datasets import generated_movielens, movielens
from het_tf.datasets.movielens import COLUMNS, PAD, Column

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "ctr"


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_ctr_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


model = load("model")


class Recorder(keras.layers.Layer):
    """An embedding whose vectors are all ones but for padding, and that keeps the keys."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def call(self, keys):
        self.keys = keras.ops.convert_to_numpy(keys)
        return keras.ops.ones((*keys.shape, self.dim))

    def compute_output_spec(self, keys):
        return keras.KerasTensor((*keys.shape, self.dim), dtype="float32")


def test_ids_of_different_columns_get_different_keys():
    columns = [Column("a", 10), Column("b", 10), Column("c", 10, length=2)]
    tables = {}

    def embedding(name, dim):
        tables[name] = Recorder(dim)
        return tables[name]

    built = model.build_model(embedding, columns, 4, crosses=[("a", "b")])
    built({"a": np.array([3]), "b": np.array([3]), "c": np.array([[3, PAD]])})
    keys = [3, 2**40 + 3, 2 * 2**40 + 3, 2 * 2**40 + PAD]
    assert tables["deep"].keys.tolist() == [keys]
    assert tables["wide"].keys.tolist() == [[*keys, 3 * 2**40 + 3 * 2**20 + 3]]
    assert tables["wide"].keys.dtype == np.int64


def test_keys_are_exact():
    table = Recorder(1)
    built = model.build_model(lambda name, dim: table, [Column("a", 1), Column("b", 1)], crosses=[])
    keys = np.array([key for key in KEYS if 0 <= key < 2**40])
    built({"a": keys, "b": keys})
    assert table.keys.tolist() == np.stack([keys, keys + 2**40], axis=1).tolist()


def test_padding_has_no_say():
    layers = []

    def embedding(name, dim):
        layer = het_tf.layers.HetEmbedding(dim, embeddings_initializer="normal", seed=1, name=name)
        layers.append(layer)
        return layer

    columns = [Column("a", 10), Column("list", 10, length=3)]
    built = model.build_model(embedding, columns, 4, crosses=[])
    lists = np.array([[7, PAD, PAD], [PAD, 7, 7], [7, 7, 8]])
    one, repeated, other = np.asarray(built({"a": np.array([1, 1, 1]), "list": lists}))
    assert one == pytest.approx(repeated)
    assert one != pytest.approx(other)


@pytest.mark.parametrize("kind", model.MODELS)
def test_trains_without_a_cluster(kind):
    features, label = generated_movielens.generate(COLUMNS, PAD)
    rows = {name: ids[:8_000] for name, ids in features.items()}, label[:8_000].astype(np.float32)
    keras.utils.set_random_seed(1)

    def embedding(name, dim):
        optimizer = het_tf.optimizers.RowWiseAdagrad(0.1)
        return het_tf.layers.HetEmbedding(dim, optimizer=optimizer, seed=1, name=name)

    built = model.build_model(embedding, COLUMNS, dim=8, kind=kind)
    built.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    batches = movielens.batches(rows, 256, shuffle_seed=1)
    history = built.fit(batches, epochs=6, verbose=0).history
    assert history["auc"][-1] > 0.6
    assert history["loss"][-1] < history["loss"][0]


@pytest.fixture
def report():
    pytest.importorskip("matplotlib")
    return load("report")


@pytest.fixture
def runs(report):
    baseline = report.Run("no cache", [1000, 2000], [0.7, 0.6], [0.6, 0.7], 1000.0)
    baseline.stats = {"hits": 0, "misses": 90, "bytes_up": 4 * 10**8, "bytes_down": 10**9}
    baseline.stats["messages"] = 5000
    cached = report.Run("HET cache", [1000, 2000], [0.7, 0.6], [0.6, 0.69], 2500.0)
    cached.stats = {"hits": 81, "misses": 9, "bytes_up": 10**8, "bytes_down": 0, "messages": 1000}
    return baseline, cached


def test_table_shows_both_runs_and_the_gain(report, runs):
    words = [line.split() for line in report.table(*runs).splitlines()]
    assert words[2:5] == [
        ["AUC", "(test)", "0.7000", "0.6900"],
        ["examples/s", "1,000", "2,500", "2.5x"],
        ["hit", "rate", "of", "keys", "0.0", "%", "90.0", "%"],
    ]
    assert words[5] == ["MB", "of", "rows", "up", "400.0", "100.0", "4.0x"]
    assert words[6][:6] == ["MB", "of", "rows", "down", "1,000.0", "0.0"]
    assert words[7] == ["messages", "5,000", "1,000", "5.0x"]


def test_says_what_the_bytes_take_on_a_network(report, runs):
    said = report.on_a_network(*runs, workers=2)
    assert "each worker 5.6 s with no cache and 0.4 s with HET cache" in said.replace("\n", " ")


def test_plot_is_a_png(report, runs, tmp_path):
    report.plot(runs, tmp_path / "curve.png", "two runs")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_meter_counts_training_and_leaves_evaluation_out(report, monkeypatch):
    clock, stats, run = [0.0], {"messages": 0}, report.Run("run")
    monkeypatch.setattr(report.time, "perf_counter", lambda: clock[0])
    meter = report.Meter(run, 600, lambda: dict(stats))

    def spend(seconds, messages):
        clock[0] += seconds
        stats["messages"] += messages

    for epoch, seconds in enumerate((100, 2, 4)):  # the first is slow: TensorFlow traces
        meter.on_epoch_begin(epoch)
        spend(seconds, 10)
        meter.on_test_begin()
        spend(1000, 7)
        meter.on_epoch_end(epoch, {"loss": 0.5, "val_auc": 0.6})
    assert run.examples == [600, 1200, 1800]
    assert run.examples_per_s == pytest.approx(1200 / 6)
    assert run.stats == {"messages": 30}
