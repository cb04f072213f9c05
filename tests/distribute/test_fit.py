"""`fit` on three workers and two parameter servers."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
import small_models as sm
import tensorflow as tf

import het_tf.keras


@pytest.fixture
def classifier(strategy):
    with strategy.scope():
        model = sm.make_classifier(het_tf.keras.Model)
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy", "auc"])
    return model


@pytest.fixture(scope="module")
def id_counter(strategy):
    with strategy.scope():
        return sm.make_id_counter(het_tf.keras.Model, 100, steps_per_execution=3)


def test_learns_and_counts_its_steps(classifier):
    x, y = sm.make_data(960)
    before = classifier.get_weights()
    start = time.monotonic()
    history = classifier.fit(x, y, batch_size=32, epochs=4, verbose=0)
    seconds = time.monotonic() - start
    losses = history.history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    assert history.history["auc"][-1] > 0.9
    assert all(np.any(a != b) for a, b in zip(before, classifier.get_weights(), strict=True))
    assert int(classifier.optimizer.iterations.numpy()) == 4 * 30
    assert all("/job:ps" in v.value.device for v in classifier.variables)
    # All examples of the epochs, in less than the time of fit.
    assert sum(960 / rate for rate in history.history["examples_per_s"]) < seconds


def counts_after_fit(model, *args, **kwargs):
    model.fit(*args, verbose=0, **kwargs)
    return model.counter.counts.numpy().astype(int).tolist()


def test_every_batch_of_a_dataset_once_per_epoch(id_counter):
    # 14 batches, the last one smaller, neither divisible by the steps per closure nor the workers.
    dataset = sm.id_dataset(range(97), 7).unbatch().shuffle(97).batch(7)
    counts = counts_after_fit(id_counter, dataset, epochs=2)
    assert counts == 97 * [1] + 3 * [0]


def test_every_example_of_arrays_once_per_epoch(id_counter):
    ids = np.arange(50, dtype=np.float32).reshape(-1, 1)
    counts = counts_after_fit(id_counter, ids, ids, batch_size=8, epochs=2)
    assert counts == 50 * [1] + 50 * [0]


def test_every_share_of_a_function_once_per_epoch(id_counter):
    # Shares of 0, 1 and 60 examples: empty, a part of a closure, and many closures.
    shares = [range(0), range(1), range(1, 61)]

    def share(context):
        assert context.num_input_pipelines == 3
        return sm.id_dataset(shares[context.input_pipeline_id], 4)

    counts = counts_after_fit(id_counter, share, epochs=2)
    assert counts == 61 * [1] + 39 * [0]


@pytest.mark.parametrize("takes_none", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_default_says_whether_a_function_takes_a_context(id_counter, takes_none):
    dataset = sm.id_dataset(range(70), 4)

    def share(context=None):
        return dataset.shard(3, context.input_pipeline_id)

    given = share if takes_none else lambda ds=dataset: ds
    assert counts_after_fit(id_counter, given, epochs=2) == 70 * [1] + 30 * [0]


@pytest.mark.exhaustive
def test_function_of_a_context_may_use_what_was_made_in_the_scope(id_counter, strategy):
    """As TensorFlow's guide has it: workers have a copy each of a table that is made there."""
    words = [f"word {i}" for i in range(32)]
    ids = np.arange(32, dtype=np.float32).reshape(-1, 1)
    with strategy.scope():
        layer = keras.layers.StringLookup(vocabulary=words, num_oov_indices=0)
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(words, ids[:, 0]), -1.0
        )

    def share(context, look_up):
        dataset = tf.data.Dataset.from_tensor_slices((words, ids)).batch(4)
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.map(lambda x, y: (tf.reshape(look_up(x), [-1, 1]), y))

    for look_up in (lambda x: tf.cast(layer(x), tf.float32), table.lookup):
        id_counter.fit(lambda context, f=look_up: share(context, f), verbose=0)
        counts = id_counter.counter.counts.numpy()
        assert counts[:32].tolist() == 32 * [1]
        predicted = id_counter.predict(lambda context, f=look_up: share(context, f), verbose=0)
        weight = id_counter.get_weights()[0]
        np.testing.assert_allclose(predicted, ids * weight, rtol=1e-6)


def test_datasets_of_several_types_are_an_error(id_counter):
    def share(context):
        ids = range(4) if context.input_pipeline_id else range(8)
        dataset = sm.id_dataset(ids, 4)
        return dataset.map(lambda x, y: (x, y if context.input_pipeline_id else (y, y)))

    with pytest.raises(ValueError, match="datasets of several types for different workers"):
        id_counter.fit(share, verbose=0)


