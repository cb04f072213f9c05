"""HetParameterServerStrategy and ClosureRunner on real processes."""

from __future__ import annotations

import collections
import threading
import time

import pytest
import small_models as sm
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf.distribute.closure_runner import ClosureRunner
from het_tf.distribute.worker_state import report_ops
from het_tf.runtime.broadcast import cluster_devices, visit


def test_is_a_parameter_server_strategy(strategy, cluster):
    assert isinstance(strategy, tf.distribute.ParameterServerStrategy)
    assert (strategy.num_workers, strategy.num_ps) == (3, 2)
    assert strategy.coordinator is strategy.coordinator
    assert strategy.worker_device(2) == "/job:worker/replica:0/task:2/device:CPU:0"
    with strategy.scope():
        variable = tf.Variable(1.0)
    assert "/job:ps" in variable.device


@pytest.mark.parametrize("index", [-1, 3])
def test_names_a_worker_that_is_not_there(strategy, index):
    with pytest.raises(ValueError, match=f"no worker {index}: the cluster has 3 worker tasks"):
        strategy.worker_device(index)


def test_log_and_process_of_a_task(cluster):
    while "worker 1 serves" not in cluster.log("worker", 1):  # It says so a little after it does.
        assert cluster.process("worker", 1).poll() is None
        time.sleep(0.01)
    assert cluster.process("ps", 0).poll() is None
    with pytest.raises(ValueError, match="no task ps 2 in this cluster"):
        cluster.process("ps", 2)


def new_embedding(strategy, **arguments):
    """Its updates stay in the caches until they are flushed."""
    with strategy.scope():
        cache = het_tf.CacheConfig(100, staleness=None)
        arguments = {"optimizer": "sgd", **arguments}
        embedding = het_tf.layers.HetEmbedding(2, cache=cache, **arguments)
        embedding.build()
    return embedding


