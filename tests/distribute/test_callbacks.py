"""Keras callbacks on a cluster."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import small_models as sm

import het_tf.keras
from het_tf import top
from het_tf.keras.worker_step.metrics import MetricSums


@pytest.fixture(scope="module")
def model(strategy):
    with strategy.scope():
        made = sm.make_classifier(het_tf.keras.Model)
        made.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], steps_per_execution=4)
    return made


@pytest.fixture(scope="module")
def data():
    return sm.make_data(160)


def test_every_hook_is_called_in_order(model, data):
    recorder = sm.Recorder()
    model.fit(
        *data,
        batch_size=16,
        epochs=4,
        initial_epoch=2,
        validation_data=data,
        validation_freq=2,
        callbacks=[recorder],
        verbose=0,
    )
    calls = recorder.calls
    assert calls[0] == "train_begin"
    assert calls[-1] == "train_end"
    outer = [c for c in calls if "batch" not in c]
    assert outer == [
        "train_begin",
        "epoch_begin 2",
        "epoch_end 2",
        "epoch_begin 3",
        "test_begin",
        "test_end",
        "epoch_end 3",
        "train_end",
    ]
    # 10 steps in closures of 4, 4 and 2, in whichever order they finished.
    first_epoch = calls[calls.index("epoch_begin 2") : calls.index("epoch_end 2")]
    begins = [int(c.split()[1]) for c in first_epoch if c.startswith("batch_begin")]
    ends = [int(c.split()[1]) for c in first_epoch if c.startswith("batch_end")]
    assert len(begins) == len(ends) == 3
    assert begins[0] == 0
    assert ends[-1] == 9
    assert [b - 1 for b in begins[1:]] == ends[:-1]
    assert set(recorder.logs[f"batch_end {ends[0]}"][0]) == {"loss", "mae"}
    logs = {"loss", "mae", "val_loss", "val_mae"}
    assert set(recorder.logs["epoch_end 3"][0]) == logs | {"examples_per_s"}
    last = recorder.logs["epoch_end 2"][0]
    assert last.pop("examples_per_s") > 0
    assert last == pytest.approx(recorder.logs["batch_end 9"][0])


@pytest.mark.parametrize("looks", [False, True])
def test_logs_of_closures_are_made_for_who_looks(model, data, monkeypatch, looks):
    made, seen = [], []
    results = MetricSums.results
    monkeypatch.setattr(MetricSums, "results", lambda sums: made.append(results(sums)) or made[-1])
    hook = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(logs))
    callbacks = [hook] if looks else []
    history = model.fit(*data, batch_size=16, epochs=2, callbacks=callbacks, verbose=0).history
    # Three closures an epoch, and its end.
    assert len(made) == (8 if looks else 2)
    assert seen == ([*made[:3], *made[4:7]] if looks else [])
    assert history["loss"] == [each["loss"] for each in (made[3::4] if looks else made)]


def test_predict_hooks_have_the_outputs_in_order(model, data):
    recorder = sm.Recorder()
    outputs = model.predict(data[0], batch_size=16, callbacks=[recorder], verbose=0)
    assert recorder.calls[0] == "predict_begin"
    assert recorder.calls[-1] == "predict_end"
    batches = [c for c in recorder.calls if c.startswith("predict_batch_end")]
    assert batches == [f"predict_batch_end {i}" for i in (3, 7, 9)]
    seen = [recorder.logs[call][0]["outputs"] for call in batches]
    np.testing.assert_array_equal(np.concatenate(seen), outputs)


def test_early_stopping_and_learning_rate_and_checkpoint(model, data, tmp_path):
    path = tmp_path / "best.weights.h5"
    rates = []
    history = model.fit(
        *data,
        batch_size=16,
        epochs=9,
        validation_data=data,
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.0 if epoch else 0.01),
            keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda *_: rates.append(float(model.optimizer.learning_rate.numpy()))
            ),
        ],
        verbose=0,
    )
    # With a rate of zero the second epoch does not improve on the first.
    assert len(history.history["loss"]) == 2
    assert rates == pytest.approx([0.01, 0.0])
    assert model.stop_training
    weights = model.get_weights()
    model.set_weights([0 * w for w in weights])
    model.load_weights(path)
    assert all(np.array_equal(a, b) for a, b in zip(weights, model.get_weights(), strict=True))
    model.optimizer.learning_rate = 0.1


@pytest.mark.parametrize(
    ("optimizer", "built"),
    [
        pytest.param(het_tf.optimizers.SGD(8.0), "before compile", marks=pytest.mark.exhaustive),
        ("same", "in fit"),
    ],
    ids=["own", "same"],
)
def test_callbacks_move_the_rate_of_embeddings_too(strategy, optimizer, built):
    with strategy.scope():
        layer = het_tf.layers.HetEmbedding(
            1, optimizer=optimizer, embeddings_initializer="zeros", cache=het_tf.CacheConfig(10)
        )
        model = het_tf.keras.Sequential([layer])
        if built == "before compile":
            model.build((None,))
        model.compile(
            keras.optimizers.SGD(0.5), loss=lambda _, predicted: -keras.ops.sum(predicted)
        )
    own = 0.5 if optimizer == "same" else 8

    class HalveAfterTwoSteps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.optimizer.learning_rate = 0.125

    rates = [0.25, 0.5, 0.0, 1.0]
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch])
    ids = np.full(6, 7)
    model.fit(ids, ids * 0.0, batch_size=1, epochs=4, callbacks=[schedule], verbose=0)
    assert layer.table.lookup([7]) == 6 * own * (0.5 + 1 + 0 + 2)
    assert float(layer.learning_rate.numpy()) == (2 * own if optimizer == "same" else own)
    # One closure of two steps at a time, so that the callback comes between them.
    stopped = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5)
    model.fit(
        ids[:2], ids[:2] * 0.0, batch_size=1, callbacks=[stopped, HalveAfterTwoSteps()], verbose=0
    )
    assert float(model.optimizer.learning_rate.numpy()) == 0.125


@pytest.mark.parametrize("when", ["on_train_begin", "on_epoch_begin"])
def test_stopping_before_a_step_has_one_step_made(model, data, when):
    def stop(*_):
        model.stop_training = True

    def stop_later(epoch, logs):
        if epoch == 1:
            stop()

    callback = keras.callbacks.LambdaCallback(
        **{when: stop if when == "on_train_begin" else stop_later}
    )
    before = int(model.optimizer.iterations.numpy())
    history = model.fit(*data, batch_size=16, epochs=3, callbacks=[callback], verbose=0)
    made = int(model.optimizer.iterations.numpy()) - before
    steps = len(data[0]) // 16
    epochs = 1 if when == "on_train_begin" else 2
    assert len(history.epoch) == epochs
    assert (epochs - 1) * steps < made < epochs * steps


def test_stopping_within_an_epoch(model, data):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    before = int(model.optimizer.iterations.numpy())
    recorder = sm.Recorder()
    model.fit(*data, batch_size=2, epochs=5, callbacks=[Stop(), recorder], verbose=0)
    done = int(model.optimizer.iterations.numpy()) - before
    # What was under way is finished and counted, nothing more is begun.
    assert 0 < done < 80
    ends = [c for c in recorder.calls if c.startswith("batch_end")]
    assert ends[-1] == f"batch_end {done - 1}"
    assert "epoch_end 0" in recorder.calls
    assert "epoch_begin 1" not in recorder.calls


def test_csv_logger_has_a_line_per_epoch(model, data, tmp_path):
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    model.fit(*data, batch_size=16, epochs=2, callbacks=[logger], verbose=0)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert lines[0].startswith("epoch,examples_per_s,loss,mae")
    assert len(lines) == 3


def test_tensorboard_writes_events(model, data, tmp_path):
    pytest.importorskip("tensorboard")
    board = keras.callbacks.TensorBoard(tmp_path, update_freq=1, write_graph=True)
    model.fit(*data, batch_size=16, epochs=2, callbacks=[board], verbose=0)
    assert list(tmp_path.rglob("events*"))


def test_progress_bar(model, data, capsys):
    model.fit(*data, batch_size=16, verbose=2)
    out = capsys.readouterr().out
    assert "10/10" in out
    assert "mae" in out


def test_callback_that_raises_ends_fit_and_flushes(model, data, strategy, monkeypatch):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("enough")

    flushed = []
    monkeypatch.setattr(strategy, "flush", lambda **_: flushed.append(strategy.join()))
    with pytest.raises(RuntimeError, match="enough"):
        model.fit(*data, batch_size=16, callbacks=[Fail()], verbose=0)
    assert flushed == [None]
    assert strategy.idle()


def test_a_callback_that_compiles_is_told_when_to(strategy, data):
    with strategy.scope():
        made = sm.make_classifier(het_tf.keras.Model)
        made.compile("sgd", "mse")

    def compile_again(epoch, logs=None):
        with strategy.scope():
            made.compile("adam", "mse")

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=compile_again)
    with pytest.raises(RuntimeError, match=r"compile was called by a callback: .* between two"):
        made.fit(*data, epochs=3, verbose=0, callbacks=[callback])


def test_a_training_that_failed_is_not_shown(model, data, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    shown = []

    def on_epoch_end(epoch, logs):
        shown.extend(top.read_all())
        raise RuntimeError("enough")

    callback = keras.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)
    with pytest.raises(RuntimeError, match="enough"):
        model.fit(*data, batch_size=16, callbacks=[callback], verbose=0)
    assert [each["model"] for each in shown] == [model.name]
    assert not top.read_all()


def test_flush_comes_before_what_needs_it(model, data, strategy, monkeypatch):
    order = []
    monkeypatch.setattr(strategy, "flush", lambda **_: order.append("flush"))

    class Note(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            order.append("epoch_end")

        def on_test_begin(self, logs=None):
            order.append("test")

        def on_predict_begin(self, logs=None):
            order.append("predict")

    model.fit(*data, batch_size=40, validation_data=data, callbacks=[Note()], verbose=0)
    model.predict(data[0], callbacks=[Note()], verbose=0)
    for event in ("epoch_end", "test", "predict"):
        assert "flush" in order[: order.index(event)]
    assert order[order.index("test") - 1] == "flush"
    assert order[order.index("predict") - 1] == "flush"
    assert order[order.index("epoch_end") + 1] == "flush"