def test_equal_random_numbers_on_all_workers_are_warned_of(id_counter, caplog):
    def shuffled(context):
        return sm.id_dataset(range(8), 4).shuffle(2)

    def drawn(context, seed=None):
        return shuffled(context).map(lambda x, y: (x, y * tf.random.uniform([], seed=seed)))

    tf.random.set_seed(1)
    try:
        id_counter.fit(shuffled, verbose=0)
        id_counter.fit(lambda context: drawn(context, context.input_pipeline_id), verbose=0)
        assert "draws random numbers" not in caplog.text
        id_counter.fit(drawn, verbose=0)
        assert "the function given as data draws random numbers" in caplog.text
    finally:
        tf.random.set_seed(None)


def test_function_may_share_out_a_dataset_made_before(id_counter):
    dataset = sm.id_dataset(range(70), 4)
    counts = counts_after_fit(
        id_counter, lambda context: dataset.shard(3, context.input_pipeline_id), epochs=2
    )
    assert counts == 70 * [1] + 30 * [0]
    generated = tf.data.Dataset.from_generator(
        lambda: iter(()), output_signature=dataset.element_spec
    )
    with pytest.raises(ValueError, match="only this process can read"):
        id_counter.fit(lambda context: generated, verbose=0)


@pytest.mark.parametrize("seed", [3, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_every_batch_of_a_function_without_argument_once_per_epoch(id_counter, seed):
    def shuffled():
        return sm.id_dataset(range(50), 1).unbatch().shuffle(50, seed=seed).batch(4)

    counts = counts_after_fit(id_counter, shuffled, epochs=2)
    assert counts == 50 * [1] + 50 * [0]
    id_counter.evaluate(shuffled, verbose=0)
    assert id_counter.counter.counts.numpy().tolist() == counts
    id_counter.fit(sm.id_dataset(range(9), 3), validation_data=shuffled, verbose=0)
    assert id_counter.counter.counts.numpy().tolist() == counts


def test_shuffling_of_a_function_is_another_in_every_epoch(id_counter):
    seen = []
    note = keras.callbacks.LambdaCallback()
    note.on_epoch_end = lambda *_: seen.append(id_counter.counter.counts.numpy().tolist())

    def some():
        return sm.id_dataset(range(50), 1).unbatch().shuffle(50).take(9).batch(1)

    id_counter.fit(some, epochs=2, callbacks=[note], verbose=0)
    assert sum(seen[0]) == sum(seen[1]) == 9
    assert seen[0] != seen[1]


@pytest.mark.exhaustive
def test_function_that_hands_on_a_dataset_is_that_dataset(id_counter):
    dataset = sm.id_dataset(range(50), 1).unbatch().shuffle(50).batch(4)
    counts = counts_after_fit(id_counter, lambda: dataset, epochs=2)
    assert counts == 50 * [1] + 50 * [0]
    id_counter.evaluate(lambda: dataset, verbose=0)
    assert id_counter.counter.counts.numpy().tolist() == counts
    id_counter.fit(lambda: dataset, steps_per_epoch=26, verbose=0)
    assert id_counter.counter.counts.numpy().sum() == pytest.approx(100, abs=6)


def test_steps_per_epoch_repeats_the_data(id_counter):
    iterations = id_counter.optimizer.iterations
    for x in (
        lambda context: sm.id_dataset(range(12), 2),
        np.arange(12, dtype=np.float32).reshape(-1, 1),
    ):
        before = int(iterations.numpy())
        y = x if isinstance(x, np.ndarray) else None
        batch_size = 2 if y is not None else None
        counts = counts_after_fit(
            id_counter, x, y, batch_size=batch_size, epochs=2, steps_per_epoch=20
        )
        assert sum(counts) == 40
        assert int(iterations.numpy()) - before == 40


def test_an_epoch_of_steps_begins_where_the_one_before_ended(id_counter):
    """Where this process deals the batches out, as with `exactly_once` those of a dataset."""
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: seen.append(np.flatnonzero(id_counter.counter.counts).tolist())
    )
    ids = np.arange(80, dtype=np.float32).reshape(-1, 1)
    counts = {"batch_size": 2, "epochs": 2, "steps_per_epoch": 20, "shuffle": False}
    id_counter.fit(ids, ids, callbacks=[note], verbose=0, **counts)
    assert seen == [list(range(40)), list(range(40, 80))]


def test_each_worker_takes_batches_of_all_of_a_dataset_that_repeats(id_counter, strategy):
    """In turn: there are 4, of which none is one worker's own."""
    counts = counts_after_fit(id_counter, sm.id_dataset(range(8), 2), steps_per_epoch=96)
    assert sum(counts) == 2 * 96
    assert counts[:8] == pytest.approx(8 * [24], abs=strategy.num_workers)


def test_evaluating_within_an_epoch_leaves_its_metrics(id_counter):
    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(sm.id_dataset(range(8), 4), verbose=0)

    fitted = id_counter.fit(sm.id_dataset(range(24), 4), verbose=0, callbacks=[Evaluate()])
    assert fitted.history["ids"] == [24]


@pytest.mark.exhaustive
def test_dataset_of_this_process_is_sent_to_the_workers(id_counter):
    def generate():
        for i in range(30):
            yield np.full([2, 1], i, np.float32), np.full([2, 1], i, np.float32)

    spec = tf.TensorSpec([2, 1], tf.float32)
    dataset = tf.data.Dataset.from_generator(generate, output_signature=(spec, spec))
    assert counts_after_fit(id_counter, dataset)[:31] == 30 * [2] + [0]
    assert sum(counts_after_fit(id_counter, dataset, steps_per_epoch=40)) == 80


def test_validation_steps_begin_at_the_start_of_the_data(id_counter):
    """As in Keras, so that the epochs' figures can be compared."""

    def share(context):
        first = 30 * context.input_pipeline_id
        return sm.id_dataset(range(first, first + 24), 4)

    seen = []
    note = keras.callbacks.LambdaCallback()
    note.on_test_end = lambda logs=None: seen.extend(np.flatnonzero(id_counter.counter.counts))
    data = sm.id_dataset(range(8), 4)
    id_counter.fit(
        data, epochs=4, validation_data=share, validation_steps=1, callbacks=[note], verbose=0
    )
    assert len(seen) == 16
    assert set(seen) <= {30 * worker + i for worker in range(3) for i in range(4)}


def test_infinite_dataset_needs_steps(id_counter):
    with pytest.raises(ValueError, match="infinite: pass steps_per_epoch"):
        id_counter.fit(sm.id_dataset(range(9), 3).repeat(), verbose=0)


def test_empty_data_is_an_error(id_counter):
    with pytest.raises(ValueError, match="no batches"):
        id_counter.fit(sm.id_dataset(range(0), 3), verbose=0)
    with pytest.raises(ValueError, match="all workers are empty"):
        id_counter.fit(lambda context: sm.id_dataset(range(0), 3), steps_per_epoch=3, verbose=0)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (lambda: 5, TypeError, "must return a tf.data.Dataset, got int"),
        (lambda context: 5, TypeError, "must return a tf.data.Dataset, got int"),
        ((i for i in range(3)), TypeError, "must be a function that returns"),
        ({"a": np.zeros([3, 1]), "b": np.zeros([4, 1])}, ValueError, "same number of examples"),
        (None, TypeError, "got None"),
        (np.array([[1], [None]]), TypeError, "numbers or strings; got objects of NoneType"),
        (iter(sm.id_dataset(range(9), 3)), TypeError, "must be .*; got objects of .*Iterator"),
    ],
)
def test_names_what_is_wrong_with_the_data(id_counter, x, error, message):
    with pytest.raises(error, match=message):
        id_counter.fit(x, verbose=0)