def update(embedding, ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(embedding(ids))
    train_rows(tape, loss, embedding)


def test_run_on_worker_sees_the_resources_of_closures(strategy):
    embedding = new_embedding(strategy)

    @tf.function
    def train():
        update(embedding, tf.constant([1, 2, 3]))
        return tf.distribute.coordinator.experimental_get_current_worker_index()

    runs = [0] * strategy.num_workers
    with ClosureRunner(strategy) as runner:
        for _ in range(30):
            runner.schedule(train, (), None)
            if not runner.has_room:
                runs[runner.wait()[1]] += 1
        while runner.in_flight:
            runs[runner.wait()[1]] += 1
    for worker, count in enumerate(runs):
        report = strategy.run_on_worker(worker, tf.function(embedding.worker_cache.report_op))
        assert "/job:localhost" in report.device
        task, _, *counters = report.numpy().tolist()
        counted = dict(zip(embedding.worker_cache.counter_names, counters, strict=True))
        assert (task, counted["pending"], counted["updates"]) == (worker, 3 * count, 3 * count)


def test_run_on_worker_runs_plain_functions(strategy):
    result = strategy.run_on_worker(
        1, lambda a: {"sum": tf.add(a, 1.0), "where": tf.add(a, 1.0).device}, 2.0
    )
    assert "/job:worker/replica:0/task:1" in result["where"]
    assert float(result["sum"]) == 3.0


def test_flush_reaches_every_worker(strategy):
    before = strategy.held.caches
    embedding = new_embedding(strategy)
    cache = embedding.worker_cache
    strategy.held.register_cache(cache)  # again
    assert strategy.held.caches == (*before, cache)

    @tf.function
    def train():
        update(embedding, tf.range(5))
        return report_ops([cache])

    with ClosureRunner(strategy) as runner:
        for i in range(20):
            runner.schedule(train, (), i)
            while not runner.has_room:
                strategy.held.record_cache_reports([cache], runner.wait()[1])
        while runner.in_flight:
            strategy.held.record_cache_reports([cache], runner.wait()[1])
    reports = strategy.held.last_cache_reports(cache)
    assert reports
    assert sum(report.pending for report in reports.values()) == 100
    strategy.flush()
    flushed = strategy.held.last_cache_reports(cache)
    assert sorted(flushed) == list(range(strategy.num_workers))
    assert all(report.pending == 0 for report in flushed.values())
    for worker, report in reports.items():
        assert flushed[worker].cache_id == report.cache_id
        assert flushed[worker].updates == report.updates
    assert embedding.table.export().clocks.tolist() == 5 * [20]


def test_runner_hands_back_every_result_once(strategy):
    @tf.function
    def square(x):
        return x * x

    results = {}
    with ClosureRunner(strategy) as runner:
        for i in range(50):
            runner.schedule(square, (tf.constant(i),), i)
            assert runner.in_flight <= 2 * strategy.num_workers
            while not runner.has_room:
                tag, value = runner.wait()
                assert tag not in results
                results[tag] = int(value)
        while runner.in_flight:
            tag, value = runner.wait()
            results[tag] = int(value)
    assert results == {i: i * i for i in range(50)}
    assert strategy.idle()


def test_join_waits_for_what_a_runner_schedules(strategy, monkeypatch):
    """Or else a flush would leave out what a step adds meanwhile, and a checkpoint would, too."""
    schedule, joined = strategy.coordinator.schedule, threading.Event()

    def slow(*args, **kwargs):
        joined.wait(1)  # It cannot be, but where scheduling goes on while others join.
        return schedule(*args, **kwargs)

    monkeypatch.setattr(strategy.coordinator, "schedule", slow)
    with strategy.scope():
        steps = tf.Variable(0)

    @tf.function
    def step():
        return steps.assign_add(1)

    with ClosureRunner(strategy) as runner:
        runner.schedule(step, (), None)
        strategy.join()
        assert int(steps) == 1
        joined.set()


def test_runner_raises_what_a_closure_raised(strategy):
    @tf.function
    def fail(i):
        tf.debugging.assert_less(i, 5, message="it is too large")
        return i

    def run():
        with ClosureRunner(strategy) as runner:
            for i in range(20):
                runner.schedule(fail, (tf.constant(i),), i)
                while not runner.has_room:
                    runner.wait()
            while runner.in_flight:
                runner.wait()

    with pytest.raises(tf.errors.InvalidArgumentError, match="it is too large"):
        run()
    assert strategy.idle()  # Nothing is left of it, so the next closure runs.
    with ClosureRunner(strategy) as runner:
        runner.schedule(fail, (tf.constant(1),), "again")
        assert runner.wait() == ("again", 1)


@pytest.mark.parametrize("more", [0, 20])  # Scheduling may be told of the error, or waiting.
def test_runner_raises_what_a_closure_raised_and_not_what_was_cancelled_with_it(strategy, more):
    with strategy.scope():
        started = tf.Variable(0)

    @tf.function
    def fails():
        tf.debugging.assert_equal(started.assign(1), 2, "as it should")

    def run():
        with ClosureRunner(strategy) as runner:
            runner.schedule(fails, (), None)
            while not started.read_value():
                time.sleep(0.01)
            for i in range(more):
                runner.schedule(tf.identity, (i,), i)
            raise tf.errors.CancelledError(None, None, "a function of this thread")

    with pytest.raises(tf.errors.InvalidArgumentError, match="as it should"):
        run()
    assert strategy.idle()


def test_explain_leaves_other_errors_alone(strategy):
    for error in (ValueError("x"), tf.errors.InvalidArgumentError(None, None, "bad shape")):
        assert strategy.explain(error) is error


def test_a_server_that_lacks_what_it_was_given_to_keep_was_restarted(strategy, cluster):
    lacks = "Unable to find the relevant tensor remote_handle: Op ID: 7, Output num: 0"
    error = tf.errors.InvalidArgumentError(None, None, f"/job:ps/replica:0/task:1: {lacks}")
    explained = strategy.explain(error)
    assert isinstance(explained, tf.errors.UnavailableError)
    address = cluster.addresses["ps"][1]
    expected = f"Parameter server /job:ps/task:1 at {address} was restarted or unreachable"
    assert str(explained).startswith(expected)
    assert lacks in str(explained)


def test_a_worker_that_fails_of_the_end_of_another_is_asked_again(strategy):
    calls = collections.Counter()

    def flush():
        device = tf.zeros([]).device
        calls[device] += 1
        if calls[device] < 3 and "task:0" in device:
            raise tf.errors.UnavailableError(None, None, "/job:worker/task:1 is gone")
        return tf.constant(calls[device])

    workers = cluster_devices("worker")
    found = visit(workers, flush, strategy.health.is_lost)
    assert [int(found[device]) for device in workers] == [3, 1, 1]


def test_a_worker_that_always_fails_of_the_end_of_another_is_not_passed_over(strategy):
    def flush():
        raise tf.errors.UnavailableError(None, None, "/job:worker/task:1 is gone")

    with pytest.raises(tf.errors.UnavailableError, match="is gone"):
        visit(cluster_devices("worker")[:1], flush, strategy.health.is_lost)


def test_batches_have_to_be_the_same_for_every_run(strategy):
    strategy.exactly_once = True
    try:
        with strategy.scope():
            model = sm.make_id_counter(het_tf.keras.Model, 10)
        with pytest.raises(ValueError, match="the batches of a closure must be the same"):
            model.fit(lambda context: sm.id_dataset(range(10), 5), verbose=0)
    finally:
        strategy.exactly_once = False


def test_a_manager_is_a_checkpoint_manager(strategy):
    with pytest.raises(TypeError, match=r"must be a .* het_tf\.checkpoint\.Manager, not 'f"):
        strategy.restore_or_initialize("folder")