def test_a_dataset_that_is_for_workers_is_for_a_loop(id_counter, strategy):
    dataset = strategy.experimental_distribute_dataset(sm.id_dataset(range(9), 3))
    with pytest.raises(TypeError, match=r"must be a function .*; got objects of ForWorkers"):
        id_counter.fit(dataset, verbose=0)


def test_arguments_that_do_not_go_with_a_dataset(id_counter):
    dataset = sm.id_dataset(range(9), 3)
    with pytest.raises(ValueError, match="`y` cannot be given when the data is a tf"):
        id_counter.fit(dataset, np.zeros(9))
    with pytest.raises(ValueError, match="`batch_size` cannot be given"):
        id_counter.fit(dataset, batch_size=3)
    with pytest.raises(ValueError, match="`batch_size` cannot be given when the data is a func"):
        id_counter.fit(lambda: dataset, batch_size=3)
    with pytest.raises(ValueError, match="validation_split needs arrays"):
        id_counter.fit(dataset, validation_split=0.5)
    with pytest.raises(ValueError, match="validation_split needs arrays"):
        id_counter.fit((batch for batch in dataset), validation_split=0.5)


@pytest.mark.parametrize("steps", [0, -1, 2.5, "many"])
def test_bad_steps_per_execution(steps):
    with pytest.raises(ValueError, match="steps_per_execution must be"):
        sm.make_classifier(het_tf.keras.Model).compile("sgd", steps_per_execution=steps)


def test_data_that_fails_reports_its_error(id_counter, strategy):
    dataset = sm.id_dataset(range(40), 2).map(
        lambda x, y: (tf.debugging.check_numerics(1.0 / (x - 21.0), "bad x"), y)
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad x"):
        id_counter.fit(dataset, steps_per_epoch=40, verbose=0)
    assert strategy.idle()
    assert counts_after_fit(id_counter, sm.id_dataset(range(9), 3))[:9] == 9 * [1]
